/* SPDX-License-Identifier: Apache-2.0 */
#include "base/link_proof.h"

#include <endian.h>
#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

enum {
    LABEL_BYTES = 12, /* "gradd server", "gradd client" */
};

static const char magic[8] = "GRADDLNK";
static const char server_label[] = "gradd server";
static const char client_label[] = "gradd client";

/* As it travels; little endian. */
struct __attribute__((packed)) packed_hello {
    char magic[8];
    uint16_t version, from_node, to_node, stream;
    uint64_t epoch;
    uint8_t link_id[LINK_ID_BYTES];
    uint8_t nonce[LINK_NONCE_BYTES];
};
_Static_assert(sizeof(struct packed_hello) == LINK_HELLO_BYTES, "the layout is fixed");

int link_random(void *out_bytes, size_t n)
{
    uint8_t *at = out_bytes;
    while (n > 0) {
        ssize_t got = getrandom(at, n, 0);
        if (got < 0 && errno != EINTR)
            return -errno;
        if (got > 0) {
            at += got;
            n -= (size_t)got;
        }
    }
    return 0;
}

void link_hello_pack(const struct link_hello *hello, uint8_t out_bytes[LINK_HELLO_BYTES])
{
    struct packed_hello packed = {
        .version = htole16(hello->version),
        .from_node = htole16(hello->from_node),
        .to_node = htole16(hello->to_node),
        .stream = htole16(hello->stream),
        .epoch = htole64(hello->epoch),
    };
    memcpy(packed.magic, magic, sizeof magic);
    memcpy(packed.link_id, hello->link_id, LINK_ID_BYTES);
    memcpy(packed.nonce, hello->nonce, LINK_NONCE_BYTES);
    memcpy(out_bytes, &packed, sizeof packed);
}

int link_hello_unpack(const uint8_t bytes[LINK_HELLO_BYTES], struct link_hello *out_hello)
{
    struct packed_hello packed;
    memcpy(&packed, bytes, sizeof packed);
    if (memcmp(packed.magic, magic, sizeof magic) != 0)
        return -EPROTO;
    *out_hello = (struct link_hello){
        .version = le16toh(packed.version),
        .from_node = le16toh(packed.from_node),
        .to_node = le16toh(packed.to_node),
        .stream = le16toh(packed.stream),
        .epoch = le64toh(packed.epoch),
    };
    memcpy(out_hello->link_id, packed.link_id, LINK_ID_BYTES);
    memcpy(out_hello->nonce, packed.nonce, LINK_NONCE_BYTES);
    return out_hello->version == LINK_VERSION ? 0 : -EPROTONOSUPPORT;
}

/* HMAC-SHA256(secret, label | hello | the server's nonce). */
static int prove(const uint8_t *secret, const char *label, const uint8_t *hello,
                 const uint8_t *nonce, uint8_t out_proof[LINK_PROOF_BYTES])
{
    uint8_t text[LABEL_BYTES + LINK_HELLO_BYTES + LINK_NONCE_BYTES];
    unsigned n = 0;
    memcpy(text, label, LABEL_BYTES);
    memcpy(text + LABEL_BYTES, hello, LINK_HELLO_BYTES);
    memcpy(text + LABEL_BYTES + LINK_HELLO_BYTES, nonce, LINK_NONCE_BYTES);
    if (!HMAC(EVP_sha256(), secret, LINK_SECRET_BYTES, text, sizeof text, out_proof, &n) ||
        n != LINK_PROOF_BYTES)
        return -ENOMEM;
    return 0;
}

static int check(const uint8_t *secret, const char *label, const uint8_t *hello,
                 const uint8_t *nonce, const uint8_t *proof)
{
    uint8_t expected[LINK_PROOF_BYTES];
    int rc = prove(secret, label, hello, nonce, expected);
    if (rc == 0 && CRYPTO_memcmp(expected, proof, sizeof expected) != 0)
        rc = -EACCES;
    OPENSSL_cleanse(expected, sizeof expected);
    return rc;
}

int link_server_answer(const uint8_t secret[LINK_SECRET_BYTES],
                       const uint8_t hello[LINK_HELLO_BYTES], const uint8_t nonce[LINK_NONCE_BYTES],
                       uint8_t out_answer[LINK_ANSWER_BYTES])
{
    memcpy(out_answer, nonce, LINK_NONCE_BYTES);
    return prove(secret, server_label, hello, nonce, out_answer + LINK_NONCE_BYTES);
}

int link_client_proof(const uint8_t secret[LINK_SECRET_BYTES],
                      const uint8_t hello[LINK_HELLO_BYTES],
                      const uint8_t answer[LINK_ANSWER_BYTES], uint8_t out_proof[LINK_PROOF_BYTES])
{
    return prove(secret, client_label, hello, answer, out_proof);
}

int link_check_server(const uint8_t secret[LINK_SECRET_BYTES],
                      const uint8_t hello[LINK_HELLO_BYTES],
                      const uint8_t answer[LINK_ANSWER_BYTES])
{
    return check(secret, server_label, hello, answer, answer + LINK_NONCE_BYTES);
}

int link_check_client(const uint8_t secret[LINK_SECRET_BYTES],
                      const uint8_t hello[LINK_HELLO_BYTES],
                      const uint8_t answer[LINK_ANSWER_BYTES],
                      const uint8_t proof[LINK_PROOF_BYTES])
{
    return check(secret, client_label, hello, answer, proof);
}
