/* SPDX-License-Identifier: Apache-2.0 */
/**
 * libgradd: aggregate gradients through the node's gradd daemon.
 *
 *     struct gradd *g;
 *     if (gradd_init(NULL, &g) != GRADD_OK)          // rank and job from the launcher's variables
 *         errx(1, "%s", gradd_error());
 *     float *grad = gradd_alloc(g, n * sizeof *grad); // shared with the worker: zero copy
 *     ...
 *     if (gradd_allreduce(g, "fc.weight", grad, grad, n, GRADD_F32, GRADD_AVG) != GRADD_OK)
 *         errx(1, "%s", gradd_error());
 *     gradd_free(g, grad);
 *     gradd_shutdown(g);
 *
 * Link with `pkg-config --cflags --libs gradd`.
 *
 * Matching. An op is matched across the ranks of the job by its name. Ranks may submit in any
 * order; an op runs when every rank (of its process set) has submitted that name with the same
 * kind, element type, operator, count, root, scales and group. When they differ, the op fails on
 * every rank with GRADD_ERR_DISAGREE, and the job goes on. A name may be used again as soon as the
 * op that bore it has completed on this rank.
 *
 * Results are bit-identical on all ranks and from run to run: contributions are added in rank
 * order, half types in float32.
 *
 * Memory. Buffers from gradd_alloc() are read and written by the worker in place. Any other
 * pointer works too: the library copies it through shared memory, piece by piece, which costs
 * about two more passes over the data. From submission until completion the caller neither writes
 * `in` nor touches `out`. `in` may equal `out` (in place); partial overlap is refused. After a
 * failed op an out-of-place `in` is intact; the contents of `out` are undefined.
 *
 * Threads. Any thread may call any function on any context; calls on one context serialise where
 * they must. The library installs no signal handler, never prints, never exits. It starts no
 * thread, but for one that sleeps, when CUDA streams are to wait for a word in memory (see below):
 * it ends these waits should the worker die. Progress of copied (unregistered) buffers happens
 * inside calls on the context.
 *
 * fork(). In a child process the context is inert: every call returns GRADD_ERR_FORKED, and the
 * child holds none of the parent's connections. gradd_shutdown() there only frees memory.
 *
 * Errors. Functions return an enum gradd_status (negative on failure); gradd_error() has the
 * sentence. When a rank or the worker is lost, pending and later ops fail with
 * GRADD_ERR_RANK_LOST: call gradd_shutdown(), then gradd_init() to join the next epoch.
 */
#ifndef GRADD_GRADD_H
#define GRADD_GRADD_H

#include <stddef.h>
#include <stdint.h>

#include <gradd/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GRADD_API __attribute__((visibility("default")))

/** Changes when a program must be compiled again; gradd_abi_version() has the library's. */
#define GRADD_ABI_VERSION 0

/** One rank's membership in a job. Opaque; made by gradd_init(), freed by gradd_shutdown(). */
struct gradd;

/** An op in flight: positive, unique within its context, never reused. */
typedef int64_t gradd_handle;

/* ------------------------------------------------------------------ library */

/** The library's version, such as "0.1.0". Static storage. */
GRADD_API const char *gradd_version(void);

/** The library's GRADD_ABI_VERSION. */
GRADD_API int gradd_abi_version(void);

/** The lowest and highest protocol that the library speaks. Either pointer may be NULL. */
GRADD_API void gradd_protocol_range(unsigned *out_min, unsigned *out_max);

/**
 * The sentence of the last failed call in the calling thread: lowercase, ids first, both sides of
 * a disagreement. "" when nothing failed yet. Valid until the thread's next failing call.
 */
GRADD_API const char *gradd_error(void);

/** The name of a status, such as "GRADD_ERR_RANK_LOST". Static storage; never NULL. */
GRADD_API const char *gradd_status_name(int status);

/** Bytes of one element, or 0 for a value that is no gradd_dtype. */
GRADD_API size_t gradd_dtype_size(int dtype);

/* ------------------------------------------------------------------ joining */

/** How to join. Zero every field, then set struct_size and what is known. */
struct gradd_options {
    size_t struct_size; /**< sizeof(struct gradd_options): lets later versions add fields */
    const char *socket; /**< the daemon's socket; NULL: GRADD_SOCKET, else /run/gradd/gradd.sock */
    const char *job;    /**< the job's name within this uid; NULL: from the launcher */
    int32_t rank;       /**< with size > 0: this process's global rank */
    int32_t size;       /**< ranks in the job; 0: take everything from the launcher's variables */
    int32_t local_rank; /**< rank on this node; with size > 0 */
    int32_t local_size; /**< ranks on this node, or 0: not known */
    double timeout_s;   /**< how long to wait for the others; 0: the daemon's join_timeout_s */
};

