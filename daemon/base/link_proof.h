/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a data connection between two nodes proves that it belongs to an epoch: the epoch's secret,
 * which came over the authenticated links between daemons, keys an HMAC over what the client asks
 * for and a fresh number of the server. Layout of the bytes: proto/PROTOCOL.md.
 *
 * client: hello (56 bytes)                  names the epoch, the two nodes, the stream
 * server: nonce (16) + proof (32)           knows the secret, and has seen this hello
 * client: proof (32)                        knows the secret, and has seen this nonce
 *
 * Pure: no sockets. Thread: any. Invariant: both sides' random numbers enter both proofs, under
 * different labels, so that neither a recorded connection nor a reflected proof is worth anything.
 */
#ifndef GRADD_LINK_PROOF_H
#define GRADD_LINK_PROOF_H

#include <stddef.h>
#include <stdint.h>

enum {
    LINK_VERSION = 1,
    LINK_ID_BYTES = 16,
    LINK_NONCE_BYTES = 16,
    LINK_SECRET_BYTES = 32,
    LINK_PROOF_BYTES = 32,
    LINK_HELLO_BYTES = 56,
    LINK_ANSWER_BYTES = LINK_NONCE_BYTES + LINK_PROOF_BYTES,
};

struct link_hello {
    uint16_t version;
    uint16_t from_node, to_node; /* node ranks */
    uint16_t stream;
    uint64_t epoch;
    uint8_t link_id[LINK_ID_BYTES];  /* of the Layout */
    uint8_t nonce[LINK_NONCE_BYTES]; /* the client's, new for each connection */
};

/* Random bytes from the kernel. 0 or -errno. */
int link_random(void *out_bytes, size_t n);

void link_hello_pack(const struct link_hello *hello, uint8_t out_bytes[LINK_HELLO_BYTES]);
/* 0, -EPROTO: not such a hello, -EPROTONOSUPPORT: another version (out_hello->version is set). */
int link_hello_unpack(const uint8_t bytes[LINK_HELLO_BYTES], struct link_hello *out_hello);

/* The server's answer to the packed hello. 0 or -errno. */
int link_server_answer(const uint8_t secret[LINK_SECRET_BYTES],
                       const uint8_t hello[LINK_HELLO_BYTES], const uint8_t nonce[LINK_NONCE_BYTES],
                       uint8_t out_answer[LINK_ANSWER_BYTES]);
/* The client's last word, given the server's answer. 0 or -errno. */
int link_client_proof(const uint8_t secret[LINK_SECRET_BYTES],
                      const uint8_t hello[LINK_HELLO_BYTES],
                      const uint8_t answer[LINK_ANSWER_BYTES], uint8_t out_proof[LINK_PROOF_BYTES]);

/* The client checks the server's answer. 0, or -EACCES: it does not know the secret. */
int link_check_server(const uint8_t secret[LINK_SECRET_BYTES],
                      const uint8_t hello[LINK_HELLO_BYTES],
                      const uint8_t answer[LINK_ANSWER_BYTES]);
/* The server checks the client's proof; answer is what it sent. 0, or -EACCES. */
int link_check_client(const uint8_t secret[LINK_SECRET_BYTES],
                      const uint8_t hello[LINK_HELLO_BYTES],
                      const uint8_t answer[LINK_ANSWER_BYTES],
                      const uint8_t proof[LINK_PROOF_BYTES]);

#endif
