# SPDX-License-Identifier: Apache-2.0
"""A trainer that a test steps: one JSON request a line on stdin, one JSON reply a line on stdout.

A request is {"do": COMMAND, ...arguments}; the commands are the functions below that carry
@command. A reply is {"ok": RESULT}, or {"raised": TRACEBACK}. Nothing happens between requests,
so the test decides the order of events on all ranks.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import sys
import time
import traceback
from typing import Any, Callable

import numpy as np

import collectives
import gradd_ctypes as api

lib = api.load()
COMMANDS: dict[str, Callable[..., Any]] = {}
contexts: dict[str, ctypes.c_void_p] = {}
buffers: dict[str, np.ndarray] = {}
handles: dict[str, int] = {}


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    COMMANDS[function.__name__] = function
    return function


def outcome(status: int) -> dict[str, Any]:
    """A status with its name and, for errors, the sentence."""
    text = lib.gradd_error().decode() if status < 0 else ""
    return {"status": status, "name": lib.gradd_status_name(status).decode(), "error": text}


@command
def init(context: str = "g", job: str | None = None, rank: int = 0, size: int = 0,
         socket: str | None = None, local_rank: int | None = None, local_size: int = 0,
         timeout_s: float = 0.0, coordinator: str | None = None) -> dict[str, Any]:
    if coordinator is not None:
        os.environ["GRADD_COORDINATOR"] = coordinator
    options = api.Options(
        struct_size=ctypes.sizeof(api.Options),
        socket=socket.encode() if socket else None,
        job=job.encode() if job else None,
        rank=rank, size=size, local_rank=rank if local_rank is None else local_rank,
        local_size=local_size, timeout_s=timeout_s)
    g = ctypes.c_void_p()
    started = time.monotonic()
    result = outcome(lib.gradd_init(ctypes.byref(options), ctypes.byref(g)))
    result["seconds"] = time.monotonic() - started
    result["at"] = time.time()
    if result["status"] == 0:
        contexts[context] = g
        for name in ("rank", "size", "local_rank", "local_size", "node_rank", "n_nodes", "epoch"):
            result[name] = getattr(lib, "gradd_" + name)(g)
        result["job"] = lib.gradd_job(g).decode()
        result["source"] = lib.gradd_source(g).decode()
    return result


@command
def shutdown(context: str = "g") -> None:
    lib.gradd_shutdown(contexts.pop(context))


@command
def shutdown_all() -> None:
    for context in list(contexts):
        shutdown(context)


@command
def alloc(key: str, count: int, dtype: int = api.F32, registered: bool = True,
          context: str = "g") -> dict[str, Any]:
    """A named buffer, in shared memory or in the trainer's own."""
    array, status = collectives.make_array(
        lib, contexts[context] if registered else None, count, dtype)
    if array is None:
        return outcome(-1 if status is None else status)
    buffers[key] = array
    return {"status": 0}


@command
def free(key: str, context: str = "g") -> dict[str, Any]:
    return outcome(lib.gradd_free(contexts[context], buffers.pop(key).ctypes.data))


@command
def fill(key: str, value: float) -> None:
    buffers[key][:] = value


@command
def put(key: str, places: dict[str, float]) -> None:
    for place, value in places.items():
        buffers[key][int(place)] = float(value)


@command
def values(key: str, n: int = 4) -> list[float]:
    return [float(x) for x in buffers[key][:n]]


def build_op(spec: dict[str, Any]) -> api.Op:
    fields = dict(spec)
    for side, member in (("in", "input"), ("out", "output")):
        key = fields.pop(side, None)
        if key is not None:
            fields[member] = buffers[key].ctypes.data
    return api.make_op(**fields)


@command
def submit(*, handle: str, ops: list[dict[str, Any]], context: str = "g") -> dict[str, Any]:
    built = [build_op(spec) for spec in ops]
    array = (api.Op * len(built))(*built)
    result = lib.gradd_submit(contexts[context], array, len(built))
    if result > 0:
        handles[handle] = result
        return {"status": 0}
    return outcome(result)


@command
def wait(handle: str, timeout_s: float = -1.0, context: str = "g") -> dict[str, Any]:
    started = time.monotonic()
    status = lib.gradd_wait(contexts[context], handles[handle], timeout_s)
    return {**outcome(status), "seconds": time.monotonic() - started, "at": time.time()}


