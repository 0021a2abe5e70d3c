/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the kernels' image is, and the launches: parameters are filled from a struct reduction,
 * what is more than one launch takes is cut into several.
 */
#include "cuda_kernels.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda_image.h"
#include "dtype.h"
#include "reduce.h"

enum { DIVISOR_NONE = 0, BYTES_PER_THREAD = 64, BLOCKS_PER_MULTIPROCESSOR = 4 };

static const char *const dtype_names[CUDA_KERNELS_DTYPES] = {
    [GRADD_I8] = "i8",   [GRADD_U8] = "u8",   [GRADD_I32] = "i32", [GRADD_I64] = "i64",
    [GRADD_F16] = "f16", [GRADD_F32] = "f32", [GRADD_F64] = "f64", [GRADD_BF16] = "bf16",
};
static const char *const op_names[CUDA_KERNELS_OPS] = {
    [GRADD_SUM] = "sum",
    [GRADD_PROD] = "prod",
    [GRADD_MAX] = "max",
    [GRADD_MIN] = "min",
};

static pthread_once_t image_once = PTHREAD_ONCE_INIT;
static struct {
    const void *data; /* NULL: none */
    size_t bytes;
    char text[320]; /* what it is, or why there is none */
} image;

/* The whole file, mapped for good, with a byte of value 0 behind it: PTX is a string. */
static void read_image_file(const char *path)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    void *data;

    if (fd < 0 || fstat(fd, &status) != 0 || status.st_size <= 0) {
        snprintf(image.text, sizeof(image.text), "none (GRADD_CUDA_KERNELS: %s: %s)", path,
                 fd < 0 ? strerror(errno) : "not a file with contents");
        if (fd >= 0)
            close(fd);
        return;
    }
    data = mmap(NULL, (size_t)status.st_size + 1, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED || read(fd, data, (size_t)status.st_size) != status.st_size) {
        snprintf(image.text, sizeof(image.text), "none (GRADD_CUDA_KERNELS: %s: cannot be read)",
                 path);
        close(fd);
        return;
    }
    close(fd);
    image.data = data;
    image.bytes = (size_t)status.st_size;
    snprintf(image.text, sizeof(image.text), "%s", path);
}

static void find_image(void)
{
    const char *path = getenv("GRADD_CUDA_KERNELS");

    if (path && *path) {
        read_image_file(path);
    } else if (cuda_image_names[0] != '\0') {
        image.data = cuda_image_begin;
        image.bytes = (uintptr_t)cuda_image_end - (uintptr_t)cuda_image_begin;
        snprintf(image.text, sizeof(image.text), "%s", cuda_image_names);
    } else {
        snprintf(image.text, sizeof(image.text), "none (built without nvcc)");
    }
}

const void *cuda_kernels_image(size_t *out_bytes, const char **out_text)
{
    pthread_once(&image_once, find_image);
    *out_bytes = image.bytes;
    if (out_text)
        *out_text = image.text;
    return image.data;
}

const char *cuda_kernels_describe(void)
{
    pthread_once(&image_once, find_image);
    return image.text;
}

static CUresult look_up(const struct cuda_table *cuda, CUmodule module, CUfunction *out,
                        const char *prefix, const char *type, const char *op)
{
    char name[48];

    snprintf(name, sizeof(name), "gradd_%s%s%s%s%s", prefix, type ? "_" : "", type ? type : "",
             op ? "_" : "", op ? op : "");
    return cuda->module_function(out, module, name);
}

static bool is_floating(enum gradd_dtype dtype)
{
    return dtype == GRADD_F16 || dtype == GRADD_F32 || dtype == GRADD_F64 || dtype == GRADD_BF16;
}

CUresult cuda_kernels_load(struct cuda_kernels *kernels, const struct cuda_table *cuda,
                           CUmodule module, CUdevice device)
{
    struct cuda_kernels found = {.cuda = cuda};
    int n_multiprocessors = 0;
    CUresult rc = cuda->device_attribute(&n_multiprocessors,
                                         CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);

    for (int dtype = 0; dtype < CUDA_KERNELS_DTYPES; dtype++) {
        if (!dtype_names[dtype])
            continue;
        for (int op = 0; op < CUDA_KERNELS_OPS && rc == CUDA_SUCCESS; op++)
            rc = look_up(cuda, module, &found.reduce[dtype][op], "reduce", dtype_names[dtype],
                         op_names[op]);
        if (is_floating((enum gradd_dtype)dtype) && rc == CUDA_SUCCESS)
            rc = look_up(cuda, module, &found.nonfinite[dtype], "nonfinite", dtype_names[dtype],
                         NULL);
    }
    if (rc == CUDA_SUCCESS)
        rc = look_up(cuda, module, &found.copy, "copy", NULL, NULL);
    if (rc != CUDA_SUCCESS)
        return rc;
    found.n_multiprocessors = n_multiprocessors > 0 ? (unsigned)n_multiprocessors : 1;
    *kernels = found;
    return CUDA_SUCCESS;
}

