/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the fake behaves, by its environment (tests/fakes/README.md lists the variables). Read once,
 * when the library is loaded; constant afterwards.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

enum { LIVE_BYTES = 1024 };

struct fake_settings fake_settings;
static const char *without, *fail, *slow; /* copies: the program may change its environment */
static const char *live;                  /* the file `fail`, mapped; NULL: not yet */
pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;

static const char *const names[N_ENTRIES] = {
#define NAME(name, parameters) [ENTRY_##name] = #name,
    FAKE_ENTRIES(NAME)
#undef NAME
};

const char *fake_entry_name(enum fake_entry entry)
{
    return names[entry];
}

void fake_warn(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    flockfile(stderr);
    fprintf(stderr, "fake libcuda: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, " (pid %d, %s)\n", getpid(), program_invocation_short_name);
    funlockfile(stderr);
    va_end(args);
}

void fake_die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    flockfile(stderr);
    fprintf(stderr, "fake libcuda: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, " (pid %d, %s)\n", getpid(), program_invocation_short_name);
    funlockfile(stderr);
    va_end(args);
    abort();
}

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    if (text == NULL || *text == '\0')
        return otherwise;
    char *end;
    errno = 0;
    uint64_t value = strtoull(text, &end, 0);
    if (errno != 0 || *end != '\0')
        fake_die("%s=%s is no number", name, text);
    return value;
}

/* One visible device of CUDA_VISIBLE_DEVICES: an index, or the beginning of a UUID. -1: neither. */
static int parse_device(const char *text, size_t bytes)
{
    char word[64];
    snprintf(word, sizeof word, "%.*s", (int)bytes, text);
    if (strncmp(word, "GPU-", 4) == 0) {
        for (int i = 0; i < fake_settings.n_physical; i++) {
            char uuid[48];
            snprintf(uuid, sizeof uuid, "GPU-fa4efa4e-0000-4000-8000-0000000000%02x", (unsigned)i);
            if (strncmp(uuid, word, strlen(word)) == 0)
                return i;
        }
        return -1;
    }
    char *end;
    long index = strtol(word, &end, 10);
    return end == word || *end != '\0' || index < 0 || index >= fake_settings.n_physical
               ? -1
               : (int)index;
}

/* As the driver does: the list ends at the first entry that names no device. */
static void read_visible_devices(void)
{
    const char *words = getenv("CUDA_VISIBLE_DEVICES");
    if (words == NULL) {
        fake_settings.n_devices = fake_settings.n_physical;
        for (int i = 0; i < fake_settings.n_physical; i++)
            fake_settings.physical[i] = i;
        return;
    }
    while (*words != '\0' && fake_settings.n_devices < FAKE_MAX_DEVICES) {
        size_t bytes = strcspn(words, ",");
        int device = parse_device(words, bytes);
        if (device < 0)
            return;
        fake_settings.physical[fake_settings.n_devices++] = device;
        words += bytes + (words[bytes] == ',');
    }
}

static enum fake_dead read_dead(void)
{
    const char *text = getenv("GRADD_FAKE_CUDA_DEAD");
    if (text == NULL || strcmp(text, "hang") == 0)
        return FAKE_DEAD_HANG;
    if (strcmp(text, "complete") == 0)
        return FAKE_DEAD_COMPLETE;
    if (strcmp(text, "error") == 0)
        return FAKE_DEAD_ERROR;
    fake_die("GRADD_FAKE_CUDA_DEAD=%s: hang, complete or error", text);
}

static const char *list(const char *name)
{
    const char *text = getenv(name);
    char *copy = strdup(text != NULL ? text : "");
    if (copy == NULL)
        fake_die("out of memory");
    return copy;
}

