/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Addresses of hosts, as text: which are ours, which lead to others, which ports are free or can
 * be reached.
 *
 * Thread: any; address_resolve() asks the resolver and may take seconds.
 */
#ifndef GRADD_RUN_ADDRESS_H
#define GRADD_RUN_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>

enum { ADDRESS_BYTES = 64 };

/* Is it a numeric address of this machine? */
bool address_is_own(const char *address);
/* Is it an address, and no name? */
bool address_is_numeric(const char *text);
bool address_is_loopback(const char *address);
/* A name's first address, loopback ones last. false: it has none. */
bool address_resolve(const char *name, char out[ADDRESS_BYTES]);
/* Our address towards another, which is numeric. */
bool address_towards(const char *other, char out[ADDRESS_BYTES]);

/* A socket that listens at our address on any free port; -errno. */
int address_listen(const char *address, unsigned *out_port);
/* A port that was free a moment ago; 0: none. */
unsigned address_free_port(const char *address);
/* Connect and close again, within so many milliseconds. 0 or -errno. */
int address_try(const char *address, unsigned port, int timeout_ms);

/* "address:port", with brackets about an address of IPv6. */
void address_join(const char *address, unsigned port, char *out, size_t bytes);

#endif
