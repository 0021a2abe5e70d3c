/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fake NVML: the fake driver's GPUs, of which 48 MiB more are taken at every question.
 */
#include <string.h>

#define FAKE_EXPORT __attribute__((visibility("default")))

struct memory {
    unsigned long long total, free, used;
};

FAKE_EXPORT int nvmlInit_v2(void);
FAKE_EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **out);
FAKE_EXPORT int nvmlDeviceGetMemoryInfo(void *device, struct memory *out);

enum { NOT_FOUND = 6 };

static unsigned long long n_questions;

int nvmlInit_v2(void)
{
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **out)
{
    if (strncmp(uuid, "GPU-fa4efa4e-", strlen("GPU-fa4efa4e-")) != 0)
        return NOT_FOUND;
    *out = &n_questions;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *out)
{
    const unsigned long long mib = 1 << 20;
    (void)device;
    n_questions++;
    *out = (struct memory){2048 * mib, (2048 - 48 * n_questions) * mib, 48 * n_questions * mib};
    return 0;
}
