# SPDX-License-Identifier: Apache-2.0
"""gradd: aggregate gradients through the gradd daemon of the node.

    import gradd
    gradd.init()
    gradd.allreduce(array, op=gradd.ReduceOp.SUM)     # NumPy, JAX host arrays, bytearray, ...

This package has the calls on any buffer-protocol object; ``gradd.torch`` has Horovod's API for
PyTorch, ``gradd.ddp`` and ``gradd.c10d`` serve torch.distributed. One process holds one rank: the
module-level functions share one :class:`Context`.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

from gradd._library import library
from gradd.context import Context, Region, Work, make_op
from gradd.errors import (
    Denied, DuplicateName, Forked, GraddError, HorovodInternalError, InternalError,
    InvalidRequest, NonFinite, OutOfMemory, ProtocolMismatch, RankLost, RanksDisagree,
    ServiceUnavailable, Shutdown, Timeout, Unsupported,
)
from gradd.types import DType, Kind, ReduceOp

__version__ = "0.1.0"

__all__ = [
    "Context", "DType", "Denied", "DuplicateName", "Forked", "GraddError", "HorovodInternalError",
    "InternalError", "InvalidRequest", "Kind", "NonFinite", "OutOfMemory", "ProtocolMismatch",
    "RankLost", "RanksDisagree", "ReduceOp", "Region", "ServiceUnavailable", "Shutdown", "Timeout",
    "Unsupported", "Work", "allgather", "allreduce", "allreduce_async", "alltoall", "barrier",
    "broadcast", "broadcast_async", "context", "init", "is_initialized", "library_version",
    "local_rank", "local_size", "make_op", "rank", "reduce_scatter", "shutdown", "size",
]

_context: Context | None = None


def init(**options: Any) -> Context:
    """Join the job (options as of :class:`Context`); returns the process's context. Idempotent."""
    global _context
    if _context is None or not _context.is_open:
        _context = Context(**options)
    return _context


def shutdown() -> None:
    """Leave the job. Idempotent; called at the interpreter's exit. ``init()`` joins again."""
    global _context
    context_, _context = _context, None
    if context_ is not None:
        context_.shutdown()


def is_initialized() -> bool:
    """Between init() and shutdown(), in the process that called init()."""
    return _context is not None and _context.is_open


def context() -> Context:
    """The process's context. Raises InvalidRequest before init()."""
    if _context is None:
        raise InvalidRequest("gradd has not been initialized: call gradd.init() first", -1)
    return _context


def rank() -> int:
    """Global rank of this process."""
    return context().rank


def size() -> int:
    """Ranks of the job."""
    return context().size


def local_rank() -> int:
    """Rank on this node."""
    return context().local_rank


def local_size() -> int:
    """Ranks on this node."""
    return context().local_size


def library_version() -> str:
    """Version of libgradd, such as "0.1.0"."""
    return library().gradd_version().decode()


def allreduce(buffer: Any, out: Any = None, **options: Any) -> Any:
    """See :meth:`Context.allreduce`."""
    return context().allreduce(buffer, out, **options)


def allreduce_async(buffer: Any, out: Any = None, **options: Any) -> Work:
    """See :meth:`Context.allreduce_async`."""
    return context().allreduce_async(buffer, out, **options)


def broadcast(buffer: Any, root: int = 0, **options: Any) -> Any:
    """See :meth:`Context.broadcast`."""
    return context().broadcast(buffer, root, **options)


def broadcast_async(buffer: Any, root: int = 0, **options: Any) -> Work:
    """See :meth:`Context.broadcast_async`."""
    return context().broadcast_async(buffer, root, **options)


def allgather(buffer: Any, out: Any = None, **options: Any) -> tuple[Any, list[int]]:
    """See :meth:`Context.allgather`."""
    return context().allgather(buffer, out, **options)


def reduce_scatter(buffer: Any, out: Any = None, **options: Any) -> Any:
    """See :meth:`Context.reduce_scatter`."""
    return context().reduce_scatter(buffer, out, **options)


def alltoall(buffer: Any, out: Any = None, **options: Any) -> tuple[Any, list[int]]:
    """See :meth:`Context.alltoall`."""
    return context().alltoall(buffer, out, **options)


def barrier(set: int = 0) -> None:
    """Return when every rank (of the set) has called it."""
    context().barrier(set)


def _leave_at_exit() -> None:
    # A child forked from a process that joined has nothing to say to the daemon.
    if _context is not None and _context._pid == os.getpid():
        shutdown()


atexit.register(_leave_at_exit)
