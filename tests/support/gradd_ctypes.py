# SPDX-License-Identifier: Apache-2.0
"""The C API of libgradd for tests, as thin as ctypes allows. GRADD_BUILD names the build."""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint, c_uint32,
    c_uint64, c_void_p,
)

I8, U8, I32, I64, F16, F32, F64, BF16 = 0, 1, 2, 4, 6, 7, 8, 9
SUM, PROD, MAX, MIN, AVG = range(5)
ALLREDUCE, BROADCAST, ALLGATHER, REDUCE_SCATTER, ALLTOALL, BARRIER, SET_ADD, SET_REMOVE, JOIN = (
    range(9)
)

STATUS = {
    "OK": 0, "PENDING": 1, "INVALID": -1, "DISAGREE": -2, "RANK_LOST": -3, "TIMEOUT": -4,
    "UNAVAILABLE": -5, "NO_MEMORY": -6, "PROTOCOL": -7, "DENIED": -8, "SHUTDOWN": -9,
    "FORKED": -10, "DUPLICATE": -11, "UNSUPPORTED": -12, "INTERNAL": -13,
}


class Options(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("socket", c_char_p), ("job", c_char_p), ("rank", c_int32),
        ("size", c_int32), ("local_rank", c_int32), ("local_size", c_int32),
        ("timeout_s", c_double),
    ]


class Op(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("kind", c_int32), ("dtype", c_int32), ("redop", c_int32),
        ("root", c_int32), ("set", c_uint32), ("name", c_char_p), ("input", c_void_p),
        ("output", c_void_p), ("count", c_uint64), ("out_capacity", c_uint64),
        ("counts", POINTER(c_uint64)), ("prescale", c_double), ("postscale", c_double),
        ("check_finite", c_uint32),
    ]


_PROTOTYPES = {
    "gradd_version": (c_char_p,),
    "gradd_abi_version": (c_int,),
    "gradd_protocol_range": (None, POINTER(c_uint), POINTER(c_uint)),
    "gradd_error": (c_char_p,),
    "gradd_status_name": (c_char_p, c_int),
    "gradd_dtype_size": (c_size_t, c_int),
    "gradd_init": (c_int, POINTER(Options), POINTER(c_void_p)),
    "gradd_shutdown": (None, c_void_p),
    "gradd_rank": (c_int, c_void_p),
    "gradd_size": (c_int, c_void_p),
    "gradd_local_rank": (c_int, c_void_p),
    "gradd_local_size": (c_int, c_void_p),
    "gradd_node_rank": (c_int, c_void_p),
    "gradd_n_nodes": (c_int, c_void_p),
    "gradd_epoch": (c_uint64, c_void_p),
    "gradd_job": (c_char_p, c_void_p),
    "gradd_source": (c_char_p, c_void_p),
    "gradd_alloc": (c_void_p, c_void_p, c_size_t),
    "gradd_free": (c_int, c_void_p, c_void_p),
    "gradd_submit": (c_int64, c_void_p, POINTER(Op), c_size_t),
    "gradd_test": (c_int, c_void_p, c_int64),
    "gradd_wait": (c_int, c_void_p, c_int64, c_double),
    "gradd_release": (c_int, c_void_p, c_int64),
    "gradd_counts": (c_int64, c_void_p, c_int64, c_size_t, POINTER(c_uint64), c_size_t),
    "gradd_nonfinite": (
        c_int, c_void_p, c_int64, c_size_t, POINTER(c_int32), POINTER(c_uint64),
    ),
    "gradd_fd": (c_int, c_void_p),
    "gradd_progress": (c_int, c_void_p),
    "gradd_barrier": (c_int, c_void_p, c_uint32),
    "gradd_allreduce": (
        c_int, c_void_p, c_char_p, c_void_p, c_void_p, c_uint64, c_int, c_int,
    ),
    "gradd_allreduce_async": (
        c_int64, c_void_p, c_char_p, c_void_p, c_void_p, c_uint64, c_int, c_int,
    ),
    "gradd_broadcast": (c_int, c_void_p, c_char_p, c_void_p, c_uint64, c_int, c_int),
    "gradd_allgather": (
        c_int, c_void_p, c_char_p, c_void_p, c_uint64, c_void_p, c_uint64, c_int,
        POINTER(c_uint64),
    ),
    "gradd_reduce_scatter": (
        c_int, c_void_p, c_char_p, c_void_p, c_uint64, c_void_p, POINTER(c_uint64), c_int, c_int,
    ),
    "gradd_alltoall": (
        c_int, c_void_p, c_char_p, c_void_p, c_uint64, POINTER(c_uint64), c_void_p, c_uint64,
        c_int, POINTER(c_uint64),
    ),
}


def load() -> ctypes.CDLL:
    build = os.environ["GRADD_BUILD"]
    library = ctypes.CDLL(os.path.join(build, "client/lib/libgradd.so.0"), use_errno=True)
    for name, (result, *arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def counts_array(counts: list[int] | None) -> ctypes.Array | None:
    return (c_uint64 * len(counts))(*counts) if counts is not None else None


def make_op(**fields: object) -> Op:
    op = Op(struct_size=ctypes.sizeof(Op))
    for name, value in fields.items():
        if name == "name" and isinstance(value, str):
            value = value.encode()
        if name == "counts":
            array = counts_array(value)
            if array is not None:
                op.counts = ctypes.cast(array, POINTER(c_uint64))
                op._keep = array
            continue
        setattr(op, name, value)
    return op