void fake_settings_read(void)
{
    without = list("GRADD_FAKE_CUDA_WITHOUT");
    fail = list("GRADD_FAKE_CUDA_FAIL");
    slow = list("GRADD_FAKE_CUDA_SLOW");
    static char private_directory[64];
    snprintf(private_directory, sizeof private_directory, "/dev/shm/gradd-fake-cuda.%u", getuid());
    const char *directory = getenv("GRADD_FAKE_CUDA_DIR");
    bool is_given = directory != NULL && *directory != '\0';
    uint64_t n_devices = number("GRADD_FAKE_CUDA_DEVICES", 2);
    fake_settings = (struct fake_settings){
        .directory = is_given ? directory : private_directory,
        .keep_counts = is_given,
        .n_physical = n_devices < FAKE_MAX_DEVICES ? (int)n_devices : FAKE_MAX_DEVICES,
        .memory_bytes = number("GRADD_FAKE_CUDA_MEMORY_MIB", 2048) << 20,
        .seed = number("GRADD_FAKE_CUDA_SEED", 1),
        .delay_us = (unsigned)number("GRADD_FAKE_CUDA_DELAY_US", 0),
        .compute_mode = (int)number("GRADD_FAKE_CUDA_COMPUTE_MODE", CU_COMPUTEMODE_DEFAULT),
        .ipc_events = number("GRADD_FAKE_CUDA_IPC_EVENTS", 1) != 0,
        .memory_handles = number("GRADD_FAKE_CUDA_MEMORY_HANDLES", 1) != 0,
        .version = (int)number("GRADD_FAKE_CUDA_VERSION", 13000),
        .capability = (int)number("GRADD_FAKE_CUDA_CAPABILITY", 90),
        .suballocate = number("GRADD_FAKE_CUDA_SUBALLOCATE", 1) != 0,
        .free_waits = number("GRADD_FAKE_CUDA_FREE_WAITS", 0) != 0,
        .readable = number("GRADD_FAKE_CUDA_READABLE", 0) != 0,
        .dead = read_dead(),
    };
    read_visible_devices();
}

bool fake_same_name(const char *entry, const char *name, size_t bytes)
{
    if (strncmp(entry, name, bytes) != 0)
        return false;
    const char *rest = entry + bytes;
    return *rest == '\0' || (rest[0] == '_' && rest[1] == 'v' && rest[3] == '\0');
}

/*
 * Items of a list "[program/]function:rest,...": the next one that names this entry and program.
 * Its rest begins at *out_rest.
 */
static const char *next_item(const char *items, const char *entry, const char **out_rest)
{
    while (items != NULL && *items != '\0') {
        size_t bytes = strcspn(items, ",\n");
        const char *item = items, *slash = memchr(item, '/', bytes);
        bool is_ours = true;
        if (slash != NULL) {
            size_t program = (size_t)(slash - item);
            is_ours = strlen(program_invocation_short_name) == program &&
                      memcmp(item, program_invocation_short_name, program) == 0;
            item = slash + 1;
        }
        size_t name = strcspn(item, ":,\n");
        items += bytes + (items[bytes] != '\0');
        if (is_ours && fake_same_name(entry, item, name)) {
            *out_rest = item + name + (item[name] == ':');
            return items;
        }
    }
    return NULL;
}

bool fake_is_without(enum fake_entry entry)
{
    const char *rest;
    return next_item(without, names[entry], &rest) != NULL;
}

static void sleep_ms(unsigned long ms)
{
    struct timespec left = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0)
        ;
}

/* "3:201" the third call, "3+:201" from the third on, "*:201" all, "3:hang" never returns. */
static CUresult failure_of(const char *rest, uint64_t call)
{
    char *end = (char *)rest;
    if (*rest == '*') {
        end++;
    } else {
        uint64_t at = strtoull(rest, &end, 10);
        bool and_later = *end == '+';
        end += and_later;
        if (and_later ? call < at : call != at)
            return CUDA_SUCCESS;
    }
    if (strncmp(end, ":hang", 5) == 0)
        for (;;)
            pause();
    return *end == ':' ? atoi(end + 1) : FAKE_ERROR_UNKNOWN;
}

void fake_inject_open(void)
{
    int fd = open(fake_path("fail"), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || ftruncate(fd, LIVE_BYTES) != 0)
        fake_die("cannot open %s: %s", fake_path("fail"), strerror(errno));
    fchmod(fd, 0666);
    const char *map = mmap(NULL, LIVE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        fake_die("cannot map the list of errors: %s", strerror(errno));
    live = map;
}

static CUresult fail_by(const char *items, enum fake_entry entry, uint64_t call)
{
    const char *rest;
    while ((items = next_item(items, names[entry], &rest)) != NULL) {
        CUresult rc = failure_of(rest, call);
        if (rc != CUDA_SUCCESS)
            return rc;
    }
    return CUDA_SUCCESS;
}

CUresult fake_inject(enum fake_entry entry, uint64_t call)
{
    const char *rest;
    if (next_item(slow, names[entry], &rest) != NULL)
        sleep_ms(strtoul(rest, NULL, 10));
    CUresult rc = fail_by(fail, entry, call);
    if (rc != CUDA_SUCCESS || live == NULL || *live == '\0')
        return rc;
    char items[LIVE_BYTES + 1]; /* the file may change while it is read */
    memcpy(items, live, LIVE_BYTES);
    items[LIVE_BYTES] = '\0';
    return fail_by(items, entry, call);
}
