/* SPDX-License-Identifier: Apache-2.0 */
/*
 * TLS 1.3 with the cluster's key, over a non-blocking socket. OpenSSL's TLS is seen only in
 * peer_tls.c.
 *
 * Thread: loop. Invariant: no byte is given out before both sides have proved that they know the
 * key; there are no certificates, no older versions, no resumption and no early data.
 */
#ifndef GRADD_CONTROL_PEER_TLS_H
#define GRADD_CONTROL_PEER_TLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    PEER_TLS_KEY_BYTES = 32,
    PEER_TLS_FIRST_BYTE = 0x16, /* of a connection: a handshake record */
};

enum peer_tls_side {
    PEER_TLS_CLIENT,
    PEER_TLS_SERVER,
};

struct peer_tls;

/* The key from the cluster's secret. 0 or -ENOMEM. */
int peer_tls_derive_key(const void *secret, size_t bytes, uint8_t out_key[PEER_TLS_KEY_BYTES]);

/* fd is borrowed and outlives the object. NULL: out of memory. */
struct peer_tls *peer_tls_new(int fd, enum peer_tls_side side,
                              const uint8_t key[PEER_TLS_KEY_BYTES]);
/* Says goodbye if the socket takes it. NULL-safe. */
void peer_tls_free(struct peer_tls *tls);

/*
 * Both are to be called again when the socket is ready for what peer_tls_events() says. Bytes (>
 * 0), 0: the other side has ended in order, -EAGAIN, or -errno: it is over, see peer_tls_error().
 */
ssize_t peer_tls_read(struct peer_tls *tls, void *bytes, size_t size);
ssize_t peer_tls_write(struct peer_tls *tls, const void *bytes, size_t n);
/* Go on with the handshake. 0: it is done, -EAGAIN, -errno. Needed before the first read or write.
 */
int peer_tls_handshake(struct peer_tls *tls);

bool peer_tls_is_ready(const struct peer_tls *tls); /* the handshake is done */
/* The last -EAGAIN waits for the socket to become writable. */
bool peer_tls_wants_write(const struct peer_tls *tls);
/* Why it is over, as a part of a sentence: "its cluster key is another one". */
const char *peer_tls_error(const struct peer_tls *tls);

#endif
