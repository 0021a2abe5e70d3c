# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of ``include/gradd/types.h``, and how buffers' formats map to it."""

from __future__ import annotations

import enum
import struct


class DType(enum.IntEnum):
    """Element types; half types are accumulated in float32."""

    I8 = 0
    U8 = 1
    I32 = 2
    I64 = 4
    F16 = 6
    F32 = 7
    F64 = 8
    BF16 = 9

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


class ReduceOp(enum.IntEnum):
    """Reduction operators. AVG divides by the number of ranks of the process set."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class Kind(enum.IntEnum):
    """Kinds of collective."""

    ALLREDUCE = 0
    BROADCAST = 1
    ALLGATHER = 2
    REDUCE_SCATTER = 3
    ALLTOALL = 4
    BARRIER = 5
    SET_ADD = 6
    SET_REMOVE = 7
    JOIN = 8


_ITEMSIZE = {
    DType.I8: 1, DType.U8: 1, DType.I32: 4, DType.I64: 8, DType.F16: 2, DType.F32: 4,
    DType.F64: 8, DType.BF16: 2,
}

_SIGNED = {1: DType.I8, 4: DType.I32, 8: DType.I64}


def dtype_of_format(format: str) -> DType:
    """The element type of a buffer's ``format`` (as in :mod:`struct`). ValueError if none fits."""
    code = format.lstrip("@=<")
    if code in ("e", "f", "d"):
        return {"e": DType.F16, "f": DType.F32, "d": DType.F64}[code]
    if code in ("B", "?", "c"):
        return DType.U8
    if code in ("b", "h", "i", "l", "q"):
        dtype = _SIGNED.get(struct.calcsize(code))
        if dtype is not None:
            return dtype
    raise ValueError(f"a buffer of format {format!r} has no element type that gradd knows")
