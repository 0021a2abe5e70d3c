/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank of a job with tensors on a GPU: what tests/gpu/run starts, with the launcher's variables
 * (GRADD_RANK, ...) in its environment.
 *
 *   gpu_trainer info                what GPU there is
 *   gpu_trainer collectives         every kind, on all ranks, against values known beforehand
 *   gpu_trainer memory              every way that device memory can have been allocated
 *   gpu_trainer order N MS          N ops behind a kernel that takes MS: order, and no host waiting
 *   gpu_trainer latency N BYTES     submission to enqueued, and time on the device
 *   gpu_trainer victim              all-reduces until one fails; then the stream must drain
 *   gpu_trainer corners             corners.c
 *   gpu_trainer beside S BYTES      a compute loop of rank 0 for S seconds, alone and beside
 *                                   all-reduces
 *
 * Option --device N. GRADD_GPU_NEEDS_PATH=1: it is a failure when the worker takes no device
 * memory.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "trainer.h"

struct gradd *g;
int rank, size;

void check(int status, const char *what)
{
    if (status < 0 || status == GRADD_PENDING)
        fail("rank %d: %s: %s: %s", rank, what, gradd_status_name(status), gradd_error());
}

static void join(void)
{
    const char *why = "";

    check(gradd_init(NULL, &g), "gradd_init");
    rank = gradd_rank(g);
    size = gradd_size(g);
    if (!gradd_device_path(g, &why) && size > 1 && getenv("GRADD_GPU_NEEDS_PATH"))
        fail("rank %d: the worker takes no device memory: %s", rank, why);
}

struct gradd_op make_op(int kind, const char *name, const float *in, float *out, size_t count)
{
    return (struct gradd_op){.struct_size = sizeof(struct gradd_op),
                             .kind = kind,
                             .dtype = GRADD_F32,
                             .redop = GRADD_SUM,
                             .name = name,
                             .in = in,
                             .out = out,
                             .count = count,
                             .stream = stream};
}

struct gradd_op make_sum(const char *name, const float *in, float *out, size_t count)
{
    return make_op(GRADD_ALLREDUCE, name, in, out, count);
}

struct gradd_op make_average(const char *name, float *x, size_t count)
{
    struct gradd_op op = make_op(GRADD_ALLREDUCE, name, x, x, count);

    op.redop = GRADD_AVG;
    return op;
}

gradd_handle submit(const struct gradd_op *ops, size_t n)
{
    const gradd_handle handle = gradd_submit(g, ops, n);

    check(handle < 0 ? (int)handle : 0, ops->name);
    return handle;
}

gradd_handle start(struct gradd_op op)
{
    const gradd_handle handle = submit(&op, 1);

    check(gradd_wait_stream(g, handle, stream, 60), op.name);
    return handle;
}

void run(struct gradd_op op)
{
    check(gradd_wait(g, start(op), 60), op.name);
}

void expect(const float *p, size_t n, float value, float step, const char *what)
{
    static float host[EXPECT_MAX];

    floats_read(p, host, n);
    for (size_t i = 0; i < n; i++)
        if (fabsf(host[i] - (value + (float)(i % 97) * step)) > 1e-3f * fabsf(host[i]) + 1e-4f)
            fail("rank %d: %s: element %zu is %g, not %g", rank, what, i, (double)host[i],
                 (double)(value + (float)(i % 97) * step));
}

float sum_of_ranks(void)
{
    return (float)(size * (size + 1)) / 2;
}

gradd_handle submit_sum(const char *name, float *p, size_t count, CUstream in)
{
    struct gradd_op op = make_sum(name, p, p, count);

    op.stream = in;
    return submit(&op, 1);
}

/* ---- Ways to allocate ---- */

float *chunk_new(size_t bytes, bool is_exportable)
{
    CUdevice device;
    CUdeviceptr p;
    CUmemGenericAllocationHandle handle;

    CU(ctx_device(&device));
    const CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = is_exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0,
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, device},
    };
    const CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CU(vmm_create(&handle, bytes, &properties, 0));
    CU(vmm_reserve(&p, bytes, 0, 0, 0));
    CU(vmm_map(p, bytes, 0, handle, 0));
    CU(vmm_release(handle));
    CU(vmm_access(p, bytes, &access, 1));
    return (float *)(uintptr_t)p;
}

static float *pool_new(size_t bytes)
{
    CUresult (*alloc)(CUdeviceptr *, size_t, CUstream);
    void *symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemAllocAsync");
    CUdeviceptr p;

    memcpy(&alloc, &symbol, sizeof(alloc));
    if (!alloc)
        return NULL;
    check_cuda(alloc(&p, bytes, stream), "cuMemAllocAsync");
    return (float *)(uintptr_t)p;
}

