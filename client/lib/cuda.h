/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Device memory in the library: what an op on CUDA memory needs beside an op on host memory.
 *
 * The way of an op, chosen once per context (Joined.device_path) and per buffer:
 *   shared   the allocation is registered with the worker, which works on it in place;
 *   bounced  it can not be shared: the op's stream copies to device memory of the library that can;
 *   staged   the worker takes no device memory: the stream copies through pinned shared host
 * memory; alone    a world of one: the stream copies, and scales through pinned memory.
 *
 * Invariants: no CUDA context is made, and none of a GPU that the program does not use is touched;
 * nobody waits for a device except gradd_wait() and gradd_test() of an op whose result is still
 * being copied, who poll an event. In a forked child nothing here calls the driver.
 *
 * Thread: any, under the context's lock, unless a function says otherwise.
 */
#ifndef GRADD_CLIENT_CUDA_H
#define GRADD_CLIENT_CUDA_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <gradd/gradd.h>

#include "context.h"
#include "cuda_table.h"

enum {
    CUDA_SLOTS = 64,        /* submissions of a queue whose results may still be waited for */
    CUDA_STREAM_QUEUES = 8, /* queues of one stream, before a submission waits for an older one */
    CUDA_QUEUES_MAX = 64,
    CUDA_REGIONS_MAX = 256, /* registrations kept; beyond, the one that was used longest ago goes */
    CUDA_UUID_BYTES = 16,
    CUDA_HANDLE_BYTES = 64,
};

/* ---- cuda_driver.c: the driver that this program has loaded */

/* NULL: none so far, or one that is too old. Costs nothing to speak of: may be asked per op. */
const struct cuda_table *cuda_driver(void);

/* ---- cuda_memory.c: what the driver says about an address */

struct cuda_memory {
    int ordinal;       /* of the GPU */
    CUcontext context; /* NULL: memory that belongs to no context (VMM) */
    CUdeviceptr base;  /* of the allocation; of VMM memory: of the reserved range, or one chunk */
    size_t bytes;
    uint64_t id;     /* no other allocation of this process has had it or will */
    bool is_managed; /* migrates: never shared */
    bool is_ipc;     /* cuIpcGetMemHandle() takes it */
    bool is_posix;   /* may be exported as a file descriptor */
};

/* True: device (or managed) memory, described in *out. False: host memory, as far as CUDA knows. */
bool cuda_memory_find(const struct cuda_table *cuda, const void *address, struct cuda_memory *out);
/* The same with the bounds of the physical memory at the address, which is what can be shared. The
 * GPU is current. */
bool cuda_memory_chunk(const struct cuda_table *cuda, const void *address, struct cuda_memory *out);

/* ---- cuda.c: the GPUs that this context uses, and events */

struct cuda_event {
    CUevent event;
    struct cuda_event *next;
};

struct cuda_gpu {
    int ordinal;
    uint8_t uuid[CUDA_UUID_BYTES];
    CUcontext context;
    bool is_retained;           /* the context is the primary one, held here */
    bool has_events, has_flags; /* interprocess events; stream memory operations of 64 bits */
    bool has_posix;             /* memory that can be exported as a descriptor */
    Pb__QueueOrder order;       /* the one that the worker took; ORDER_AUTO: not known */
    struct cuda_event *idle_events;
    struct stage_pool bounce; /* device memory that the worker knows */
    struct cuda_gpu *next;
};

/* A page of 64-bit words that streams wait for: never unmapped before the watchdog is gone. */
struct cuda_page {
    struct region *region;
    CUdeviceptr device;           /* where the GPU finds it */
    unsigned first_word, n_words; /* what is poisoned */
    struct cuda_page *next;
};

/* One word, used by one op at a time; its values only grow. */
struct cuda_word {
    struct cuda_page *page;
    uint32_t index;
    uint64_t value; /* of its last op */
    struct cuda_word *next;
};

struct cuda_watch;
struct cuda_launch;
struct cuda_use;

struct cuda {
    const struct cuda_table *table;
    struct cuda_gpu *gpus;
    struct cuda_region *regions; /* most recently used first */
    unsigned n_regions;
    struct cuda_allocation *allocations;
    struct cuda_queue *queues[CUDA_QUEUES_MAX];
    unsigned n_queues;
    uint32_t next_queue;
    uint64_t n_uses; /* of queues */
    struct stage_pool pinned;
    struct cuda_word *idle_words;
    struct cuda_word *word_blocks[64];
    unsigned n_word_blocks;
    struct cuda_use *uses; /* of pages, by stream */
    bool has_unknown_use;
    _Atomic(struct cuda_page *) pages; /* grows only: read by the watchdog without a lock */
    atomic_bool is_poisoned;
    struct cuda_watch *watch;
    struct cuda_op *idle_ops, *draining;
    _Atomic(struct cuda_launch *) sent_launches; /* to be used again; pushed by host functions */
    struct cuda_launch *idle_launches;
    atomic_uint n_launches; /* host functions that have not run */
};