@command
def test(handle: str, context: str = "g") -> dict[str, Any]:
    return outcome(lib.gradd_test(contexts[context], handles[handle]))


@command
def release(handle: str, context: str = "g") -> dict[str, Any]:
    return outcome(lib.gradd_release(contexts[context], handles[handle]))


@command
def counts(handle: str, index: int = 0, capacity: int = 64, context: str = "g") -> list[int]:
    out = (ctypes.c_uint64 * capacity)()
    n = lib.gradd_counts(contexts[context], handles[handle], index, out, capacity)
    return list(out[:n]) if n >= 0 else [n]


@command
def poll_fd(timeout_s: float, context: str = "g") -> dict[str, Any]:
    """Wait until the context's fd is readable, then make progress."""
    fd = lib.gradd_fd(contexts[context])
    readable, _, _ = select.select([fd], [], [], timeout_s)
    status = lib.gradd_progress(contexts[context])
    return {**outcome(status), "readable": bool(readable)}


@command
def progress(context: str = "g") -> dict[str, Any]:
    return outcome(lib.gradd_progress(contexts[context]))


@command
def barrier(set: int = 0, context: str = "g") -> dict[str, Any]:
    started = time.monotonic()
    result = outcome(lib.gradd_barrier(contexts[context], set))
    return {**result, "seconds": time.monotonic() - started, "at": time.time()}


@command
def allreduce(name: str, key: str, redop: int = api.SUM, dtype: int = api.F32,
              out: str | None = None, context: str = "g") -> dict[str, Any]:
    source, target = buffers[key], buffers[out or key]
    return outcome(lib.gradd_allreduce(
        contexts[context], name.encode(), source.ctypes.data, target.ctypes.data, source.size,
        dtype, redop))


def wait_and_count(handle: int, context: str) -> dict[str, Any]:
    """The counts of a one-op submission, read before its handle goes."""
    g = contexts[context]
    while (status := lib.gradd_test(g, handle)) == api.STATUS["PENDING"]:
        select.select([lib.gradd_fd(g)], [], [], 10.0)
        lib.gradd_progress(g)
    result = outcome(status)
    out = (ctypes.c_uint64 * 64)()
    n = lib.gradd_counts(g, handle, 0, out, 64)
    lib.gradd_release(g, handle)
    return {**result, "counts": list(out[: max(n, 0)])}


@command
def wait_nonfinite(handle: str, context: str = "g") -> dict[str, Any]:
    """What check_finite has found in a one-op submission: a rank and a number of elements."""
    g = contexts[context]
    while (status := lib.gradd_test(g, handles[handle])) == api.STATUS["PENDING"]:
        select.select([lib.gradd_fd(g)], [], [], 10.0)
        lib.gradd_progress(g)
    result = outcome(status)
    rank, count = ctypes.c_int32(-1), ctypes.c_uint64(0)
    found = lib.gradd_nonfinite(g, handles[handle], 0, ctypes.byref(rank), ctypes.byref(count))
    lib.gradd_release(g, handles[handle])
    return {**result, "found": found, "rank": rank.value, "count": count.value}


@command
def wait_counts(handle: str, context: str = "g") -> dict[str, Any]:
    return wait_and_count(handles[handle], context)


@command
def add_set(name: str, ranks: list[int], context: str = "g") -> dict[str, Any]:
    op = api.make_op(kind=api.SET_ADD, name=name, counts=ranks, count=len(ranks))
    handle = lib.gradd_submit(contexts[context], ctypes.byref(op), 1)
    if handle < 0:
        return outcome(handle)
    result = wait_and_count(handle, context)
    return {**result, "set": result["counts"][0] if result["counts"] else None}


@command
def remove_set(set: int, context: str = "g") -> dict[str, Any]:
    op = api.make_op(kind=api.SET_REMOVE, name=f"remove.{set}", root=set)
    handle = lib.gradd_submit(contexts[context], ctypes.byref(op), 1)
    return outcome(lib.gradd_wait(contexts[context], handle, -1.0) if handle > 0 else handle)


@command
def overlap(context: str = "g") -> dict[str, Any]:
    array, _ = collectives.make_array(lib, contexts[context], 200, api.F32)
    pointer = array.ctypes.data
    return outcome(lib.gradd_allreduce(
        contexts[context], b"overlap", pointer, pointer + 40, 100, api.F32, api.SUM))


