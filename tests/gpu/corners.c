/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu_trainer corners: what programs may do with streams and memory, and rarely do. The driver's
 * reference is silent or vague on each of these points: this is where a GPU has the word.
 */
#include <dlfcn.h>
#include <string.h>

#include "trainer.h"

enum { COUNT = 1000, CHUNK = 2 << 20 };

static void find(const char *symbol, void *out)
{
    void *address = dlsym(dlopen("libcuda.so.1", RTLD_NOW), symbol);

    if (!address)
        fail("the driver lacks %s", symbol);
    memcpy(out, &address, sizeof(address));
}

static void sum(const char *name, float *p, CUstream in)
{
    floats_fill(p, COUNT, (float)rank + 1, 0);
    const gradd_handle handle = submit_sum(name, p, COUNT, in);
    check(gradd_wait_stream(g, handle, in, 60), name);
    CU(stream_synchronize(in));
    check(gradd_wait(g, handle, 60), name);
    expect(p, COUNT, sum_of_ranks(), 0, name);
}

/* Small allocations lie in one block; elements need not lie at multiples of their size. */
static void memory_corners(void)
{
    floats_new(COUNT);
    sum("small", floats_new(COUNT), stream);
    sum("odd", (float *)(void *)((char *)floats_new(COUNT + 1) + 2), stream);
}

static void stream_corners(float *p)
{
    sum("null", p, NULL);
    sum("legacy", p, (CUstream)(uintptr_t)CU_STREAM_LEGACY);
    sum("own", p, (CUstream)(uintptr_t)CU_STREAM_PER_THREAD);
}

/* Waiting for a result that is copied asks an event, while another stream is captured. */
static void capture_corner(void)
{
    CUresult (*begin)(CUstream s, int mode), (*end)(CUstream s, void **out);
    CUresult (*destroy)(void *graph);
    CUstream captured;
    void *graph;

    find("cuStreamBeginCapture_v2", &begin);
    find("cuStreamEndCapture", &end);
    find("cuGraphDestroy", &destroy);
    float *p = chunk_new(CHUNK, false);
    floats_fill(p, COUNT, (float)rank + 1, 0);
    CU(stream_create(&captured, CU_STREAM_NON_BLOCKING, 0));
    const gradd_handle handle = submit_sum("captured", p, COUNT, stream);
    check_cuda(begin(captured, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
    check(gradd_wait(g, handle, 60), "captured");
    check_cuda(end(captured, &graph), "a wait during a capture");
    check_cuda(destroy(graph), "cuGraphDestroy");
    expect(p, COUNT, sum_of_ranks(), 0, "captured");
}

/* Other physical memory at an address that was shared before: does its buffer id tell? */
static bool remap_corner(void)
{
    CUmemGenericAllocationHandle handle;
    CUdevice device;
    unsigned long long before, after;

    CU(ctx_device(&device));
    const CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, device},
    };
    const CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    float *p = chunk_new(CHUNK, true);
    const CUdeviceptr at = (uintptr_t)p;
    sum("mapped", p, stream);
    CU(pointer_attribute(&before, CU_POINTER_ATTRIBUTE_BUFFER_ID, at));
    CU(vmm_unmap(at, CHUNK));
    CU(vmm_create(&handle, CHUNK, &properties, 0));
    CU(vmm_map(at, CHUNK, 0, handle, 0));
    CU(vmm_release(handle));
    CU(vmm_access(at, CHUNK, &access, 1));
    CU(pointer_attribute(&after, CU_POINTER_ATTRIBUTE_BUFFER_ID, at));
    sum("mapped anew", p, stream);
    return before != after;
}

/* A context ends while a stream has still to come to its wait. */
static void leave_corner(float *p)
{
    float *slow = floats_new(1);
    const gradd_handle handle = submit_sum("late", p, COUNT, NULL);

    load_produce(slow, 1, 1, 0.3);
    check(gradd_wait_stream(g, handle, stream, 60), "late");
    check(gradd_wait(g, handle, 60), "late");
    check(gradd_barrier(g, 0), "barrier");
    gradd_shutdown(g);
    g = NULL;
    CU(stream_synchronize(stream));
}

void corners(void)
{
    float *p = floats_new(COUNT);

    memory_corners();
    stream_corners(p);
    bool tells = true;
    if (cuda->has_vmm) {
        capture_corner();
        tells = remap_corner();
    }
    leave_corner(p);
    report("\"what\": \"corners\", \"rank\": %d, \"id_tells\": %d", rank, tells);
}
