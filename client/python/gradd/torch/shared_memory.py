# SPDX-License-Identifier: Apache-2.0
"""New tensors in memory that the worker shares, for the results of out-of-place ops.

The worker writes a large result where the caller finds it, instead of through a copy, and memory
that has been touched once is used again: fresh memory of 25 MB costs more in page faults than its
reduction. A tensor's memory comes back to the pool when the last tensor that views it is gone.
"""

from __future__ import annotations

import ctypes
import threading
import weakref

import torch

import gradd
from gradd.context import Context, Region
from gradd.errors import GraddError
from gradd.torch.basics import before_shutdown
from gradd.torch.engine import DTYPES

_BYTES_MIN = 1 << 20  # smaller results are cheap to copy
_POOL_BYTES_MAX = 256 << 20  # kept for later, per context


class _Pool:
    """Regions of one context by size class. Thread: any; tensors die on any thread."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._lock = threading.RLock()  # the collector may call give_back() while it is held
        self._spare: dict[int, list[Region]] = {}
        self._n_bytes = 0

    def take(self, n_bytes: int) -> Region:
        """A region of at least n_bytes; raises GraddError where the job's quota is used up."""
        step = 1 << max(n_bytes.bit_length() - 4, 16)  # at most 1/8 is wasted
        size = -(-n_bytes // step) * step
        with self._lock:
            spare = self._spare.get(size)
            if spare:
                self._n_bytes -= size
                return spare.pop()
        return self.context.alloc(size)

    def give_back(self, region: Region) -> None:
        with self._lock:
            if self.context.is_open and self._n_bytes + region.n_bytes <= _POOL_BYTES_MAX:
                self._n_bytes += region.n_bytes
                self._spare.setdefault(region.n_bytes, []).append(region)


_pool: _Pool | None = None


def _clear() -> None:
    global _pool
    _pool = None


before_shutdown.append(_clear)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor of this shape and type, shared with the worker where that pays."""
    global _pool
    if not gradd.is_initialized():
        return torch.empty_like(tensor.detach())  # submitting will say what is wrong
    context = gradd.context()
    n_bytes = tensor.numel() * tensor.element_size()
    if (n_bytes < _BYTES_MIN or context.size == 1 or tensor.device.type != "cpu"
            or tensor.layout != torch.strided or tensor.dtype not in DTYPES
            or not tensor.is_contiguous()):
        return torch.empty_like(tensor.detach())
    if _pool is None or _pool.context is not context:
        _pool = _Pool(context)
    try:
        region = _pool.take(n_bytes)
    except GraddError:
        return torch.empty_like(tensor.detach())
    memory = (ctypes.c_char * n_bytes).from_address(region.address)
    weakref.finalize(memory, _pool.give_back, region).atexit = False
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
