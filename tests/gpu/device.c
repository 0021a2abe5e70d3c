/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "load.h"

const struct cuda_table *cuda;
CUstream stream;
static CUdevice device;
static CUresult (*elapsed)(float *out_ms, CUevent from, CUevent to);

void fail(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    fprintf(stderr, "%s: ", program_invocation_short_name);
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    exit(1);
}

void report(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    printf("{");
    vprintf(format, args);
    printf("}\n");
    va_end(args);
    fflush(stdout);
}

void check_cuda(CUresult rc, const char *call)
{
    if (rc != CUDA_SUCCESS)
        fail("%s: %s", call, cuda_table_error(cuda, rc));
}

void device_open(int ordinal)
{
    const char *why = "";
    CUcontext context;
    void *library;
    int n = 0;

    cuda = cuda_table_open(CUDA_OPEN_LOAD, &why);
    if (!cuda || cuda->device_count(&n) != CUDA_SUCCESS || n <= ordinal) {
        fprintf(stderr, "no GPU: %s\n", cuda ? "the driver has no such device" : why);
        exit(EXIT_NO_GPU);
    }
    CU(device_get(&device, ordinal));
    CU(primary_retain(&context, device));
    CU(ctx_set(context));
    CU(stream_create(&stream, CU_STREAM_NON_BLOCKING, 0));
    library = dlopen("libcuda.so.1", RTLD_NOW);
    for (const char *const *name =
             (const char *const[]){"cuEventElapsedTime_v2", "cuEventElapsedTime", NULL};
         *name && !elapsed; name++) {
        void *symbol = dlsym(library, *name);

        memcpy(&elapsed, &symbol, sizeof(elapsed));
    }
    if (!elapsed)
        fail("the driver lacks cuEventElapsedTime");
}

static void *read_image(const char *path)
{
    FILE *file = path ? fopen(path, "rb") : NULL;
    char *bytes = calloc(1, 4 << 20);

    if (!file || !bytes || fread(bytes, 1, (4 << 20) - 1, file) == 0)
        fail("GRADD_GPU_LOAD=%s: cannot be read", path ? path : "");
    fclose(file);
    return bytes;
}

CUfunction load_function(const char *name)
{
    static CUmodule module;
    CUfunction function;

    if (!module) {
        void *image = read_image(getenv("GRADD_GPU_LOAD"));
        CU(module_load(&module, image));
        free(image);
    }
    CU(module_function(&function, module, name));
    return function;
}

void load_produce(float *out, size_t n, float value, double seconds)
{
    static CUfunction function;
    struct load_produce p = {
        .out = (uintptr_t)out, .n = n, .ns = (unsigned long long)(seconds * 1e9), .value = value};
    void *parameters[] = {&p};

    if (!function)
        function = load_function("gradd_test_produce");
    CU(launch_kernel(function, 32, 1, 1, 256, 1, 1, 0, stream, parameters, NULL));
}

void load_multiply(uint64_t n, unsigned blocks)
{
    static CUfunction function;
    static float *out;
    struct load_multiply p = {.n = n};
    void *parameters[] = {&p};

    if (!function) {
        function = load_function("gradd_test_multiply");
        out = floats_new(1);
    }
    p.out = (uintptr_t)out;
    CU(launch_kernel(function, blocks, 1, 1, 256, 1, 1, 0, stream, parameters, NULL));
}

float *floats_new(size_t n)
{
    CUdeviceptr p;

    CU(mem_alloc(&p, n * sizeof(float)));
    return (float *)(uintptr_t)p;
}

void floats_fill(float *p, size_t n, float value, float step)
{
    float *host = malloc(n * sizeof(float));

    if (!host)
        fail("out of memory");
    for (size_t i = 0; i < n; i++)
        host[i] = value + (float)(i % 97) * step;
    CU(copy_async((uintptr_t)p, (uintptr_t)host, n * sizeof(float), stream));
    CU(stream_synchronize(stream));
    free(host);
}

void floats_read(const float *p, float *out, size_t n)
{
    CU(copy_async((uintptr_t)out, (uintptr_t)p, n * sizeof(float), stream));
    CU(stream_synchronize(stream));
}

double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

CUevent timer_mark(void)
{
    CUevent event;

    CU(event_create(&event, 0));
    CU(event_record(event, stream));
    return event;
}

double timer_between(CUevent from, CUevent to)
{
    float ms;

    CU(stream_synchronize(stream));
    check_cuda(elapsed(&ms, from, to), "cuEventElapsedTime");
    CU(event_destroy(from));
    CU(event_destroy(to));
    return ms * 1e-3;
}

double device_free_mib(void)
{
    size_t left, total;

    CU(mem_info(&left, &total));
    return (double)left / (1 << 20);
}

const char *device_name(void)
{
    static char name[96];

    CU(device_name(name, sizeof(name), device));
    return name;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

void percentiles(double *figures, size_t n, double *out_median, double *out_p99)
{
    qsort(figures, n, sizeof(*figures), compare);
    *out_median = figures[n / 2];
    *out_p99 = figures[n * 99 / 100];
}
