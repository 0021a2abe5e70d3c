/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The vocabulary that the library, the daemon and the worker share: element types, reduction
 * operators, kinds of collective, and status codes. The numbers are part of the ABI and of the
 * wire protocol: they are never reused. Element types and operators have NCCL's numbers.
 */
#ifndef GRADD_TYPES_H
#define GRADD_TYPES_H

#ifdef __cplusplus
extern "C" {
#endif

/** Element types (numerically equal to ncclDataType_t). */
enum gradd_dtype {
    GRADD_I8 = 0,
    GRADD_U8 = 1,
    GRADD_I32 = 2,
    GRADD_I64 = 4,
    GRADD_F16 = 6, /**< IEEE binary16, accumulated in float32 */
    GRADD_F32 = 7,
    GRADD_F64 = 8,
    GRADD_BF16 = 9, /**< upper half of a binary32, accumulated in float32 */
};

/** Reduction operators (numerically equal to ncclRedOp_t). */
enum gradd_redop {
    GRADD_SUM = 0,  /**< integers wrap around */
    GRADD_PROD = 1, /**< integers wrap around */
    GRADD_MAX = 2,  /**< a NaN on any rank gives NaN */
    GRADD_MIN = 3,  /**< a NaN on any rank gives NaN */
    GRADD_AVG = 4,  /**< sum / ranks; integers: summed in int64, then truncated toward zero */
};

/** Kinds of collective. */
enum gradd_kind {
    GRADD_ALLREDUCE = 0,
    GRADD_BROADCAST = 1,
    GRADD_ALLGATHER = 2,
    GRADD_REDUCE_SCATTER = 3,
    GRADD_ALLTOALL = 4,
    GRADD_BARRIER = 5,
    GRADD_SET_ADD = 6,    /**< create a process set: `counts` lists its ranks */
    GRADD_SET_REMOVE = 7, /**< dissolve process set `root` */
    GRADD_JOIN = 8,       /**< out of data: later all-reduces count this rank as zeros */
};

/**
 * Results of every call: 0 is success, positive values are outcomes, negative values are errors.
 * gradd_error() has the sentence that belongs to the last error of the calling thread.
 */
enum gradd_status {
    GRADD_OK = 0,
    GRADD_PENDING = 1,           /**< test, or wait whose time ran out: the op is still running */
    GRADD_ERR_INVALID = -1,      /**< an argument or environment variable makes no sense */
    GRADD_ERR_DISAGREE = -2,     /**< ranks submitted different things under one name */
    GRADD_ERR_RANK_LOST = -3,    /**< a rank died or left, or the worker died: the epoch is over */
    GRADD_ERR_TIMEOUT = -4,      /**< op_timeout_s or join_timeout_s passed */
    GRADD_ERR_UNAVAILABLE = -5,  /**< no daemon, or it refuses new jobs */
    GRADD_ERR_NO_MEMORY = -6,    /**< memory, descriptors or a quota ran out */
    GRADD_ERR_PROTOCOL = -7,     /**< versions without overlap, or bytes that are no message */
    GRADD_ERR_DENIED = -8,       /**< not the owner of what was asked for */
    GRADD_ERR_SHUTDOWN = -9,     /**< the context has left its job */
    GRADD_ERR_FORKED = -10,      /**< a child of the process that joined uses its context */
    GRADD_ERR_DUPLICATE = -11,   /**< this name is in flight already, or this rank has joined */
    GRADD_ERR_UNSUPPORTED = -12, /**< this build or this node cannot do that */
    GRADD_ERR_INTERNAL = -13,    /**< a defect of gradd: please report it */
};

#ifdef __cplusplus
}
#endif
#endif