/**
 * Join a job; blocks until all its ranks have joined.
 *
 * With options->size > 0 the identity is explicit. Else the first launcher of this list whose
 * variables are set is taken whole: GRADD_*, torchrun's (RANK, WORLD_SIZE, LOCAL_RANK),
 * HOROVOD_*, OMPI_COMM_WORLD_*, PMI_*, Slurm's (inside a step only); else a world of one. RANK
 * without LOCAL_RANK names a node, not a process, and is refused.
 *
 * Ranks on several nodes meet at the daemon of rank 0's node: GRADD_COORDINATOR=host[:port] names
 * it; without it, MASTER_ADDR does when the launcher says that there are several nodes. The port is
 * by default the peer_port of this node's daemon.
 *
 * A world of one needs no daemon: its ops complete inside the library.
 *
 * @param options  may be NULL: all defaults. Borrowed for the call.
 * @param out      set on success only; the caller owns it.
 * @return GRADD_OK, or GRADD_ERR_INVALID, _UNAVAILABLE (no daemon), _PROTOCOL (versions),
 *         _DENIED, _DUPLICATE (rank taken), _DISAGREE (another size), _TIMEOUT (ranks missing),
 *         _NO_MEMORY.
 */
GRADD_API int gradd_init(const struct gradd_options *options, struct gradd **out);

/**
 * Leave the job and free the context, its regions and its handles. Ops in flight are abandoned;
 * ranks that need this one get GRADD_ERR_RANK_LOST for those ops. NULL is allowed.
 */
GRADD_API void gradd_shutdown(struct gradd *g);

GRADD_API int gradd_rank(const struct gradd *g);
GRADD_API int gradd_size(const struct gradd *g);
GRADD_API int gradd_local_rank(const struct gradd *g);
GRADD_API int gradd_local_size(const struct gradd *g);
GRADD_API int gradd_node_rank(const struct gradd *g); /**< index of this node in the job */
GRADD_API int gradd_n_nodes(const struct gradd *g);
GRADD_API uint64_t gradd_epoch(const struct gradd *g); /**< this life of the job's membership */
GRADD_API const char *gradd_job(const struct gradd *g);
/** Where the identity came from: "arguments", "GRADD_*", "torchrun", …, "none (world of one)". */
GRADD_API const char *gradd_source(const struct gradd *g);

/* ------------------------------------------------------------------ memory */

/**
 * Allocate memory that trainer and worker share (a sealed memfd mapped by both): ops on it copy
 * nothing. Page aligned, zeroed, counted against the job's quota. Any pointer into it may be
 * given to an op. bytes 0 is treated as 1.
 * @return the memory, or NULL (see gradd_error()). Free with gradd_free().
 */
GRADD_API void *gradd_alloc(struct gradd *g, size_t bytes);

/**
 * Memory of gradd_alloc() stays readable and writable after gradd_shutdown(): from then on it is
 * the caller's, who unmaps it with munmap(memory, bytes) when done. For frameworks whose tensors
 * outlive the context. @return GRADD_OK, or GRADD_ERR_INVALID: not the start of such memory.
 */
GRADD_API int gradd_keep(struct gradd *g, void *memory);

/** Free memory of gradd_alloc(). No op may be using it. NULL is allowed. */
GRADD_API int gradd_free(struct gradd *g, void *memory);

/*
 * Device memory. An op may name CUDA device memory of any allocator. The library asks the driver
 * that the program has loaded; it loads none, links with none, and makes no context. What can be
 * shared is shared once per allocation and found again by its address and buffer id: cudaMalloc()
 * memory, and cuMemCreate() memory with POSIX descriptors (PyTorch's expandable segments). What can
 * not be shared (cudaMallocAsync() pools, managed memory) is copied on the device, by the op's
 * stream, to memory that can. Where the worker takes no device memory (gradd_device_path()), the
 * stream copies through pinned shared memory and the worker sums on the host.
 *
 * Whatever the way, the order is the stream's: the op reads its input after all that was put into
 * `stream` before the submission, and gradd_wait_stream() makes a stream wait for the result. The
 * host waits for no device, except in gradd_wait() and gradd_test(), which tell of results that
 * have arrived. The ops of one submission have one stream, and their tensors are all on its GPU. A
 * stream that captures a graph is refused. The stream must live until the op has ended.
 *
 * Of one stream, 512 submissions may be under way whose results nobody has waited for yet; another
 * one waits for the oldest to be launched and waited for, or to end. A thread of the program that
 * submits device memory should have the GPU's context current, as it has after any call of CUDA's
 * runtime.
 *
 * Memory must stay allocated until the op has ended; before freeing
 * memory that was used by an op outside gradd_alloc_device(), call gradd_forget(), or never reuse
 * the job's registrations: the library notices a new allocation at an old address by itself.
 */