/* The context's CUDA side, made on first use. 0 or a status. */
int cuda_get(struct gradd *g, const struct cuda_table *table, struct cuda **out);
/* The GPU of this memory and stream (NULL: default stream). 0 or a status. */
int cuda_gpu_get(struct cuda *cuda, int ordinal, CUcontext context, void *stream,
                 struct cuda_gpu **out);
/* Make the GPU's context current, and undo that. 0, or a status. In between no call of the driver
 * spoils a capture of the program, whichever thread captures. May be nested. */
int cuda_enter(const struct cuda *cuda, const struct cuda_gpu *gpu);
void cuda_leave(const struct cuda *cuda);
/* The name of the calling thread's own default stream. */
static inline bool cuda_is_per_thread(CUstream stream)
{
    return (uintptr_t)stream == CU_STREAM_PER_THREAD;
}
/* What tells per-thread streams of different threads apart; NULL for all others. */
const void *cuda_thread_of(CUstream stream);
/* A status with gradd_error() set, from a CUresult: "WHAT: CUDA_ERROR_...". */
int cuda_failure(const struct cuda *cuda, CUresult rc, const char *what);
/* An event of the GPU, which must be current. NULL: gradd_error() is set. */
struct cuda_event *cuda_event_take(struct cuda *cuda, struct cuda_gpu *gpu);
void cuda_event_put(struct cuda_gpu *gpu, struct cuda_event *event); /* NULL-safe */
/* Have n of them made. The GPU is current. */
void cuda_events_reserve(struct cuda *cuda, struct cuda_gpu *gpu, unsigned n);

/* The epoch is over: no stream may wait for the worker any more. */
void cuda_failed(struct gradd *g);
/*
 * Undo all that the driver knows of this context. Called once the job was left. False: a stream has
 * still to come past a host function or words of this context, which must therefore stay in memory.
 */
bool cuda_stop(struct gradd *g);
/* Free memory only. NULL is allowed. */
void cuda_free(struct cuda *cuda);

/* ---- cuda_region.c: allocations that the worker knows */

struct cuda_region {
    struct region region; /* first; its base is the device address */
    struct cuda_gpu *gpu;
    uint64_t *chunk_ids, *chunk_bytes; /* of all chunks (one, but for VMM); owned, one array */
    unsigned n_chunks;
    bool is_stale;   /* the memory is gone: forgotten when its last op ends */
    bool is_pending; /* the worker has not answered */
    bool is_leaving; /* gradd_forget() has it */
    unsigned n_pins; /* threads that wait for something about it */
    struct cuda_region *next;
};

/*
 * The registration of [memory, memory + bytes), made if need be (the lock may be released). 0: *out
 * is set; 1: the memory can not be shared, *out_text (valid for the thread's next error) says why;
 * or a status.
 */
int cuda_region_get(struct gradd *g, struct cuda_gpu *gpu, const struct cuda_memory *memory,
                    const void *address, uint64_t bytes, struct cuda_region **out,
                    const char **out_text);
void cuda_region_free(struct cuda_region *region); /* the record only */
/* The registration around some of [at, at + bytes), whose memory may be gone; or NULL. */
struct cuda_region *cuda_region_around(const struct cuda *cuda, CUdeviceptr at, uint64_t bytes);
/* Wait until no op uses it and the worker has closed it, then free it. */
void cuda_region_forget(struct gradd *g, struct cuda_region *region);
/* gradd_register(), with the lock. */
int cuda_register(struct gradd *g, const void *memory, size_t bytes);

/* ---- cuda_share.c: telling the worker of an allocation */

/* NULL: the memory can be shared. */
const char *cuda_why_unshared(const struct cuda_memory *memory);
/* Fill base, bytes and chunks of a record for the tensor at `at`; the GPU is current. 0; 1: a chunk
 * can not be shared; or a status. */
int cuda_find_chunks(const struct cuda *cuda, const struct cuda_memory *first, CUdeviceptr at,
                     uint64_t bytes, struct cuda_region *region);
/* Register it, and wait for the worker's answer without the lock. 0 or a status. */
int cuda_region_tell(struct gradd *g, struct cuda_region *region, bool is_ipc);

/* ---- cuda_bounce.c: device memory of the library's own making */

