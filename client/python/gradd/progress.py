# SPDX-License-Identifier: Apache-2.0
"""The completion thread: calls a function once an op has ended.

Invariant: every watched op's function is called exactly once, on this thread, after the op has
ended, or when the thread is stopped first (then with a Shutdown error). The thread sleeps in
poll(2) on ``gradd_fd`` while ops are watched, and on its own pipe while none is.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from typing import TYPE_CHECKING, Any, Callable, Optional

from gradd._library import PENDING
from gradd.errors import GraddError, Shutdown, from_status

if TYPE_CHECKING:
    from gradd.context import Context

DoneFn = Callable[[Optional[GraddError]], None]

_log = logging.getLogger("gradd")


class Progress:
    """Watches ops of one context. Thread: any."""

    def __init__(self, context: "Context") -> None:
        # The thread uses the library directly: shutdown() ends it before the context is freed.
        self._library, self._pointer = context.library, context.pointer
        self._lock = threading.Lock()
        self._watched: dict[int, DoneFn] = {}
        self._launching: dict[int, tuple[int, DoneFn, Any]] = {}
        self._is_stopping = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="gradd-progress", daemon=True)
        self._thread.start()

    def watch(self, handle: int, on_done: DoneFn) -> None:
        """Call ``on_done(error or None)`` once the op has ended. It must not block; it may submit.

        The handle is released after on_done has returned: its counts can be read there.
        """
        with self._lock:
            if self._is_stopping:
                raise Shutdown("the context has left its job", -9)
            self._watched[handle] = on_done
        self._wake()

    def watch_launch(self, handle: int, stream: int, on_launched: DoneFn, keep: Any) -> None:
        """Call ``on_launched(error or None)`` once the CUDA stream waits for the op's results.

        `keep` is held until the op has ended, when its handle is released.
        """
        with self._lock:
            if self._is_stopping:
                raise Shutdown("the context has left its job", -9)
            self._launching[handle] = stream, on_launched, keep
        self._wake()

    def stop(self) -> None:
        """End the thread; what is still watched ends with a Shutdown error. Idempotent.

        Not from a callback: the thread cannot wait for its own end.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a completion callback must not leave the job")
        with self._lock:
            if self._is_stopping:
                return
            self._is_stopping = True
        self._wake()
        self._thread.join()
        for on_done in self._take_all():
            _call(on_done, Shutdown("the context has left its job while the op was running", -9))
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _take_all(self) -> list[DoneFn]:
        with self._lock:
            functions = list(self._watched.values())
            functions += [on_launched for _, on_launched, _ in self._launching.values()]
            self._watched.clear()
            self._launching.clear()
        return functions

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of wake-ups already

    def _run(self) -> None:
        library, pointer = self._library, self._pointer
        idle, busy = select.poll(), select.poll()
        idle.register(self._wake_read, select.POLLIN)
        busy.register(self._wake_read, select.POLLIN)
        fd = library.gradd_fd(pointer)
        if fd >= 0:
            busy.register(fd, select.POLLIN)
        while True:
            with self._lock:
                if self._is_stopping:
                    return
                is_idle = not self._watched and not self._launching
            # A worker that ended without a word is found out by a later look, hence the limit.
            ready = idle.poll() if is_idle else busy.poll(1000)
            if any(ready_fd == self._wake_read for ready_fd, _ in ready):
                os.read(self._wake_read, 4096)
            if not is_idle:
                library.gradd_progress(pointer)
            self._finish_launched()
            self._finish_ended()

    def _finish_launched(self) -> None:
        library, pointer = self._library, self._pointer
        with self._lock:
            launching = list(self._launching.items())
        for handle, (stream, on_launched, keep) in launching:
            status = library.gradd_wait_stream(pointer, handle, stream, 0.0)
            if status == PENDING:
                continue
            error = from_status(status, library.gradd_error().decode()) if status < 0 else None
            with self._lock:
                if self._launching.pop(handle, None) is None:
                    continue  # stop() has told it
                self._watched[handle] = lambda _error, _keep=keep: None
            _call(on_launched, error)

    def _finish_ended(self) -> None:
        library, pointer = self._library, self._pointer
        with self._lock:
            handles = list(self._watched)
        for handle in handles:
            status = library.gradd_test(pointer, handle)
            if status == PENDING:
                continue
            error = from_status(status, library.gradd_error().decode()) if status < 0 else None
            with self._lock:
                on_done = self._watched.pop(handle, None)
            if on_done is not None:
                _call(on_done, error)
                library.gradd_release(pointer, handle)


def _call(on_done: DoneFn, error: GraddError | None) -> None:
    try:
        on_done(error)
    except Exception:  # a defect in a callback must not end the progress of all other ops
        _log.exception("a completion callback raised")
