/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/buffer/nvml.h"

#include <dlfcn.h>
#include <string.h>

struct nvml_memory {
    unsigned long long total, free, used;
};

static struct {
    bool is_tried;
    void *library; /* NULL: none that is usable */
    int (*init)(void);
    int (*by_uuid)(const char *uuid, void **out_device);
    int (*memory)(void *device, struct nvml_memory *out);
} nvml;

static void find(const char *symbol, void *field)
{
    void *address = dlsym(nvml.library, symbol);
    memcpy(field, &address, sizeof address);
}

static bool is_open(void)
{
    if (nvml.is_tried)
        return nvml.library;
    nvml.is_tried = true;
    nvml.library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!nvml.library)
        return false;
    find("nvmlInit_v2", &nvml.init);
    find("nvmlDeviceGetHandleByUUID", &nvml.by_uuid);
    find("nvmlDeviceGetMemoryInfo", &nvml.memory);
    if (nvml.init && nvml.by_uuid && nvml.memory && nvml.init() == 0)
        return true;
    dlclose(nvml.library);
    nvml.library = NULL;
    return false;
}

bool nvml_used_bytes(const char *uuid_text, uint64_t *out_bytes)
{
    void *device;
    struct nvml_memory memory;
    if (!is_open() || nvml.by_uuid(uuid_text, &device) != 0 || nvml.memory(device, &memory) != 0)
        return false;
    *out_bytes = memory.used;
    return true;
}