/* Device memory for a GPU's bounce pool: stage_pool.new_region and free_region. */
int cuda_bounce_new(struct gradd *g, struct stage_pool *pool, size_t bytes, struct region **out);
void cuda_bounce_free(struct gradd *g, struct stage_pool *pool, struct region *region);
/* Free the memory of gradd_alloc_device(), if that is what it is: *out_rc says how it went. */
bool cuda_free_device(struct gradd *g, void *memory, int *out_rc);
/* The job was left: free every allocation. Memory of records: cuda_regions_free(). */
void cuda_regions_stop(struct gradd *g);
void cuda_regions_free(struct cuda *cuda);

/* ---- cuda_queue.c: order between a stream and the worker's */

struct cuda_slot {
    uint64_t ticket;
    uint32_t n_running, n_unlaunched; /* ops of the ticket */
    bool needs_no_wait;               /* the trainer has issued its wait, or never will */
};

struct cuda_queue {
    uint32_t id;
    struct cuda_gpu *gpu;
    CUstream stream;
    const void *thread; /* that per-thread stream's; else NULL */
    Pb__QueueOrder order;
    bool is_open, is_answered;
    int status; /* of the worker's answer */
    char text[ERROR_TEXT_BYTES];
    uint64_t ticket;   /* the last one given */
    uint64_t last_use; /* of all queues' uses, the number */
    struct cuda_slot slots[CUDA_SLOTS];
    unsigned n_ready, n_finished;
    CUevent ready[CUDA_SLOTS];    /* recorded by the trainer's stream */
    CUevent finished[CUDA_SLOTS]; /* recorded by the worker's */
    uint8_t handles[CUDA_SLOTS][CUDA_HANDLE_BYTES];
    struct cuda_page *page; /* ORDER_FLAG: in place of the events */
};

/*
 * A queue of this stream with a free slot. Opens one, or waits for an older submission, releasing
 * the lock. 0 or a status.
 */
int cuda_queue_get(struct gradd *g, struct cuda_gpu *gpu, CUstream stream, struct cuda_queue **out);
/* Mark the inputs of n_ops ops as ready, in the stream: the next ticket. The GPU is current. 0 or a
 * status. */
int cuda_queue_submit(struct cuda *cuda, struct cuda_queue *queue, uint32_t n_ops,
                      uint64_t *out_ticket);
/* Make the stream wait for the ticket's results, which are launched. The GPU is current. */
CUresult cuda_queue_wait(struct cuda *cuda, const struct cuda_queue *queue, uint64_t ticket,
                         CUstream stream);
/* The slot, while it is the ticket's; else NULL. */
struct cuda_slot *cuda_queue_slot(struct cuda_queue *queue, uint64_t ticket);
void cuda_queue_replied(struct gradd *g, const Pb__QueueReply *reply);
void cuda_queues_stop(struct cuda *cuda);

/* ---- cuda_use.c: streams that pages must wait for */

/* The stream was given something that reads or writes a page. The GPU is current. */
void cuda_use_note(struct cuda *cuda, struct cuda_gpu *gpu, CUstream stream);
/* Has every stream come past what it was given? */
bool cuda_uses_are_over(const struct cuda *cuda);
/* They have, and no stream is given anything more: give back events; free memory. */
void cuda_uses_stop(struct cuda *cuda);
void cuda_uses_free(struct cuda *cuda);

/* ---- cuda_watch.c: no stream hangs when the worker is gone */

/* A page of this size that streams can use, known to the watchdog, which runs from here on. *out_fd
 * is the caller's, when it is asked for; else the worker is told of the region. 0 or a status. */
int cuda_page_new(struct gradd *g, struct cuda_gpu *gpu, size_t bytes, unsigned first_word,
                  unsigned n_words, int *out_fd, struct cuda_page **out);
/* Thread: any. The socket was full: flush it as soon as it takes more. */
void cuda_watch_flush(struct cuda *cuda);
void cuda_watch_stop(struct cuda *cuda);
void cuda_watch_free(struct cuda *cuda);
/* Thread: any. All words that streams may wait for get the value that ends every wait. */
void cuda_poison(struct cuda *cuda);
/* The watchdog has stopped: undo the pages' registration; unmap and free the pages. */
void cuda_pages_stop(struct cuda *cuda);
void cuda_pages_free(struct cuda *cuda);

/* ---- cuda_stage.c: pinned shared host memory */

/* Pinned memory of the pool: stage_pool.new_region and free_region. */
int cuda_pinned_new(struct gradd *g, struct stage_pool *pool, size_t bytes, struct region **out);
void cuda_pinned_free(struct gradd *g, struct stage_pool *pool, struct region *region);
void cuda_pinned_stop(struct cuda *cuda);
/* A word for an op. May release the lock. 0 or a status. */
int cuda_word_take(struct gradd *g, struct cuda_gpu *gpu, struct cuda_word **out);
void cuda_word_put(struct cuda *cuda, struct cuda_word *word); /* NULL-safe */
/* End the wait for this value, in the worker's place. */
void cuda_word_store(const struct cuda_word *word, uint64_t value);
CUresult cuda_word_wait(struct cuda *cuda, struct cuda_gpu *gpu, const struct cuda_word *word,
                        uint64_t value, CUstream stream);
