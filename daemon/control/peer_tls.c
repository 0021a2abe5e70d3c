/* SPDX-License-Identifier: Apache-2.0 */
#include "control/peer_tls.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>

static const unsigned char identity[] = "gradd";
static const char key_label[] = "gradd cluster key 1\n";
static const unsigned char cipher_id[] = {0x13, 0x01}; /* TLS_AES_128_GCM_SHA256 */

struct peer_tls {
    SSL_CTX *context;
    SSL *ssl;
    uint8_t key[PEER_TLS_KEY_BYTES];
    bool is_ready, is_over, wants_write;
    char error[160];
};

int peer_tls_derive_key(const void *secret, size_t bytes, uint8_t out_key[PEER_TLS_KEY_BYTES])
{
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    bool is_done = hash && EVP_DigestInit_ex(hash, EVP_sha256(), NULL) &&
                   EVP_DigestUpdate(hash, key_label, sizeof key_label - 1) &&
                   EVP_DigestUpdate(hash, secret, bytes) && EVP_DigestFinal_ex(hash, out_key, NULL);
    EVP_MD_CTX_free(hash);
    return is_done ? 0 : -ENOMEM;
}

/* ------------------------------------------------------------------ the key's session */

static SSL_SESSION *make_session(SSL *ssl)
{
    const struct peer_tls *tls = SSL_get_app_data(ssl);
    const SSL_CIPHER *cipher = SSL_CIPHER_find(ssl, cipher_id);
    SSL_SESSION *session = SSL_SESSION_new();
    if (session && cipher && SSL_SESSION_set1_master_key(session, tls->key, sizeof tls->key) &&
        SSL_SESSION_set_cipher(session, cipher) &&
        SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION))
        return session;
    SSL_SESSION_free(session);
    return NULL;
}

static int on_client_key(SSL *ssl, const EVP_MD *digest, const unsigned char **id, size_t *id_bytes,
                         SSL_SESSION **session)
{
    *id = identity;
    *id_bytes = sizeof identity - 1;
    *session = NULL;
    /* After a HelloRetryRequest OpenSSL asks for a key of that hash. */
    if (digest && EVP_MD_get_type(digest) != NID_sha256)
        return 1;
    *session = make_session(ssl);
    return *session != NULL;
}

static int on_server_key(SSL *ssl, const unsigned char *id, size_t id_bytes, SSL_SESSION **session)
{
    *session = NULL;
    if (id_bytes != sizeof identity - 1 || memcmp(id, identity, id_bytes) != 0)
        return 1; /* an unknown name: there is no certificate to go on with, so it ends there */
    *session = make_session(ssl);
    return *session != NULL;
}

/* ------------------------------------------------------------------ life */

static SSL_CTX *new_context(enum peer_tls_side side)
{
    SSL_CTX *context = SSL_CTX_new(TLS_method());
    if (!context)
        return NULL;
    SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                  SSL_MODE_RELEASE_BUFFERS);
    /* A server that shows a certificate instead of the key gets nowhere: none can be verified. (A
     * client is never asked for one, and without the key there is nothing a server could offer.) */
    if (side == PEER_TLS_CLIENT)
        SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
    if (!SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) ||
        !SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) ||
        !SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256") ||
        !SSL_CTX_set_num_tickets(context, 0)) {
        SSL_CTX_free(context);
        return NULL;
    }
    if (side == PEER_TLS_CLIENT)
        SSL_CTX_set_psk_use_session_callback(context, on_client_key);
    else
        SSL_CTX_set_psk_find_session_callback(context, on_server_key);
    return context;
}

struct peer_tls *peer_tls_new(int fd, enum peer_tls_side side,
                              const uint8_t key[PEER_TLS_KEY_BYTES])
{
    struct peer_tls *tls = calloc(1, sizeof *tls);
    if (!tls)
        return NULL;
    memcpy(tls->key, key, sizeof tls->key);
    tls->context = new_context(side);
    tls->ssl = tls->context ? SSL_new(tls->context) : NULL;
    if (!tls->ssl || !SSL_set_fd(tls->ssl, fd)) {
        peer_tls_free(tls);
        return NULL;
    }
    SSL_set_app_data(tls->ssl, tls);
    if (side == PEER_TLS_CLIENT)
        SSL_set_connect_state(tls->ssl);
    else
        SSL_set_accept_state(tls->ssl);
    return tls;
}

