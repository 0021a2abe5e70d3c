/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How often each entry point was called. The figures are in memory and, from cuInit() on, in a text
 * file of the shared directory, mapped, so that they can be read while the process lives and after
 * it was killed: one line "name value" each, of constant width.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake.h"

enum { N_LINES = N_ENTRIES + N_SUMS, NAME_BYTES = 44, DIGITS = 15, LINE_BYTES = 61, HEAD = 61 };

static const char *const sums[N_SUMS] = {
    "host_synchronisations", "implicit_synchronisations", "imports", "event_creations",
    "allocations",           "freed_while_imported",
};
static _Atomic uint64_t counts[N_LINES];
static char *text; /* the mapped file, NULL: none yet */

static void write_value(unsigned line)
{
    uint64_t value = atomic_load(&counts[line]);
    char *digits = text + HEAD + line * LINE_BYTES + NAME_BYTES + 1;
    for (int i = DIGITS - 1; i >= 0; i--, value /= 10)
        digits[i] = (char)('0' + value % 10);
}

static uint64_t add(unsigned line)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    uint64_t value = atomic_fetch_add(&counts[line], 1) + 1;
    pthread_mutex_lock(&lock);
    if (text != NULL)
        write_value(line);
    pthread_mutex_unlock(&lock);
    return value;
}

uint64_t fake_count_call(enum fake_entry entry)
{
    return add(entry);
}

void fake_count_sum(enum fake_sum sum)
{
    add(N_ENTRIES + sum);
}

static const char *line_name(unsigned line)
{
    return line < N_ENTRIES ? fake_entry_name(line) : sums[line - N_ENTRIES];
}

void fake_counts_open(void)
{
    size_t bytes = HEAD + N_LINES * LINE_BYTES;
    int fd = open(fake_path("counts.%d", getpid()), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0 || fchmod(fd, 0666) != 0 || ftruncate(fd, (off_t)bytes) != 0)
        fake_die("cannot write %s: %s", fake_path("counts.%d", getpid()), strerror(errno));
    char *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        fake_die("cannot map the counters: %s", strerror(errno));
    memset(map, ' ', bytes);
    char head[HEAD];
    int length = snprintf(head, sizeof head, "# calls of %.30s", program_invocation_short_name);
    memcpy(map, head, (size_t)length);
    map[HEAD - 1] = '\n';
    for (unsigned i = 0; i < N_LINES; i++) {
        char *line = map + HEAD + i * LINE_BYTES;
        memcpy(line, line_name(i), strlen(line_name(i)));
        line[LINE_BYTES - 1] = '\n';
    }
    text = map;
    for (unsigned i = 0; i < N_LINES; i++)
        write_value(i);
}

FAKE_EXPORT uint64_t fake_cuda_count(const char *name)
{
    for (unsigned i = 0; i < N_LINES; i++)
        if (strcmp(line_name(i), name) == 0)
            return atomic_load(&counts[i]);
    return 0;
}
