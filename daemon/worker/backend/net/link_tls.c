/* SPDX-License-Identifier: Apache-2.0 */
/*
 * TLS 1.3 on a connection whose ends both know the epoch's secret (an external pre-shared key):
 * what travels is encrypted, and a peer without the secret does not get through the handshake.
 *
 * OpenSSL wants a write that could not be finished to be repeated with the same bytes. Payloads may
 * move between calls as seen from here, so that a record is copied to a buffer first and stays
 * there until it has gone. A write to a closed socket raises SIGPIPE, which the net thread blocks.
 */
#include "worker/backend/net/link.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    SECRET_BYTES = 32,
    RECORD_BYTES = 16 * 1024,
};

struct link_tls {
    struct link base;
    SSL_CTX *context;
    SSL *ssl;
    uint8_t secret[SECRET_BYTES];
    uint8_t record[RECORD_BYTES];
    size_t n_record; /* bytes that are to be written again */
};

static const char identity[] = "gradd-epoch";
/* TLS_AES_128_GCM_SHA256: the suite of a key without a hash of its own. */
static const uint8_t cipher_suite[2] = {0x13, 0x01};

static struct link_tls *tls_of(const SSL *ssl)
{
    return SSL_get_app_data(ssl);
}

static SSL_SESSION *session_new(SSL *ssl)
{
    const SSL_CIPHER *cipher = SSL_CIPHER_find(ssl, cipher_suite);
    SSL_SESSION *session = SSL_SESSION_new();
    if (!cipher || !session ||
        !SSL_SESSION_set1_master_key(session, tls_of(ssl)->secret, SECRET_BYTES) ||
        !SSL_SESSION_set_cipher(session, cipher) ||
        !SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION)) {
        SSL_SESSION_free(session);
        return NULL;
    }
    return session;
}

static int on_use_session(SSL *ssl, const EVP_MD *digest, const unsigned char **id,
                          size_t *id_bytes, SSL_SESSION **session)
{
    *session = session_new(ssl);
    *id = (const unsigned char *)identity;
    *id_bytes = sizeof identity - 1;
    return *session != NULL;
}

static int on_find_session(SSL *ssl, const unsigned char *id, size_t id_bytes,
                           SSL_SESSION **session)
{
    *session = NULL;
    if (id_bytes != sizeof identity - 1 || memcmp(id, identity, id_bytes) != 0)
        return 1; /* no such key: the handshake fails for want of a certificate */
    *session = session_new(ssl);
    return *session != NULL;
}

/* 0: not now; else -errno. obvious: the event that the call waits for outside of handshakes. */
static ssize_t failure(struct link_tls *tls, int result, short obvious)
{
    const int saved = errno;
    switch (SSL_get_error(tls->ssl, result)) {
    case SSL_ERROR_WANT_READ:
        tls->base.wants = obvious == POLLIN ? 0 : POLLIN;
        return 0;
    case SSL_ERROR_WANT_WRITE:
        tls->base.wants = obvious == POLLOUT ? 0 : POLLOUT;
        return 0;
    case SSL_ERROR_ZERO_RETURN:
        return -EPIPE;
    case SSL_ERROR_SYSCALL:
        return saved ? -saved : -EPIPE;
    default:
        return ERR_GET_REASON(ERR_peek_error()) == SSL_R_UNEXPECTED_EOF_WHILE_READING ? -EPIPE
                                                                                      : -EPROTO;
    }
}

/* The bytes of the pieces in a row, as many as a record holds. */
static size_t fill_record(uint8_t *record, const struct iovec *iov, int n_iov)
{
    size_t n = 0;
    for (int i = 0; i < n_iov && n < RECORD_BYTES; i++) {
        size_t bytes = iov[i].iov_len < RECORD_BYTES - n ? iov[i].iov_len : RECORD_BYTES - n;
        memcpy(record + n, iov[i].iov_base, bytes);
        n += bytes;
    }
    return n;
}

static ssize_t tls_send(struct link *link, const struct iovec *iov, int n_iov)
{
    struct link_tls *tls = (struct link_tls *)link;
    if (tls->n_record == 0)
        tls->n_record = fill_record(tls->record, iov, n_iov);
    errno = 0;
    ERR_clear_error();
    int n = SSL_write(tls->ssl, tls->record, (int)tls->n_record);
    if (n <= 0)
        return failure(tls, n, POLLOUT);
    tls->base.wants = 0;
    tls->n_record = 0; /* without partial writes it is all or nothing */
    link->sent_bytes += (uint64_t)n;
    return n;
}

static ssize_t tls_receive(struct link *link, const struct iovec *iov, int n_iov)
{
    struct link_tls *tls = (struct link_tls *)link;
    ssize_t total = 0;
    for (int i = 0; i < n_iov; i++) {
        errno = 0;
        ERR_clear_error();
        int n = SSL_read(tls->ssl, iov[i].iov_base, (int)iov[i].iov_len);
        if (n <= 0) {
            ssize_t result = failure(tls, n, POLLIN);
            return total > 0 ? total : result; /* an error shows again in the next call */
        }
        tls->base.wants = 0;
        total += n;
        link->received_bytes += (uint64_t)n;
        if ((size_t)n < iov[i].iov_len)
            break;
    }
    return total;
}

static void tls_free(struct link *link)
{
    struct link_tls *tls = (struct link_tls *)link;
    SSL_free(tls->ssl);
    SSL_CTX_free(tls->context);
    close(link->fd);
    OPENSSL_cleanse(tls->secret, sizeof tls->secret);
    free(tls);
}

static const struct link_ops tls_ops = {
    .name = "tls",
    .send = tls_send,
    .receive = tls_receive,
    .free = tls_free,
};

static bool set_up(struct link_tls *tls, int is_server)
{
    tls->context = SSL_CTX_new(TLS_method());
    if (!tls->context || !SSL_CTX_set_min_proto_version(tls->context, TLS1_3_VERSION) ||
        !SSL_CTX_set_ciphersuites(tls->context, "TLS_AES_128_GCM_SHA256"))
        return false;
    SSL_CTX_set_psk_use_session_callback(tls->context, on_use_session);
    SSL_CTX_set_psk_find_session_callback(tls->context, on_find_session);
    /* Tickets would be written by a server that may have nothing else to write. */
    SSL_CTX_set_num_tickets(tls->context, 0);
    SSL_CTX_set_options(tls->context, SSL_OP_NO_RENEGOTIATION);
    tls->ssl = SSL_new(tls->context);
    if (!tls->ssl || !SSL_set_fd(tls->ssl, tls->base.fd))
        return false;
    SSL_set_app_data(tls->ssl, tls);
    if (is_server)
        SSL_set_accept_state(tls->ssl);
    else
        SSL_set_connect_state(tls->ssl);
    return true;
}

struct link *link_tls_new(int take_fd, const uint8_t secret[32], int is_server)
{
    struct link_tls *tls = calloc(1, sizeof *tls);
    if (!tls) {
        close(take_fd);
        return NULL;
    }
    tls->base.ops = &tls_ops;
    tls->base.fd = take_fd;
    memcpy(tls->secret, secret, SECRET_BYTES);
    int flags = fcntl(take_fd, F_GETFL), one = 1;
    if (flags >= 0)
        fcntl(take_fd, F_SETFL, flags | O_NONBLOCK);
    setsockopt(take_fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* fails on Unix sockets */
    if (!set_up(tls, is_server)) {
        tls_free(&tls->base);
        return NULL;
    }
    return &tls->base;
}