void peer_tls_free(struct peer_tls *tls)
{
    if (!tls)
        return;
    if (tls->is_ready && !tls->is_over) {
        ERR_clear_error();
        SSL_shutdown(tls->ssl);
    }
    SSL_free(tls->ssl);
    SSL_CTX_free(tls->context);
    OPENSSL_cleanse(tls, sizeof *tls);
    free(tls);
}

/* ------------------------------------------------------------------ errors */

/* In our words where the reason is known. */
static void describe(struct peer_tls *tls, unsigned long code)
{
    const char *text = NULL;
    switch (ERR_GET_REASON(code)) {
    case SSL_R_BINDER_DOES_NOT_VERIFY:
    case SSL_R_TLSV1_ALERT_DECRYPT_ERROR:
    case SSL_R_SSLV3_ALERT_ILLEGAL_PARAMETER:
        text = "its cluster key is another one";
        break;
    case SSL_R_NO_SHARED_CIPHER:
    case SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM:
    case SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE:
        text = "it offers no cluster key";
        break;
    case SSL_R_UNEXPECTED_EOF_WHILE_READING:
        text = "the connection was closed";
        break;
    default:
        break;
    }
    const char *reason = ERR_reason_error_string(code);
    if (text)
        snprintf(tls->error, sizeof tls->error, "%s", text);
    else
        snprintf(tls->error, sizeof tls->error, "TLS: %s", reason ? reason : "unknown error");
}

/* The meaning of a call's result that is not success. */
static int judge(struct peer_tls *tls, int rc)
{
    int saved = errno;
    switch (SSL_get_error(tls->ssl, rc)) {
    case SSL_ERROR_WANT_READ:
        return -EAGAIN;
    case SSL_ERROR_WANT_WRITE:
        tls->wants_write = true;
        return -EAGAIN;
    case SSL_ERROR_ZERO_RETURN:
        tls->is_over = true;
        return 0;
    case SSL_ERROR_SYSCALL:
        tls->is_over = true;
        snprintf(tls->error, sizeof tls->error, "%s",
                 saved ? strerror(saved) : "the connection was closed");
        return saved ? -saved : -ECONNRESET;
    default:
        tls->is_over = true;
        describe(tls, ERR_peek_error());
        return -EPROTO;
    }
}

/* Before every call: SSL_get_error() looks at the thread's queue of errors. */
static bool prepare(struct peer_tls *tls)
{
    ERR_clear_error();
    errno = 0;
    tls->wants_write = false;
    return !tls->is_over;
}

/* ------------------------------------------------------------------ bytes */

int peer_tls_handshake(struct peer_tls *tls)
{
    if (tls->is_ready)
        return 0;
    if (!prepare(tls))
        return -EPIPE;
    int rc = SSL_do_handshake(tls->ssl);
    if (rc != 1) {
        rc = judge(tls, rc);
        return rc == 0 ? -ECONNRESET : rc;
    }
    /* A handshake without the key would have needed certificates; be sure that there was none. */
    if (!SSL_session_reused(tls->ssl)) {
        tls->is_over = true;
        snprintf(tls->error, sizeof tls->error, "the cluster key was not used");
        return -EACCES;
    }
    tls->is_ready = true;
    return 0;
}

ssize_t peer_tls_read(struct peer_tls *tls, void *bytes, size_t size)
{
    if (!prepare(tls))
        return -EPIPE;
    size_t n = 0;
    int rc = SSL_read_ex(tls->ssl, bytes, size, &n);
    return rc == 1 ? (ssize_t)n : judge(tls, rc);
}

ssize_t peer_tls_write(struct peer_tls *tls, const void *bytes, size_t n)
{
    if (!prepare(tls))
        return -EPIPE;
    size_t sent = 0;
    int rc = SSL_write_ex(tls->ssl, bytes, n, &sent);
    if (rc == 1)
        return (ssize_t)sent;
    rc = judge(tls, rc);
    return rc == 0 ? -EPIPE : rc;
}

bool peer_tls_is_ready(const struct peer_tls *tls)
{
    return tls->is_ready;
}

bool peer_tls_wants_write(const struct peer_tls *tls)
{
    return tls->wants_write;
}

const char *peer_tls_error(const struct peer_tls *tls)
{
    return *tls->error ? tls->error : "the connection was closed";
}