static void memory(void)
{
    const size_t bytes = 64 << 20, n = bytes / sizeof(float);
    const struct {
        const char *name;
        float *p;
    } rows[] = {
        {"cudaMalloc", floats_new(n)},
        {"cuMemCreate, exportable", cuda->has_vmm ? chunk_new(bytes, true) : NULL},
        {"cuMemCreate, private", cuda->has_vmm ? chunk_new(bytes, false) : NULL},
        {"cudaMallocAsync", pool_new(bytes)},
        {"gradd_alloc_device", gradd_alloc_device(g, 0, bytes)},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (!rows[i].p) {
            report("\"what\": \"memory\", \"kind\": \"%s\", \"skipped\": 1", rows[i].name);
            continue;
        }
        const double begin = now();
        const int rc = gradd_register(g, rows[i].p, bytes);
        const double seconds = now() - begin;
        const size_t part = n < EXPECT_MAX ? n : N;
        floats_fill(rows[i].p + 11, part, (float)rank + 1, 0.25f);
        run(make_sum(rows[i].name, rows[i].p + 11, rows[i].p + 11, part));
        expect(rows[i].p + 11, part, sum_of_ranks(), 0.25f * (float)size, rows[i].name);
        if (rank == 0)
            report("\"what\": \"memory\", \"kind\": \"%s\", \"shared\": %d, \"import_ms\": %.3f",
                   rows[i].name, rc == 0, seconds * 1e3);
    }
    check(gradd_barrier(g, 0), "barrier");
}

/* ---- Order ---- */

static void order(size_t n, double seconds)
{
    enum { COUNT = 4096 };
    float *x = floats_new(COUNT), *y = floats_new(COUNT), *history = floats_new(n * COUNT);
    gradd_handle *handles = calloc(n, sizeof(*handles));
    size_t n_ahead = 0;
    char name[16];

    floats_fill(x, COUNT, -1, 0);
    const double begin = now();
    for (size_t i = 0; i < n; i++) {
        load_produce(x, COUNT, (float)(i + 1) * (float)(rank + 1), seconds);
        snprintf(name, sizeof(name), "x%zu", i % 4);
        handles[i] = start(make_sum(name, x, y, COUNT));
        n_ahead += cuda->stream_query(stream) == CUDA_ERROR_NOT_READY;
        CU(copy_async((uintptr_t)(history + i * COUNT), (uintptr_t)y, COUNT * sizeof(float),
                      stream));
        if (i >= 3)
            check(gradd_wait(g, handles[i - 3], 60), name);
    }
    for (size_t i = n < 3 ? 0 : n - 3; i < n; i++)
        check(gradd_wait(g, handles[i], 60), "order");
    CU(stream_synchronize(stream));
    const double total = now() - begin;
    for (size_t i = 0; i < n; i++)
        expect(history + i * COUNT, COUNT, (float)(i + 1) * sum_of_ranks(), 0, "order");
    free(handles);
    /* The stream had not even come to the op when its result was waited for. */
    if (n_ahead < n / 2)
        fail("rank %d: the host waited for the device in %zu of %zu ops", rank, n - n_ahead, n);
    report("\"what\": \"order\", \"rank\": %d, \"ops\": %zu, \"ahead\": %zu, "
           "\"total_ms\": %.1f",
           rank, n, n_ahead, 1e3 * total);
}

/* ---- Time ---- */

static void latency(size_t n, size_t bytes)
{
    const size_t count = bytes / sizeof(float);
    float *x = floats_new(count);
    double *enqueued = calloc(n, sizeof(*enqueued)), *device = calloc(n, sizeof(*device));
    double median, p99, on_device, unused;

    floats_fill(x, count, 1, 0);
    for (size_t i = 0; i < n + 20; i++) { /* the first 20 warm up */
        const CUevent mark = timer_mark();
        const double begin = now();
        const gradd_handle handle = start(make_average("x", x, count));
        const double host_seconds = now() - begin;
        const double seconds = timer_between(mark, timer_mark());
        check(gradd_wait(g, handle, 60), "latency");
        if (i >= 20) {
            enqueued[i - 20] = host_seconds;
            device[i - 20] = seconds;
        }
    }
    percentiles(enqueued, n, &median, &p99);
    percentiles(device, n, &on_device, &unused);
    free(enqueued);
    free(device);
    if (rank == 0)
        report("\"what\": \"latency\", \"size\": %d, \"bytes\": %zu, \"enqueued_us\": %.1f, "
               "\"enqueued_p99_us\": %.1f, \"op_us\": %.1f",
               size, bytes, 1e6 * median, 1e6 * p99, 1e6 * on_device);
    check(gradd_barrier(g, 0), "barrier");
}

