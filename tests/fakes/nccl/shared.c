/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file in which the ranks of a communicator meet. It is sparse: only what is used takes memory.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

enum { ID_BYTES = 16, PAGE_BYTES = 4096, WAIT_NS = 4000000 };
static const char id_magic[16] = "gradd-fake-nccl";

static size_t header_bytes(void)
{
    return (sizeof(struct shared) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static size_t total_bytes(void)
{
    return header_bytes() + (size_t)FAKE_RANKS * FAKE_SLOT_BYTES +
           (size_t)FAKE_RANKS * FAKE_RANKS * FAKE_MAIL_BYTES;
}

FAKE_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *out);
FAKE_EXPORT ncclResult_t ncclGetVersion(int *out);

ncclResult_t ncclGetUniqueId(ncclUniqueId *out)
{
    const ncclResult_t rc = fake_inject("ncclGetUniqueId");

    if (rc != ncclSuccess)
        return rc;
    memset(out, 0, sizeof(*out));
    memcpy(out->internal, id_magic, sizeof(id_magic));
    if (getrandom(out->internal + sizeof(id_magic), ID_BYTES, 0) != ID_BYTES)
        return fake_error(ncclSystemError, "getrandom: %s", strerror(errno));
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *out)
{
    *out = fake_settings()->version;
    return ncclSuccess;
}

/* False: the bytes are no unique id of ours. */
static bool path_of(const ncclUniqueId *id, char *path, size_t bytes)
{
    char hex[2 * ID_BYTES + 1];

    if (memcmp(id->internal, id_magic, sizeof(id_magic)) != 0)
        return false;
    for (int i = 0; i < ID_BYTES; i++)
        snprintf(hex + 2 * i, 3, "%02x", (unsigned char)id->internal[sizeof(id_magic) + i]);
    snprintf(path, bytes, "%s/gradd-fake-nccl.%s", fake_settings()->directory, hex);
    return true;
}

struct shared *fake_shared_open(const ncclUniqueId *id)
{
    char path[300];
    int fd;
    void *p;

    if (!path_of(id, path, sizeof(path))) {
        fake_error(ncclInvalidArgument, "these bytes were not made by ncclGetUniqueId");
        return NULL;
    }
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)total_bytes()) != 0) {
        fake_error(ncclSystemError, "%s: %s", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return NULL;
    }
    p = mmap(NULL, total_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (p == MAP_FAILED) {
        fake_error(ncclSystemError, "mmap: %s", strerror(errno));
        return NULL;
    }
    return p;
}

void fake_shared_unlink(const ncclUniqueId *id)
{
    char path[300];

    if (path_of(id, path, sizeof(path)))
        unlink(path);
}

uint8_t *fake_shared_slot(struct shared *shared, int rank)
{
    return (uint8_t *)shared + header_bytes() + (size_t)rank * FAKE_SLOT_BYTES;
}

uint8_t *fake_shared_mail(struct shared *shared, int from, int to)
{
    return (uint8_t *)shared + header_bytes() + (size_t)FAKE_RANKS * FAKE_SLOT_BYTES +
           ((size_t)from * FAKE_RANKS + (size_t)to) * FAKE_MAIL_BYTES;
}

void fake_shared_changed(struct shared *shared)
{
    atomic_fetch_add(&shared->ticks, 1);
    syscall(SYS_futex, &shared->ticks, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void fake_shared_wait(struct shared *shared, uint32_t ticks)
{
    const struct timespec most = {0, WAIT_NS};

    syscall(SYS_futex, &shared->ticks, FUTEX_WAIT, ticks, &most, NULL, 0);
}