/**
 * Device memory that the worker can use without a copy, and that stays valid whatever happens to
 * either process. device: an ordinal as cuDeviceGet() takes it, with a context of this process.
 * @return the device address, or NULL (see gradd_error()). Free with gradd_free().
 */
GRADD_API void *gradd_alloc_device(struct gradd *g, int device, size_t bytes);

/**
 * Share the allocation around [memory, memory + bytes) now instead of at the first op that uses it.
 * memory: device memory. @return GRADD_OK; GRADD_ERR_INVALID: it can not be shared, and why (ops on
 * it work all the same).
 */
GRADD_API int gradd_register(struct gradd *g, const void *memory, size_t bytes);

/**
 * Stop sharing the allocation around `memory`, because it is about to be freed. Waits until the
 * worker has closed it. Nothing shared there: nothing happens. @return GRADD_OK, or the epoch's
 * failure.
 */
GRADD_API int gradd_forget(struct gradd *g, const void *memory);

/**
 * Whether the worker takes device memory: 1, or 0 and *out_text (may be NULL) says why ops on
 * device memory go through shared memory. Static until gradd_shutdown().
 */
GRADD_API int gradd_device_path(const struct gradd *g, const char **out_text);

/* ------------------------------------------------------------------ ops */

/** One collective request of this rank. Zero every field, then set what the kind needs. */
struct gradd_op {
    size_t struct_size; /**< sizeof(struct gradd_op) */
    int32_t kind;       /**< enum gradd_kind */
    int32_t dtype;      /**< enum gradd_dtype */
    int32_t redop;      /**< enum gradd_redop: all-reduce and reduce-scatter */
    int32_t root;       /**< broadcast: global rank that has the data */
    uint32_t set;       /**< process set, 0: all ranks */
    const char *name;   /**< 1 to 255 bytes; matched across ranks */
    const void *in;     /**< may be NULL when count is 0, or off root in a broadcast */
    void *out;
    uint64_t count;         /**< elements of `in`; broadcast: elements of the message */
    uint64_t out_capacity;  /**< all-gather, all-to-all: elements that fit into `out` */
    const uint64_t *counts; /**< one per rank of the set, borrowed for the call. GRADD_SET_ADD: the
                                 `count` ranks of the new set, ascending. Reduce-scatter:
                                 elements each rank receives (NULL: even, the remainder to the
                                 lowest ranks). All-to-all: elements for each rank (NULL: even) */
    double prescale;        /**< factor on every input; 0 means 1 */
    double postscale;       /**< factor on the result; 0 means 1 */
    uint32_t check_finite;  /**< not 0: count NaN and infinity in the inputs of an all-reduce or
                                 reduce-scatter (see gradd_nonfinite()); one rank's wish is enough */
    const uint64_t *dims;   /**< the tensor's shape, outermost first, borrowed for the call; ranks
                                 that give one must agree on it (all-gather and all-to-all: on all
                                 dimensions but the first). NULL: only counts are compared */
    uint64_t n_dims;        /**< of dims, at most 32 */
    void *stream;           /**< device memory: the CUstream that produces `in`; NULL or
                                 CU_STREAM_LEGACY: the context's default stream;
                                 CU_STREAM_PER_THREAD: the calling thread's. Must not be capturing a
                                 graph */
};

/**
 * Submit n ops as one: they become ready, run and complete together, under one handle. Returns at
 * once, except that unregistered buffers beyond the staging window are copied here.
 * @return a handle (> 0), or a negative status; then nothing was submitted.
 */
GRADD_API gradd_handle gradd_submit(struct gradd *g, const struct gradd_op *ops, size_t n);

/**
 * Has the op ended? Never blocks.
 * @return GRADD_PENDING, or its final status: GRADD_OK or the error of the first op that failed.
 *         The handle stays valid until gradd_wait() or gradd_release().
 */
GRADD_API int gradd_test(struct gradd *g, gradd_handle handle);

/**
 * Wait for the op to end, then release its handle.
 * @param timeout_s  seconds; negative: no limit. When it passes, GRADD_PENDING is returned and the
 *                   handle stays valid.
 */
GRADD_API int gradd_wait(struct gradd *g, gradd_handle handle, double timeout_s);