@command
def cycles(n: int, **how: Any) -> dict[str, Any]:
    """Join, barrier and leave n times. Stops at the first error."""
    started = time.monotonic()
    for i in range(n):
        joined = init(**how)
        if joined["status"] != 0:
            return {"done": i, **joined}
        status = lib.gradd_barrier(contexts["g"], 0)
        if status != 0:
            return {"done": i, **outcome(status)}
        shutdown()
    return {"done": n, "status": 0, "seconds": time.monotonic() - started}


@command
def check(what: str, context: str = "g", **arguments: Any) -> dict[str, Any]:
    """Run a family of collectives of collectives.py and compare with the reference."""
    return getattr(collectives, what)(lib, contexts[context], **arguments)


@command
def fork_and_use(hold: str, context: str = "g") -> dict[str, Any]:
    """Fork; the child calls everything, reports, and lives until the test lets go of the FIFO."""
    report_read, report_write = os.pipe()
    child = os.fork()
    if child == 0:
        # The test waits for the end of the parent's streams: the child must not hold them.
        os.close(report_read)
        os.close(reply_stream.fileno())
        os.close(0)
        # Opened before the report: the test may let go as soon as it has that.
        with open(hold, "rb") as fifo:
            os.write(report_write, json.dumps(call_everything(context)).encode())
            os.close(report_write)
            fifo.read()
        os._exit(0)
    os.close(report_write)
    text = b""
    while piece := os.read(report_read, 4096):
        text += piece
    os.close(report_read)
    return {"child": child, "results": json.loads(text)}


def call_everything(context: str) -> dict[str, Any]:
    g = contexts[context]
    data = np.zeros(4, np.float32)
    pointer = data.ctypes.data
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink("/proc/self/fd/" + fd))
        except OSError:
            pass
    results = {
        "allreduce": outcome(lib.gradd_allreduce(g, b"x", pointer, pointer, 4, api.F32, api.SUM)),
        "barrier": outcome(lib.gradd_barrier(g, 0)),
        "progress": outcome(lib.gradd_progress(g)),
        "fd": outcome(lib.gradd_fd(g)),
        "alloc": outcome(0 if lib.gradd_alloc(g, 4096) else api.STATUS["FORKED"]),
        "sockets": [link for link in links if link.startswith("socket:")],
        "memfds": [link for link in links if "memfd:" in link],
    }
    lib.gradd_shutdown(g)
    return results


