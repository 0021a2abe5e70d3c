/* SPDX-License-Identifier: Apache-2.0 */
#include "control/cluster_key.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "control/peer_tls.h"

/* All there is, at most CLUSTER_SECRET_MAX bytes. How many, or -errno. */
static ssize_t read_all(int fd, uint8_t *secret)
{
    size_t n = 0;
    while (n < CLUSTER_SECRET_MAX) {
        ssize_t got = read(fd, secret + n, CLUSTER_SECRET_MAX - n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -errno;
        if (got == 0)
            break;
        n += (size_t)got;
    }
    return (ssize_t)n;
}

static int read_secret(struct cluster_key *key, int fd, const char *name, char *out_error,
                       size_t size)
{
    uint8_t secret[CLUSTER_SECRET_MAX];
    ssize_t n = read_all(fd, secret);
    int rc = n < 0 ? (int)n : 0;
    /* Editors and pipes add newlines. */
    while (n > 0 && isspace(secret[n - 1]))
        n--;
    if (rc < 0) {
        snprintf(out_error, size, "%s: can not be read: %s", name, strerror(-rc));
    } else if (n < CLUSTER_SECRET_MIN) {
        rc = -EINVAL;
        snprintf(out_error, size, "%s: a cluster key has at least %d bytes, this one %zd", name,
                 CLUSTER_SECRET_MIN, n);
    } else {
        rc = peer_tls_derive_key(secret, (size_t)n, key->key);
        key->is_set = rc == 0;
        if (rc < 0)
            snprintf(out_error, size, "%s: no key can be derived", name);
    }
    explicit_bzero(secret, sizeof secret);
    return rc;
}

int cluster_key_read_file(struct cluster_key *key, const char *path, char *out_error, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat status;
    int rc;
    if (fd < 0 || fstat(fd, &status) < 0) {
        rc = -errno;
        snprintf(out_error, size, "%s (cluster_key_file): can not be opened: %s", path,
                 strerror(-rc));
    } else if (!S_ISREG(status.st_mode)) {
        rc = -EINVAL;
        snprintf(out_error, size, "%s (cluster_key_file): not a regular file", path);
    } else if (status.st_mode & (S_IRWXG | S_IRWXO)) {
        rc = -EPERM;
        snprintf(out_error, size,
                 "%s (cluster_key_file): its mode is %04o: others than its owner may use it; "
                 "chmod 0400 %s",
                 path, (unsigned)(status.st_mode & 07777), path);
    } else if (status.st_uid != 0 && status.st_uid != geteuid()) {
        rc = -EPERM;
        snprintf(out_error, size,
                 "%s (cluster_key_file): belongs to uid %u, neither root nor the daemon's uid %u",
                 path, (unsigned)status.st_uid, (unsigned)geteuid());
    } else {
        rc = read_secret(key, fd, path, out_error, size);
    }
    if (fd >= 0)
        close(fd);
    return rc;
}

int cluster_key_read_fd(struct cluster_key *key, int take_fd, char *out_error, size_t size)
{
    int rc = read_secret(key, take_fd, "--cluster-key-fd", out_error, size);
    close(take_fd);
    return rc;
}