/* ---- Loss ---- */

static void victim(void)
{
    enum { COUNT = 1 << 20 };
    float *x = floats_new(COUNT);
    int status = 0;

    floats_fill(x, COUNT, 1, 0);
    for (size_t i = 0; status >= 0; i++) {
        const struct gradd_op op = make_average("x", x, COUNT);
        const gradd_handle handle = gradd_submit(g, &op, 1);

        status = handle < 0 ? (int)handle : gradd_wait_stream(g, handle, stream, 60);
        if (status >= 0)
            status = gradd_wait(g, handle, 60);
        if (i == 5)
            report("\"what\": \"ready\", \"rank\": %d", rank);
    }
    char text[300];
    snprintf(text, sizeof(text), "%s", gradd_error());
    for (char *p = text; *p; p++)
        *p = *p == '"' || *p == '\\' ? '\'' : *p;
    const double begin = now();
    alarm(30); /* a stream that hangs ends this process, which the script takes for a failure */
    const CUresult rc = cuda->stream_synchronize(stream);
    report("\"what\": \"lost\", \"rank\": %d, \"status\": \"%s\", \"text\": \"%s\", "
           "\"drain_s\": %.2f, \"cuda\": %d",
           rank, gradd_status_name(status), text, now() - begin, rc);
}

/* ---- Compute beside it ---- */

static double multiply_rate(double seconds, CUstream comm_stream, float *x, size_t count)
{
    CUevent marks[2];
    gradd_handle handle = 0;
    size_t n = 0;

    marks[0] = timer_mark();
    const double begin = now();
    while (now() - begin < seconds) {
        load_multiply(20000, 1024);
        n++;
        if (x && (handle == 0 || gradd_test(g, handle) != GRADD_PENDING)) {
            struct gradd_op op = make_average("x", x, count);
            op.stream = comm_stream;
            if (handle)
                check(gradd_wait(g, handle, 60), "beside");
            handle = submit(&op, 1);
        }
        if (n % 4 == 0)
            CU(stream_synchronize(stream));
    }
    if (handle)
        check(gradd_wait(g, handle, 60), "beside");
    marks[1] = timer_mark();
    return (double)n / timer_between(marks[0], marks[1]);
}

static void beside(double seconds, size_t bytes)
{
    const size_t count = bytes / sizeof(float);
    float *x = floats_new(count);
    CUstream comm_stream;

    CU(stream_create(&comm_stream, CU_STREAM_NON_BLOCKING, 0));
    floats_fill(x, count, 1, 0);
    if (rank == 0) {
        multiply_rate(0.2, comm_stream, NULL, 0);
        const double alone = multiply_rate(seconds, comm_stream, NULL, 0);
        check(gradd_barrier(g, 0), "barrier");
        const double together = multiply_rate(seconds, comm_stream, x, count);
        report("\"what\": \"beside\", \"alone_per_s\": %.1f, \"beside_per_s\": %.1f, "
               "\"slowdown\": %.2f",
               alone, together, alone / together);
        gradd_shutdown(g); /* the others' next op fails: they are done */
        g = NULL;
        return;
    }
    check(gradd_barrier(g, 0), "barrier");
    for (int status = 0; status >= 0;) {
        const struct gradd_op op = make_average("x", x, count);
        const gradd_handle handle = gradd_submit(g, &op, 1);

        status = handle < 0 ? (int)handle : gradd_wait(g, handle, 60);
    }
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";
    int ordinal = 0;

    if (argc > 3 && strcmp(argv[argc - 2], "--device") == 0) {
        ordinal = atoi(argv[argc - 1]);
        argc -= 2;
    }
    device_open(ordinal);
    if (strcmp(command, "info") == 0) {
        report("\"what\": \"info\", \"name\": \"%s\", \"driver\": %d, \"free_mib\": %.0f",
               device_name(), cuda->version, device_free_mib());
        return 0;
    }
    join();
    if (strcmp(command, "collectives") == 0)
        collectives();
    else if (strcmp(command, "memory") == 0)
        memory();
    else if (strcmp(command, "order") == 0 && argc > 3)
        order(strtoul(argv[2], NULL, 10), atof(argv[3]) / 1e3);
    else if (strcmp(command, "latency") == 0 && argc > 3)
        latency(strtoul(argv[2], NULL, 10), strtoul(argv[3], NULL, 10));
    else if (strcmp(command, "victim") == 0)
        victim();
    else if (strcmp(command, "corners") == 0)
        corners();
    else if (strcmp(command, "beside") == 0 && argc > 3)
        beside(atof(argv[2]), strtoul(argv[3], NULL, 10));
    else
        fail("what? see the first comment of tests/gpu/trainer.c");
    gradd_shutdown(g);
    return 0;
}