@command
def reap(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@command
def facts() -> dict[str, Any]:
    """What this process holds now."""
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.append(os.readlink("/proc/self/fd/" + fd))
        except OSError:
            pass
    with open("/proc/self/maps") as maps:
        memfds = [line for line in maps if "/memfd:" in line]
    times = os.times()
    return {"pid": os.getpid(), "n_fds": len(fds), "fds": fds, "memfds": memfds,
            "cpu_s": times.user + times.system}


@command
def leave_abruptly(code: int = 0) -> None:
    os._exit(code)


@command
def many(n: int, count: int, context: str = "g", dtype: int = api.F32) -> dict[str, Any]:
    """n all-reduces one after the other on one registered buffer."""
    array, _ = collectives.make_array(lib, contexts[context], count, dtype)
    if array is None:
        return outcome(-6)
    for i in range(n):
        array[:] = 1
        status = lib.gradd_allreduce(contexts[context], f"many.{i}".encode(), array.ctypes.data,
                                     array.ctypes.data, count, dtype, api.SUM)
        if status != 0:
            return {"done": i, **outcome(status)}
    return {"done": n, "status": 0}


def known_input(rank: int, i: int, count: int) -> np.ndarray:
    """Small whole numbers, so that sums in float32 are exact in any order."""
    return ((np.arange(count) * 7 + rank * 3 + i * 5) % 11).astype(np.float32)


launched: dict[str, list[tuple[int, np.ndarray]]] = {}


@command
def launch(tag: str, n: int = 1, count: int = 1000, registered: bool = True,
           context: str = "g") -> dict[str, Any]:
    """Submit n all-reduces of known inputs without waiting; collect() has the ends of all."""
    g, rank = contexts[context], lib.gradd_rank(contexts[context])
    ops = launched.setdefault(tag, [])
    for i in range(n):
        array, _ = collectives.make_array(lib, g if registered else None, count, api.F32)
        if array is None:  # because the job has failed, or for want of memory
            status = lib.gradd_progress(g)
            return outcome(status if status < 0 else api.STATUS["NO_MEMORY"])
        array[:] = known_input(rank, i, count)
        handle = lib.gradd_allreduce_async(
            g, f"{tag}.{i}".encode(), ctypes.c_void_p(array.ctypes.data),
            ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(count), api.F32, api.SUM)
        if handle < 0:
            return {"submitted": i, **outcome(handle)}
        ops.append((handle, array))
    return {"status": 0}


@command
def first(tag: str, context: str = "g") -> dict[str, Any]:
    """Wait until one of the launched ops is over; its handle stays."""
    g = contexts[context]
    while all(lib.gradd_test(g, handle) == api.STATUS["PENDING"] for handle, _ in launched[tag]):
        select.select([lib.gradd_fd(g)], [], [], 10.0)
        lib.gradd_progress(g)
    return {"status": 0}


@command
def collect(tag: str, size: int = 0, context: str = "g") -> dict[str, Any]:
    """Wait for all launched ops. What is done must be right; of the rest, the first error."""
    g = contexts[context]
    n_ranks = size or lib.gradd_size(g)
    result: dict[str, Any] = {"status": 0, "error": "", "n_right": 0, "n_wrong": 0, "n_failed": 0}
    for i, (handle, array) in enumerate(launched.pop(tag)):
        status = lib.gradd_wait(g, handle, -1.0)
        if status == 0:
            want = sum(known_input(r, i, array.size) for r in range(n_ranks))
            result["n_right" if np.array_equal(array, want) else "n_wrong"] += 1
        else:
            result["n_failed"] += 1
            if result["status"] == 0:
                result.update(outcome(status), at=time.time())
    result.setdefault("at", time.time())
    return result


def gradient(rank: int, step: int, count: int) -> np.ndarray:
    """Small whole numbers: the weights are exact in float32, whoever adds them."""
    return ((np.arange(count) + rank * 5 + step * 3) % 7 - 3).astype(np.float32)


trained: dict[str, Any] = {"step": 0, "weights": np.zeros(0, np.float32)}


def agree_on_state(g: Any, rank: int, size: int, count: int) -> dict[str, Any]:
    """All ranks take the weights of the one that has come furthest: a new process knows nothing."""
    steps = np.zeros(size, np.float32)
    steps[rank] = trained["step"]
    status = lib.gradd_allreduce(g, b"steps", steps.ctypes.data, steps.ctypes.data, size,
                                 api.F32, api.SUM)
    if status < 0:
        return outcome(status)
    weights = trained["weights"] if trained["weights"].size else np.zeros(count, np.float32)
    if rank != int(steps.argmax()):
        weights = np.zeros(count, np.float32)
    status = lib.gradd_allreduce(g, b"weights", weights.ctypes.data, weights.ctypes.data, count,
                                 api.F32, api.SUM)
    if status == 0:
        trained.update(step=int(steps.max()), weights=weights)
    return outcome(status)


@command
def train(steps: int, count: int, progress: str, context: str = "g") -> dict[str, Any]:
    """Go on to so many steps; the one done last is told in a file. Ends at the first error."""
    g = contexts[context]
    rank, size = lib.gradd_rank(g), lib.gradd_size(g)
    result = agree_on_state(g, rank, size, count)
    while result["status"] == 0 and trained["step"] < steps:
        total = gradient(rank, trained["step"], count)
        result = outcome(lib.gradd_allreduce(g, b"gradient", total.ctypes.data, total.ctypes.data,
                                             count, api.F32, api.SUM))
        if result["status"] == 0:
            trained.update(step=trained["step"] + 1, weights=trained["weights"] - total)
            with open(progress, "w") as file:
                file.write(str(trained["step"]))
    want = -sum(gradient(r, s, count) for s in range(trained["step"]) for r in range(size))
    return {**result, "step": trained["step"], "at": time.time(),
            "is_right": bool(np.array_equal(trained["weights"], want))}


def main() -> None:
    global reply_stream
    reply_stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"ok": COMMANDS[request.pop("do")](**request)}
        except Exception:  # the test sees it
            reply = {"raised": traceback.format_exc()}
        reply_stream.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
