/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How functions are found: cuGetProcAddress(), and functions that this driver shall not have
 * (GRADD_FAKE_CUDA_WITHOUT). dlsym() does not find those either: when the library is loaded, their
 * entries in its own dynamic symbol table are made undefined, before anybody can look them up.
 */
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake.h"

enum { PROC_FOUND = 0, PROC_NOT_FOUND = 1 };

static void *const functions[N_ENTRIES] = {
#define FUNCTION(name, parameters) [ENTRY_##name] = (void *)(name),
    FAKE_ENTRIES(FUNCTION)
#undef FUNCTION
};

static void hide(enum fake_entry entry)
{
    Dl_info info;
    const ElfW(Sym) *symbol = NULL;
    if (dladdr1(functions[entry], &info, (void **)&symbol, RTLD_DL_SYMENT) == 0 || symbol == NULL)
        fake_die("%s cannot be hidden", fake_entry_name(entry));
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = (uintptr_t)symbol & ~(page - 1);
    size_t bytes = (uintptr_t)(symbol + 1) - from;
    if (mprotect((void *)from, bytes, PROT_READ | PROT_WRITE) != 0)
        fake_die("%s cannot be hidden: %s", fake_entry_name(entry), strerror(errno));
    ElfW(Sym) *changed = (ElfW(Sym) *)(uintptr_t)symbol;
    changed->st_value = 0;
    changed->st_shndx = SHN_UNDEF;
    mprotect((void *)from, bytes, PROT_READ);
}

__attribute__((constructor)) static void load(void)
{
    fake_settings_read();
    for (enum fake_entry entry = 0; entry < N_ENTRIES; entry++)
        if (fake_is_without(entry))
            hide(entry);
}

__attribute__((destructor)) static void unload(void)
{
    fake_process_close();
}

CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags,
                             int *out_status)
{
    ENTER(cuGetProcAddress_v2, NEED_NOTHING);
    *out = NULL;
    for (enum fake_entry entry = 0; entry < N_ENTRIES && *out == NULL; entry++)
        if (fake_same_name(fake_entry_name(entry), symbol, strlen(symbol)) &&
            !fake_is_without(entry))
            *out = functions[entry];
    if (out_status != NULL)
        *out_status = *out != NULL ? PROC_FOUND : PROC_NOT_FOUND;
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