unsigned cuda_kernels_blocks(unsigned n_multiprocessors, size_t bytes)
{
    const size_t per_block = (size_t)CUDA_KERNELS_THREADS * BYTES_PER_THREAD;
    const size_t most = (size_t)n_multiprocessors * BLOCKS_PER_MULTIPROCESSOR;
    const size_t wanted = bytes / per_block + (bytes % per_block != 0);

    return (unsigned)(wanted == 0 ? 1 : wanted < most ? wanted : most);
}

static CUresult launch(const struct cuda_kernels *kernels, CUfunction function, CUstream stream,
                       unsigned blocks, unsigned rows, void *params)
{
    void *parameters[] = {params};

    return kernels->cuda->launch_kernel(function, blocks, rows, 1, CUDA_KERNELS_THREADS, 1, 1, 0,
                                        stream, parameters, NULL);
}

CUresult cuda_kernels_reduce(const struct cuda_kernels *kernels, CUstream stream,
                             const struct reduction *r, size_t n)
{
    const enum gradd_redop op = r->redop == GRADD_AVG ? GRADD_SUM : r->redop;
    struct cuda_reduce_params params = {
        .n = n,
        .prescale = r->prescale,
        .postscale = r->postscale,
        .n_in = r->n_in,
        .n_out = r->n_out,
        .n_zero = r->n_zero,
        .divisor = r->redop == GRADD_AVG ? r->divisor : DIVISOR_NONE,
    };

    if (!reduce_is_supported(r->dtype, r->redop) || r->n_in < 1 || r->n_in > CUDA_REDUCE_MAX ||
        r->n_out < 1 || r->n_out > CUDA_REDUCE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    if (n == 0)
        return CUDA_SUCCESS;
    for (unsigned i = 0; i < r->n_in; i++)
        params.in[i] = (uintptr_t)r->in[i];
    for (unsigned o = 0; o < r->n_out; o++)
        params.out[o] = (uintptr_t)r->out[o];
    return launch(kernels, kernels->reduce[r->dtype][op], stream,
                  cuda_kernels_blocks(kernels->n_multiprocessors, n * element_size(r->dtype)), 1,
                  &params);
}

CUresult cuda_kernels_copy(const struct cuda_kernels *kernels, CUstream stream,
                           const struct cuda_copy_segment *segments, size_t n_segments)
{
    CUresult rc = CUDA_SUCCESS;

    for (size_t done = 0; done < n_segments && rc == CUDA_SUCCESS;) {
        struct cuda_copy_params params;
        const size_t left = n_segments - done;
        const unsigned n = (unsigned)(left < CUDA_COPY_SEGMENTS ? left : CUDA_COPY_SEGMENTS);
        size_t longest = 0;
        unsigned blocks;

        memcpy(params.segments, segments + done, n * sizeof(*segments));
        memset(params.segments + n, 0, (CUDA_COPY_SEGMENTS - n) * sizeof(*segments));
        for (unsigned i = 0; i < n; i++)
            longest = params.segments[i].bytes > longest ? params.segments[i].bytes : longest;
        /* The rows share the device. */
        blocks = cuda_kernels_blocks(kernels->n_multiprocessors, longest);
        if (blocks > kernels->n_multiprocessors * BLOCKS_PER_MULTIPROCESSOR / n + 1)
            blocks = kernels->n_multiprocessors * BLOCKS_PER_MULTIPROCESSOR / n + 1;
        rc = launch(kernels, kernels->copy, stream, blocks, n, &params);
        done += n;
    }
    return rc;
}

CUresult cuda_kernels_count_nonfinite(const struct cuda_kernels *kernels, CUstream stream,
                                      enum gradd_dtype dtype, CUdeviceptr in, size_t n,
                                      CUdeviceptr count)
{
    struct cuda_nonfinite_params params = {.in = in, .n = n, .count = count};

    if (n == 0 || !is_floating(dtype))
        return CUDA_SUCCESS;
    return launch(kernels, kernels->nonfinite[dtype], stream,
                  cuda_kernels_blocks(kernels->n_multiprocessors, n * element_size(dtype)), 1,
                  &params);
}
