# SPDX-License-Identifier: Apache-2.0
"""What a collective returns: torch's Work, on a handle of gradd.

Invariant: `finish`, which brings the result to the outputs, runs exactly once, after the op and
before anybody learns of its end: in the thread that waits, or, once the op is watched, on the
context's completion thread. Until then the Work holds the tensors.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Callable

import torch
from torch._C._distributed_c10d import Work as TorchWork

from gradd import _device
from gradd.context import Context
from gradd.errors import GraddError, Timeout


class Work(TorchWork):
    """One submission. `outputs` are the tensors that the caller passed for the result.

    A Work begins before its op is submitted where `is_watched`: start_watched() or end() follows.
    """

    def __init__(self, name: str, outputs: list[Any], timeout_s: float,
                 finish: Callable[[], None] | None = None, keep: Any = None,
                 source: int = -1, is_watched: bool = False,
                 on_device: torch.Tensor | None = None) -> None:
        super().__init__()
        self._name = name
        self._outputs = outputs
        self._timeout_s = timeout_s
        self._finish = finish
        self._keep = keep
        self._source = source
        self._mark: Any = None  # behind what finish() has put into a stream
        self._on_device = on_device  # CUDA: waiting is done by this tensor's stream
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._context: Context | None = None
        self._handle = 0
        self._is_watched = is_watched
        self._error: BaseException | None = None
        self._future: torch.futures.Future | None = None  # completed by end()
        self._result: torch.futures.Future | None = None  # completed by it, with the outputs
        self.is_taken = False  # somebody has waited, or has the future

    # -------------------------------------------------------------- gradd's side

    def start(self, context: Context, handle: int) -> "Work":
        """The op is submitted; it is finished by whoever waits first."""
        self._context = context
        self._handle = handle
        return self

    def start_watched(self, context: Context, handle: int) -> None:
        """The op is submitted; the completion thread finishes it."""
        self.start(context, handle)
        context.add_done_callback(handle, self.end)

    def watch(self) -> None:
        """Let the completion thread finish the op, whether or not somebody waits."""
        with self._lock:
            if self._is_watched or self._ended.is_set():
                return
            self._is_watched = True
            assert self._context is not None
            try:
                self._context.add_done_callback(self._handle, self.end)
            except GraddError as error:  # the context is closed
                self.end(error)

    def end(self, error: BaseException | None) -> None:
        """The op has ended, or could not be submitted."""
        if error is None and self._finish is not None:
            try:
                self._finish()
                if self._on_device is not None:
                    self._mark = _device.mark(self._on_device)
            except Exception as failure:  # e.g. out of memory: it is the op's result
                error = failure
        with self._lock:
            self._error = error
            self._finish = self._keep = None
            future = self._future
            self._ended.set()
        if future is not None:
            future.set_result(self._told(error))

    # -------------------------------------------------------------- torch's side

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the op has ended; raises its error, or Timeout."""
        seconds = timeout.total_seconds() or self._timeout_s
        with self._lock:
            if not self._is_watched and not self._ended.is_set():
                self._wait_here(seconds)
        if not self._ended.wait(seconds):
            raise self._too_late(seconds)
        self.is_taken = True
        if self._error is not None:
            raise self._error
        if self._mark is not None and self._on_device is not None:
            _device.await_mark(self._on_device, self._mark)
        return True

    def _wait_here(self, seconds: float) -> None:
        # Under the lock: nobody may watch the op meanwhile.
        assert self._context is not None
        try:
            if self._on_device is not None:
                has_ended = self._wait_by_stream(self._on_device, seconds)
            else:
                has_ended = self._context.wait(self._handle, seconds)
        except GraddError as error:
            self.end(error)
            return
        if not has_ended:
            raise self._too_late(seconds)
        self.end(None)

    def _wait_by_stream(self, tensor: torch.Tensor, seconds: float) -> bool:
        """The current stream waits; the host does so until the op is launched only."""
        assert self._context is not None
        context, keep = self._context, (self._keep, self._outputs)
        if not context.wait_stream(self._handle, _device.stream_of(tensor), seconds):
            return False
        context.add_done_callback(self._handle, lambda _error, _keep=keep: None)
        return True

    def _too_late(self, seconds: float) -> Timeout:
        job = self._context.job if self._context is not None else "not yet joined"
        return Timeout(f'job {job}: "{self._name}" has not ended within {seconds:g} s: other ranks '
                       "have not called it, or are slow")

    def is_completed(self) -> bool:
        """Have the outputs been written, or has the op failed? Never blocks."""
        if self._ended.is_set() or not self._lock.acquire(blocking=False):
            return self._ended.is_set()
        try:
            self.watch()
        finally:
            self._lock.release()
        return self._ended.is_set()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> torch.futures.Future:
        """Completes with the outputs, or with a RuntimeError that has the op's sentence."""
        with self._lock:
            self.is_taken = True
            if self._result is None:
                self._future = _device.future_of(self._on_device)
                self._result = self._future.then(self._value)
                if self._ended.is_set():
                    self._future.set_result(self._told(self._error))
                else:
                    self.watch()
            return self._result

    def _told(self, error: BaseException | None) -> Any:
        """Of CUDA tensors a future must be told, since whoever waits for it waits by stream."""
        return None if self._on_device is None or error is not None else self._outputs

    def _value(self, _future: torch.futures.Future) -> list[Any]:
        # An error that a callback raises reaches callers in C++ as an error; one that is set on a
        # future is a value to them.
        if self._error is not None:
            raise self._error
        return self._outputs
