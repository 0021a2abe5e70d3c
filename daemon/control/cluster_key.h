/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The secret that the nodes of a cluster share, from a file or a descriptor.
 *
 * Thread: any. Invariant: what was read is wiped; only the key derived from it stays.
 */
#ifndef GRADD_CONTROL_CLUSTER_KEY_H
#define GRADD_CONTROL_CLUSTER_KEY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    CLUSTER_KEY_BYTES = 32,
    CLUSTER_SECRET_MIN = 32,   /* bytes of the secret, white space at its end not counted */
    CLUSTER_SECRET_MAX = 4096, /* bytes that are read */
};

struct cluster_key {
    bool is_set; /* false: key is zero, good for nothing but the loopback interface */
    uint8_t key[CLUSTER_KEY_BYTES];
};

/*
 * Read the secret. From a file: refused when anybody but its owner and root can read or change it.
 * 0, or -errno with *out_error: a sentence.
 */
int cluster_key_read_file(struct cluster_key *key, const char *path, char *out_error, size_t size);
/* From a pipe, up to its end of file; the descriptor is closed. */
int cluster_key_read_fd(struct cluster_key *key, int take_fd, char *out_error, size_t size);

#endif
