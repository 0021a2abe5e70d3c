/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the fake CUDA driver (libcuda.so.1 of the build tree) offers beside the driver's own
 * interface: to the fake NCCL, and to tests. A program reaches these by dlsym() on the library that
 * it has opened, or by linking with it.
 *
 * A device pointer of the fake cannot be read by the CPU, like a real one; fake_cuda_view() gives
 * the address at which the CPU finds the same bytes.
 *
 * Thread: any.
 */
#ifndef GRADD_FAKE_CUDA_H
#define GRADD_FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

struct CUstream_st;

/*
 * Have `run(data)` called on the stream's thread, in the order of the stream. It may block: what
 * it waits for is then to be ended by whoever pushed it, the fake never interrupts it. It must not
 * call the driver (such calls fail, as in a host function). NULL: the current context's default
 * stream. Returns a CUresult; not 0: `run` is never called.
 */
int fake_cuda_stream_push(struct CUstream_st *stream, void (*run)(void *), void *data);

/* The ordinal in this process of the stream's device, as cuDeviceGet() takes it; -1: no stream. */
int fake_cuda_stream_device(struct CUstream_st *stream);

/* The ordinal of the device that owns the memory; -1: not device memory. */
int fake_cuda_pointer_device(const void *device_pointer);

/*
 * Where the CPU finds `bytes` bytes of device memory: NULL if they are not all mapped and
 * accessible. Registered host memory is its own view; other memory of the host has none.
 */
void *fake_cuda_view(const void *device_pointer, size_t bytes);

/* Number of the physical device behind an ordinal: the same in every process of the machine. */
int fake_cuda_physical_device(int ordinal);

/*
 * From now on every call in the stream's context returns `error`, as after a fault of a kernel.
 */
void fake_cuda_context_fail(struct CUstream_st *stream, int error);

/*
 * How often this process called an entry point ("cuEventCreate"), or a sum of several:
 * "host_synchronisations" (the host waited for a stream), "implicit_synchronisations" (a call that
 * waits as a side effect, such as cuMemFree_v2), "imports", "event_creations", "allocations".
 * 0 for an unknown name. The same figures are in the file counts.<pid> of GRADD_FAKE_CUDA_DIR.
 */
uint64_t fake_cuda_count(const char *name);

#endif