void cuda_words_free(struct cuda *cuda);

/* A launch: frames for the worker, sent by a stream when it has come so far. NULL: no memory. */
struct cuda_launch *cuda_launch_new(struct gradd *g);
struct wire_out *cuda_launch_frames(struct cuda_launch *launch);
/* The GPU of the stream is current. After an error it is never sent. */
CUresult cuda_launch_add(struct cuda *cuda, struct cuda_launch *launch, CUstream stream);
void cuda_launches_free(struct cuda *cuda);

/* ---- cuda_op.c: an op on device memory, from submission to the end of its copies */

struct cuda_alone;

struct cuda_op {
    struct cuda_gpu *gpu;
    CUstream stream;
    CUdeviceptr in_user, out_user;  /* copied from and to; 0: used in place, or none */
    CUdeviceptr root_from, root_to; /* a root's own copy of its broadcast; 0: none */
    bool has_late_size;             /* how much of `out` is written is known at the end only */
    bool is_launched;               /* the worker's stream has it: results may be waited for */
    bool is_delivered; /* results are in the caller's memory once `event` has happened */
    CUstream delivered_by;
    struct stage_buffer *in, *out; /* owned; may be the same */
    struct cuda_event *event;      /* after the last use of the buffers; NULL: none */
    struct cuda_queue *queue;      /* the worker takes device memory; else NULL */
    uint64_t ticket;
    struct cuda_word *word; /* staged: stored by the worker at the end; NULL: no such words */
    uint64_t word_value;
    struct cuda_alone *alone; /* a world of one: what the host function does; owned */
    struct cuda_op *next;
};

enum cuda_place { CUDA_HOST, CUDA_PLACED };

/*
 * Is this an op on device memory? Then take what it needs, possibly releasing the lock. An enum
 * cuda_place, or a status.
 */
int cuda_op_prepare(struct gradd *g, const struct cuda_table *table, const struct gradd_op *request,
                    const struct op_shape *shape, struct op *op);
/* Make one submission of prepared ops: one GPU, one stream, one queue with room. 0 or a status; may
 * release the lock. */
int cuda_ops_join(struct gradd *g, struct op **ops, size_t n);
/* Copy in, and mark the inputs as ready, in the stream. 0 or a status. */
int cuda_ops_issue(struct gradd *g, struct op **ops, size_t n);
/* Must the submission's message wait for the stream's copies? */
bool cuda_op_is_staged(const struct op *op);
/* Have `launch` sent by the stream of the submission; an error ends its ops. */
void cuda_ops_launch(struct gradd *g, struct op **ops, size_t n, struct cuda_launch *launch);
void cuda_op_describe(const struct op *op, Pb__Buffer *signal, Pb__Submit *out);
void cuda_op_enqueued(struct gradd *g, struct op *op);
void cuda_op_ended(struct gradd *g, struct op *op, int status);
/* The op is no more: free its side record now, or when its copies have ended. */
void cuda_op_release(struct gradd *g, struct op *op);
/* Free what copies that have ended have held. */
void cuda_ops_collect(struct gradd *g);
void cuda_ops_free(struct cuda *cuda);

/* ---- cuda_result.c: results into the caller's memory, and streams that wait for them */

/* The submission that ended well: 0: its results are there; GRADD_PENDING; or a status. */
int cuda_deliver(struct gradd *g, struct op *lead);
/* The same, waiting until deadline_ns (WAIT_FOREVER: none) without the lock. */
int cuda_await_delivery(struct gradd *g, struct op *lead, uint64_t deadline_ns);
/* May streams be made to wait for the submission (a struct op: its lead)? */
bool cuda_is_launched(const void *lead);
/* Make the stream wait for the submission's results. 0 or a status. */
int cuda_order_stream(struct gradd *g, struct op *lead, CUstream stream);
/* Nobody will wait for the submission. */
void cuda_abandon(struct op *lead);
/* The submission is released and has ended: send its results off, then free side records. */
void cuda_settle(struct gradd *g, struct op *lead);

/* ---- cuda_alone.c: a world of one */

/* Take what the op needs. 0 or a status. */
int cuda_alone_prepare(struct gradd *g, const struct gradd_op *request,
                       const struct op_shape *shape, struct op *op);
/* Run the op in its stream. 0, or a status with *out_text set. */
int cuda_alone_run(struct gradd *g, struct op *op, const struct gradd_op *request,
                   const struct op_shape *shape, const char **out_text);
/* The stream has done it: take over what the host function found. */
void cuda_alone_end(struct op *op);

#endif
