/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda_table.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const char driver_name[] = "libcuda.so.1";

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct cuda_table table;
static bool is_open, is_initialised;
static char why_not[200];

static bool find(void *library, const char *symbol, void *field)
{
    void *address = dlsym(library, symbol);
    memcpy(field, &address, sizeof address);
    return address != NULL;
}

/* The first required function that is missing, or NULL. */
static const char *fill(void *library)
{
#define CUDA_TABLE_FIND(field, symbol, parameters)                                                 \
    if (!find(library, symbol, &table.field))                                                      \
        return symbol;
    CUDA_TABLE_REQUIRED(CUDA_TABLE_FIND)
#undef CUDA_TABLE_FIND
#define CUDA_TABLE_FIND(field, symbol, parameters) &&find(library, symbol, &table.field)
    table.has_vmm = true CUDA_TABLE_VMM(CUDA_TABLE_FIND);
    table.has_flags = true CUDA_TABLE_FLAGS(CUDA_TABLE_FIND);
#undef CUDA_TABLE_FIND
    return NULL;
}

static bool open_driver(enum cuda_open_how how)
{
    void *library = dlopen(driver_name, RTLD_NOW | (how == CUDA_OPEN_IF_LOADED ? RTLD_NOLOAD : 0));
    if (!library) {
        const char *text = dlerror();
        snprintf(why_not, sizeof why_not, "no CUDA driver: %s", text ? text : driver_name);
        return false;
    }
    const char *missing = fill(library);
    if (missing) {
        snprintf(why_not, sizeof why_not, "the CUDA driver is too old: it lacks %s", missing);
        dlclose(library);
        return false;
    }
    return true;
}

static bool initialise(void)
{
    CUresult rc = table.init(0);
    if (rc == CUDA_SUCCESS)
        return true;
    snprintf(why_not, sizeof why_not, "the CUDA driver does not start: %s",
             cuda_table_error(&table, rc));
    return false;
}

const struct cuda_table *cuda_table_open(enum cuda_open_how how, const char **out_text)
{
    pthread_mutex_lock(&lock);
    if (!is_open)
        is_open = open_driver(how);
    if (is_open && !is_initialised && how == CUDA_OPEN_LOAD)
        is_initialised = initialise();
    bool is_usable = is_open && (how == CUDA_OPEN_IF_LOADED || is_initialised);
    if (is_usable && !table.version)
        table.driver_version(&table.version);
    pthread_mutex_unlock(&lock);
    if (!is_usable && out_text)
        *out_text = why_not;
    return is_usable ? &table : NULL;
}

const char *cuda_table_error(const struct cuda_table *cuda, CUresult rc)
{
    static _Thread_local char text[160];
    const char *name = NULL, *sentence = NULL;
    cuda->error_name(rc, &name);
    cuda->error_string(rc, &sentence);
    snprintf(text, sizeof text, "%s (%d): %s", name ? name : "CUDA error", rc,
             sentence ? sentence : "not known to this driver");
    return text;
}