/**
 * Make `stream` (a CUstream of the device of the submission's tensors) wait for its results. Blocks
 * at most until the worker has put the work into its own stream, never for the device; where
 * tensors are staged through host memory it does not block. Exceptions, which wait for the sizes:
 * all-gather and all-to-all into memory that is bounced or staged; and staging with a driver that
 * has no 64-bit stream memory operations, which waits for the op. For host memory it is
 * gradd_wait(), except that the handle stays. May be called several times, and for
 * several streams, before gradd_wait() or gradd_release().
 * @return GRADD_OK: what is put into `stream` from here on sees the results; GRADD_PENDING: not yet
 * launched after timeout_s (< 0: no limit); or the op's error. An error that shows later is told by
 * gradd_wait() and gradd_test().
 */
GRADD_API int gradd_wait_stream(struct gradd *g, gradd_handle handle, void *stream,
                                double timeout_s);

/** Forget a handle. An op in flight still runs; its buffers stay in use until it ends. */
GRADD_API int gradd_release(struct gradd *g, gradd_handle handle);

/**
 * What each rank contributed, once the op has ended well (call between gradd_test() and the end of
 * the handle). All-gather: elements of each rank, in rank order. All-to-all: elements received
 * from each rank. GRADD_SET_ADD: counts[0] is the new set's id. GRADD_JOIN: counts[0] is the last
 * rank that joined.
 * @param index     which op of the submission, 0 based
 * @param capacity  elements of out_counts
 * @return how many there are (may exceed capacity; then only capacity were written), or < 0
 */
GRADD_API int64_t gradd_counts(struct gradd *g, gradd_handle handle, size_t index,
                               uint64_t *out_counts, size_t capacity);

/**
 * Were the inputs of a checked op finite? Call like gradd_counts().
 * @return 0: yes, on every rank (or nobody asked); 1: no, *out_rank is the lowest rank with a NaN
 * or an infinity and *out_count says how many elements of it; or a negative status.
 */
GRADD_API int gradd_nonfinite(struct gradd *g, gradd_handle handle, size_t index, int32_t *out_rank,
                              uint64_t *out_count);

/**
 * A descriptor that becomes readable when some op of the context may have ended (or when copied
 * buffers need the library): call gradd_progress(), test your handles, then poll again. Owned by
 * the context. @return the fd, or a negative status.
 */
GRADD_API int gradd_fd(struct gradd *g);

/** Do whatever can be done without blocking. @return GRADD_OK, or the error that ended the epoch.
 */
GRADD_API int gradd_progress(struct gradd *g);

/* Blocking forms, and asynchronous forms of single ops. */

GRADD_API int gradd_allreduce(struct gradd *g, const char *name, const void *in, void *out,
                              uint64_t count, int dtype, int redop);
GRADD_API gradd_handle gradd_allreduce_async(struct gradd *g, const char *name, const void *in,
                                             void *out, uint64_t count, int dtype, int redop);

/** buffer: the message on root; overwritten elsewhere. */
GRADD_API int gradd_broadcast(struct gradd *g, const char *name, void *buffer, uint64_t count,
                              int dtype, int root);
GRADD_API gradd_handle gradd_broadcast_async(struct gradd *g, const char *name, void *buffer,
                                             uint64_t count, int dtype, int root);

/**
 * Concatenate every rank's `in` in rank order. Counts may differ between ranks. When the sum
 * exceeds any rank's out_capacity the op fails on all ranks. out_counts: one per rank, or NULL.
 */
GRADD_API int gradd_allgather(struct gradd *g, const char *name, const void *in, uint64_t count,
                              void *out, uint64_t out_capacity, int dtype, uint64_t *out_counts);
GRADD_API gradd_handle gradd_allgather_async(struct gradd *g, const char *name, const void *in,
                                             uint64_t count, void *out, uint64_t out_capacity,
                                             int dtype);

/** Reduce `in` (count elements) and give rank r the r-th part, of counts[r] elements. */
GRADD_API int gradd_reduce_scatter(struct gradd *g, const char *name, const void *in,
                                   uint64_t count, void *out, const uint64_t *counts, int dtype,
                                   int redop);
GRADD_API gradd_handle gradd_reduce_scatter_async(struct gradd *g, const char *name, const void *in,
                                                  uint64_t count, void *out, const uint64_t *counts,
                                                  int dtype, int redop);

/** Send send_counts[r] elements to rank r; receive in rank order. out_counts may be NULL. */
GRADD_API int gradd_alltoall(struct gradd *g, const char *name, const void *in, uint64_t count,
                             const uint64_t *send_counts, void *out, uint64_t out_capacity,
                             int dtype, uint64_t *out_counts);
GRADD_API gradd_handle gradd_alltoall_async(struct gradd *g, const char *name, const void *in,
                                            uint64_t count, const uint64_t *send_counts, void *out,
                                            uint64_t out_capacity, int dtype);

/** Return when every rank (of the set, 0: all) has called it. */
GRADD_API int gradd_barrier(struct gradd *g, uint32_t set);

#ifdef __cplusplus
}
#endif
#endif
