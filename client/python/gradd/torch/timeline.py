# SPDX-License-Identifier: Apache-2.0
"""A Chrome trace of this process's ops, in the layout that readers of Horovod's timeline expect.

Rank 0 writes it. Times are the trainer's: NEGOTIATE_X is the time until the request was handed
over, X the time until its result was there, waiting for other ranks included (``gradctl`` shows
the worker's own times). The file is a complete JSON array after every event.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any, TextIO

import gradd


class Timeline:
    """One open trace. Thread: any."""

    def __init__(self, path: str, mark_cycles: bool) -> None:
        self._lock = threading.Lock()
        self._file: TextIO | None = open(path, "w")
        self._mark_cycles = mark_cycles
        self._start_ns = time.monotonic_ns()
        self._pids: dict[str, int] = {}
        self._file.write("[\n]\n")
        with self._lock:
            self._write({"name": "process_name", "ph": "M", "pid": 0, "args": {
                "start_time_since_epoch_in_micros": time.time_ns() // 1000}})

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is None:
            return
        event.setdefault("ts", (time.monotonic_ns() - self._start_ns) // 1000)
        self._file.seek(self._file.tell() - 2)
        self._file.write(("" if event["pid"] == 0 and event["ph"] == "M" else ",\n")
                         + json.dumps(event) + "]\n")
        self._file.flush()

    def _pid(self, tensor: str) -> int:
        pid = self._pids.get(tensor)
        if pid is None:
            pid = self._pids[tensor] = len(self._pids) + 1
            self._write({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": tensor}})
            self._write({"name": "process_sort_index", "ph": "M", "pid": pid,
                         "args": {"sort_index": pid}})
        return pid

    def begin(self, kind: str, name: str, rank: int) -> None:
        """An op is about to be submitted."""
        with self._lock:
            if self._mark_cycles:
                self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": 0})
            pid = self._pid(f"{kind.lower()}.{name}")
            self._write({"name": f"NEGOTIATE_{kind}", "ph": "B", "pid": pid})
            self._write({"name": str(rank), "ph": "X", "dur": 0, "pid": pid})

    def submitted(self, kind: str, name: str) -> None:
        """The worker has the request."""
        with self._lock:
            pid = self._pid(f"{kind.lower()}.{name}")
            self._write({"name": f"NEGOTIATE_{kind}", "ph": "E", "pid": pid})
            self._write({"name": kind, "ph": "B", "pid": pid})

    def end(self, kind: str, name: str, args: dict[str, Any]) -> None:
        """The result is there."""
        with self._lock:
            pid = self._pid(f"{kind.lower()}.{name}")
            self._write({"name": kind, "ph": "E", "pid": pid, "args": args})

    def close(self) -> None:
        """Later events are dropped."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


current: Timeline | None = None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline from now on (rank 0 does). Needs HOROVOD_TIMELINE, as in Horovod."""
    global current
    if _is_writer():
        if current is not None:
            current.close()
        current = Timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline. Needs HOROVOD_TIMELINE, as in Horovod."""
    global current
    _is_writer()
    if current is not None:
        current.close()
        current = None


def _is_writer() -> bool:
    rank = gradd.context().rank
    if not os.environ.get("HOROVOD_TIMELINE"):
        raise ValueError("set HOROVOD_TIMELINE=DYNAMIC before init() to use the timeline")
    return rank == 0
