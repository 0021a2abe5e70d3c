/* SPDX-License-Identifier: Apache-2.0 */
#include "worker/gpus.h"

#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "worker/backend/nccl/nccl_table.h"
#include "worker/buffer/cuda_device.h"
#include "worker/reduce/cuda_kernels.h"

static int attribute(const struct cuda_table *cuda, int which, CUdevice device)
{
    int value = -1;
    return cuda->device_attribute(&value, which, device) == CUDA_SUCCESS ? value : -1;
}

static const char *mode_name(int mode)
{
    return mode == CU_COMPUTEMODE_PROHIBITED          ? "prohibited"
           : mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS ? "exclusive"
                                                      : "default";
}

/* Would a context of this user be one of an MPS server? A driver that does not say has the control
 * daemon's pipe. */
static bool is_under_mps(const struct cuda_table *cuda, CUdevice device)
{
    char path[4096];
    int says = attribute(cuda, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device);
    if (says >= 0)
        return says > 0;
    const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
    snprintf(path, sizeof path, "%s/control", folder && *folder ? folder : "/tmp/nvidia-mps");
    return access(path, W_OK) == 0;
}

static void print_gpu(FILE *out, const struct cuda_table *cuda, CUdevice device)
{
    CUuuid uuid;
    size_t bytes = 0;
    char name[96] = "", text[CUDA_UUID_TEXT_BYTES];
    if (cuda->device_uuid(&uuid, device) != CUDA_SUCCESS)
        return;
    cuda_uuid_format(uuid.bytes, text);
    cuda->device_total_bytes(&bytes, device);
    cuda->device_name(name, sizeof name - 1, device);
    fprintf(out, "gpu %s %zu %d.%d %s %s %s\n", text, bytes,
            attribute(cuda, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
            attribute(cuda, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
            mode_name(attribute(cuda, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device)),
            is_under_mps(cuda, device) ? "mps" : "no-mps", name);
}

static void print_nccl(FILE *out)
{
    const char *text = "";
    const struct nccl_table *nccl = nccl_table_open(&text);
    char version[32], missing[400];
    if (!nccl) {
        fprintf(out, "nccl - %s\n", text);
        return;
    }
    nccl_table_describe_version(nccl, version, sizeof version);
    nccl_table_describe_missing(nccl, missing, sizeof missing);
    fprintf(out, "nccl %s%s%s\n", version, *missing ? " " : "", missing);
}

static void print_driver(FILE *out)
{
    const char *text = "";
    const struct cuda_table *cuda = cuda_table_open(CUDA_OPEN_LOAD, &text);
    int n = 0;
    CUdevice device;
    if (!cuda) {
        fprintf(out, "driver - %s\n", text);
        return;
    }
    fprintf(out, "driver %d.%d\n", cuda->version / 1000, cuda->version % 1000 / 10);
    cuda->device_count(&n);
    for (int i = 0; i < n; i++)
        if (cuda->device_get(&device, i) == CUDA_SUCCESS)
            print_gpu(out, cuda, device);
}

void gpus_print(FILE *out)
{
    print_driver(out);
    print_nccl(out);
    fprintf(out, "kernels %s\nend\n", cuda_kernels_describe());
}
