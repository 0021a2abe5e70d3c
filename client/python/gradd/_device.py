# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors: which stream works on them, and what must stay alive meanwhile.

The order of an op on CUDA tensors is that of streams: it reads its input behind all that was put
into the current stream before it was submitted; waiting for it means that the current stream waits.
No Python code waits for a device.

Invariant: tensors of an op are referenced until the op has ended, results included, though a stream
may wait for it already. Their memory can therefore not be given to anybody else while the worker
uses it, and the allocator need not be told of the worker's stream.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, ContextManager

import torch

from gradd.context import Context
from gradd.errors import GraddError, Shutdown


def is_device(tensor: torch.Tensor) -> bool:
    """Is it in CUDA memory?"""
    return tensor.device.type == "cuda"


def is_reachable(tensor: torch.Tensor) -> bool:
    """Can gradd work on the tensor's own memory?"""
    return tensor.device.type == "cpu" or is_device(tensor)


def reachable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's data where gradd can work on it: itself, or a copy on the host."""
    tensor = tensor.detach()
    return tensor if is_reachable(tensor) else tensor.cpu()


def stream_of(tensor: torch.Tensor) -> int:
    """The handle of the current stream of the tensor's device; 0 for host memory."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if is_device(tensor) else 0


def current(tensor: torch.Tensor) -> Any:
    """The current stream of the tensor's device, to be given to on(). None for host memory."""
    return torch.cuda.current_stream(tensor.device) if is_device(tensor) else None


def side_stream(tensor: torch.Tensor) -> Any:
    """A stream of the tensor's device beside the current one, which it does not delay."""
    return torch.cuda.Stream(tensor.device)


def future_of(tensor: torch.Tensor | None) -> torch.futures.Future:
    """A future of CUDA tensors on this one's device: whoever waits for it does so by stream."""
    is_plain = tensor is None or not is_device(tensor)
    return torch.futures.Future(devices=[] if is_plain else [tensor.device])


def mark(tensor: torch.Tensor) -> Any:
    """What the tensor's current stream has to do so far, for await_mark()."""
    return torch.cuda.current_stream(tensor.device).record_event()


def await_mark(tensor: torch.Tensor, marked: Any) -> None:
    """Make the tensor's current stream wait for what another one had to do."""
    torch.cuda.current_stream(tensor.device).wait_event(marked)


def on(stream: Any) -> ContextManager[Any]:
    """Within, torch works in this stream (None: nothing changes)."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


class InFlight:
    """Ops of one context for which a stream waits already, with the memory that they use.

    Thread: any. An op that fails after that is told by the next call.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._ops: dict[int, tuple[Any, Any]] = {}  # (tag, what to keep) by handle
        self._error: GraddError | None = None

    def add(self, handle: int, tag: Any, keep: Any) -> None:
        with self._lock:
            self._ops[handle] = tag, keep

    def reap(self) -> None:
        """Let go of ops that have ended. Raises the error of one that failed."""
        with self._lock:
            handles = list(self._ops)
        for handle in handles:
            if self._context.test(handle):
                self._end(handle)
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def await_tag(self, tag: Any) -> None:
        """Wait for the end of the ops that were added with this tag."""
        with self._lock:
            handles = [handle for handle, (other, _) in self._ops.items() if other == tag]
        for handle in handles:
            self._end(handle)

    def _end(self, handle: int) -> None:
        with self._lock:
            if self._ops.pop(handle, None) is None:
                return  # another thread has it
        try:
            self._context.wait(handle)
        except Shutdown:
            pass
        except GraddError as error:
            with self._lock:
                self._error = self._error or error
