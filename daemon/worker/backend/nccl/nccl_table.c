/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/backend/nccl/nccl_table.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const char library_name[] = "libnccl.so.2";

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct nccl_table table;
static bool is_tried, is_open;
static char why_not[240];

static bool find(void *library, const char *symbol, void *field)
{
    void *address = dlsym(library, symbol);
    memcpy(field, &address, sizeof address);
    return address != NULL;
}

/* The first required function that is missing, or NULL. */
static const char *fill(void *library)
{
#define NCCL_TABLE_FIND(field, symbol, result, parameters)                                         \
    if (!find(library, symbol, &table.field))                                                      \
        return symbol;
    NCCL_TABLE_REQUIRED(NCCL_TABLE_FIND)
#undef NCCL_TABLE_FIND
#define NCCL_TABLE_FIND(field, symbol, result, parameters) find(library, symbol, &table.field);
    NCCL_TABLE_OPTIONAL(NCCL_TABLE_FIND)
#undef NCCL_TABLE_FIND
    return NULL;
}

static bool is_usable(void *library)
{
    ncclResult_t (*get_version)(int *) = NULL;
    char version[32] = "of unknown version";
    if (find(library, "ncclGetVersion", &get_version) && get_version(&table.version) == ncclSuccess)
        nccl_table_describe_version(&table, version, sizeof version);
    if (table.version < NCCL_ABI_VERSION_MIN) {
        snprintf(why_not, sizeof why_not, "NCCL %s is too old: 2.18 or later is needed", version);
        return false;
    }
    const char *missing = fill(library);
    if (missing)
        snprintf(why_not, sizeof why_not, "%s (NCCL %s) lacks %s", library_name, version, missing);
    return !missing;
}

static bool open_library(void)
{
    void *library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *text = dlerror();
        snprintf(why_not, sizeof why_not, "no NCCL: %s", text ? text : library_name);
        return false;
    }
    return is_usable(library); /* never closed: it may have started threads */
}

const struct nccl_table *nccl_table_open(const char **out_text)
{
    pthread_mutex_lock(&lock);
    if (!is_tried) {
        is_tried = true;
        is_open = open_library();
    }
    pthread_mutex_unlock(&lock);
    if (!is_open && out_text)
        *out_text = why_not;
    return is_open ? &table : NULL;
}

void nccl_table_describe_version(const struct nccl_table *nccl, char *text, size_t bytes)
{
    /* Before 2.9 the code was 1000 * major + 100 * minor + patch. */
    const int version = nccl->version, scale = version < 10000 ? 1000 : 10000;
    snprintf(text, bytes, "%d.%d.%d", version / scale, version % scale / 100, version % 100);
}

void nccl_table_describe_missing(const struct nccl_table *nccl, char *text, size_t bytes)
{
    const struct {
        bool is_there;
        const char *text;
    } rows[] = {
        {nccl->comm_revoke, "ncclCommRevoke (communicators are aborted at once instead)"},
        {nccl->comm_shrink, "ncclCommShrink (not used: a new epoch makes new communicators)"},
        {nccl->window_register, "ncclCommWindowRegister (not used: tensors go through NCCL's "
                                "own buffers)"},
        {nccl->all_to_all, "ncclAlltoAll (sends and receives instead)"},
    };
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < sizeof rows / sizeof *rows && used < bytes; i++)
        if (!rows[i].is_there)
            used +=
                (size_t)snprintf(text + used, bytes - used, "%s%s", used ? ", " : "", rows[i].text);
}

const char *nccl_table_error(const struct nccl_table *nccl, ncclResult_t rc)
{
    static _Thread_local char text[300];
    const char *name = nccl->error_string(rc), *last = nccl->last_error(NULL);
    snprintf(text, sizeof text, "%s (%d)%s%s", name ? name : "NCCL error", (int)rc,
             last && last[0] ? ": " : "", last ? last : "");
    size_t length = strlen(text);
    while (length > 0 && text[length - 1] == '\n')
        text[--length] = '\0';
    return text;
}
