# SPDX-License-Identifier: Apache-2.0
"""trainer.py for device memory: the same requests, and those below. It runs on the fake driver.

Tensors are named and hold float32 unless said otherwise. What a stream does "slowly" is held back
until the test says `open_gate`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np

import fake_cuda as cuda
import gradd_ctypes as api
import trainer
from trainer import command, contexts, handles, lib, outcome

streams: dict[str, int] = {"default": 0}
tensors: dict[str, tuple[int, int, np.dtype]] = {}  # address, elements, type
gates: dict[str, threading.Event] = {}
DTYPES = {api.F32: np.float32, api.F64: np.float64, api.F16: np.float16, api.I32: np.int32,
          api.I64: np.int64, api.U8: np.uint8, api.I8: np.int8}

lib.gradd_alloc_device.restype = ctypes.c_void_p
lib.gradd_alloc_device.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
lib.gradd_register.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
lib.gradd_forget.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
lib.gradd_device_path.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p)]
lib.gradd_wait_stream.argtypes = [
    ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_double]


class DeviceOp(ctypes.Structure):
    """struct gradd_op to its end."""

    _fields_ = api.Op._fields_[:15] + [
        ("dims", ctypes.POINTER(ctypes.c_uint64)), ("n_dims", ctypes.c_uint64),
        ("stream", ctypes.c_void_p)]


@command
def cuda_start(device: int = 0) -> None:
    cuda.start(device)


@command
def cuda_counts(names: list[str]) -> dict[str, int]:
    return {name: cuda.count(name) for name in names}


@command
def cuda_is_active(device: int) -> bool:
    return cuda.primary_is_active(device)


@command
def device_path(context: str = "g") -> dict[str, Any]:
    text = ctypes.c_char_p()
    is_on = lib.gradd_device_path(contexts[context], ctypes.byref(text))
    return {"is_on": is_on, "text": (text.value or b"").decode()}


@command
def new_stream(key: str) -> None:
    streams[key] = cuda.new_stream()


@command
def stream_is_done(stream: str = "default") -> bool:
    return cuda.is_done(streams[stream])


@command
def await_stream(stream: str = "default", timeout_s: float = 10.0) -> bool:
    """By asking, so that it is no host synchronisation. False: it is not done in time."""
    deadline = time.monotonic() + timeout_s
    while not cuda.is_done(streams[stream]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


@command
def capture(stream: str, begin: bool) -> None:
    (cuda.begin_capture if begin else cuda.end_capture)(streams[stream])


@command
def tensor(key: str, count: int, kind: str = "malloc", dtype: int = api.F32,
           chunks: list[int] | None = None, context: str = "g") -> dict[str, Any]:
    n_bytes = max(count, 1) * np.dtype(DTYPES[dtype]).itemsize
    if kind == "malloc":
        address = cuda.alloc(n_bytes)
    elif kind == "managed":
        address = cuda.alloc_managed(n_bytes)
    elif kind == "chunks":
        address = cuda.alloc_chunks(chunks or [])
    elif kind == "private":
        address = cuda.alloc_chunks(chunks or [2 << 20], is_shareable=False)
    else:
        address = lib.gradd_alloc_device(contexts[context], 0, n_bytes)
        if not address:
            return outcome(-1)
    tensors[key] = (address, count, DTYPES[dtype])
    return {"status": 0, "address": address}


@command
def part(key: str, of: str, first: int, count: int) -> None:
    address, _, dtype = tensors[of]
    tensors[key] = (address + first * np.dtype(dtype).itemsize, count, dtype)


@command
def free_tensor(key: str) -> None:
    cuda.free(tensors.pop(key)[0])


@command
def gradd_free_tensor(key: str, context: str = "g") -> dict[str, Any]:
    return outcome(lib.gradd_free(contexts[context], tensors.pop(key)[0]))


@command
def register(key: str, context: str = "g") -> dict[str, Any]:
    address, count, dtype = tensors[key]
    return outcome(lib.gradd_register(contexts[context], address,
                                      count * np.dtype(dtype).itemsize))


@command
def forget(key: str, context: str = "g") -> dict[str, Any]:
    return outcome(lib.gradd_forget(contexts[context], tensors[key][0]))


def pattern(rank: int, count: int, dtype: Any, seed: int = 0) -> np.ndarray:
    return ((np.arange(count) * 7 + rank * 3 + seed) % 11).astype(dtype)


@command
def write(key: str, rank: int, seed: int = 0, stream: str = "default",
          gate: str | None = None) -> None:
    """The stream writes the rank's pattern, once the gate is open."""
    address, count, dtype = tensors[key]
    data = pattern(rank, count, dtype, seed)

    def run() -> None:
        if gate is not None:
            gates[gate].wait()
        cuda.view(address, dtype, count)[:] = data

    if gate is not None:
        gates.setdefault(gate, threading.Event())
    cuda.push(streams[stream], run)


@command
def open_gate(gate: str) -> None:
    gates[gate].set()


def expected(what: str, n_ranks: int, count: int, dtype: Any, seed: int) -> np.ndarray:
    if what.startswith("rank"):
        return pattern(int(what[4:]), count, dtype, seed)
    total = sum(pattern(r, count, np.float64, seed) for r in range(n_ranks))
    return (total / n_ranks if what == "avg" else total).astype(dtype)


@command
def check_tensor(key: str, what: str, n_ranks: int, seed: int = 0, factor: float = 1.0) -> bool:
    """Now, by the CPU: the stream must be done."""
    address, count, dtype = tensors[key]
    want = expected(what, n_ranks, count, dtype, seed) * dtype(factor)
    return bool(np.array_equal(cuda.view(address, dtype, count), want.astype(dtype)))


seen: dict[str, bool] = {}


@command
def check_in_stream(key: str, what: str, n_ranks: int, stream: str, tag: str,
                    seed: int = 0) -> None:
    """What the tensor holds when the stream comes here; result() tells."""
    address, count, dtype = tensors[key]
    want = expected(what, n_ranks, count, dtype, seed)

    def run() -> None:
        seen[tag] = bool(np.array_equal(cuda.view(address, dtype, count), want))

    cuda.push(streams[stream], run)


@command
def result(tag: str) -> bool | None:
    return seen.get(tag)


@command
def peek(key: str, n: int = 4) -> list[float]:
    address, _, dtype = tensors[key]
    return [float(x) for x in cuda.view(address, dtype, n)]


@command
def submit_device(*, handle: str, ops: list[dict[str, Any]], stream: str = "default",
                  context: str = "g") -> dict[str, Any]:
    array = (DeviceOp * len(ops))()
    keep = []
    for op, spec in zip(array, ops):
        fields = dict(spec)
        op.struct_size = ctypes.sizeof(DeviceOp)
        op.stream = streams[fields.pop("stream", stream)]
        op.dtype = api.F32
        for side, member in (("in", "input"), ("out", "output")):
            key = fields.pop(side, None)
            if key is not None:
                setattr(op, member, tensors[key][0])
        host = fields.pop("host_out", None)
        if host is not None:
            op.output = trainer.buffers[host].ctypes.data
        if "counts" in fields:
            counts = api.counts_array(fields.pop("counts"))
            keep.append(counts)
            op.counts = ctypes.cast(counts, ctypes.POINTER(ctypes.c_uint64))
        op.name = fields.pop("name").encode()
        for name, value in fields.items():
            setattr(op, name, value)
    pointer = ctypes.cast(array, ctypes.POINTER(api.Op))
    answer = lib.gradd_submit(contexts[context], pointer, len(ops))
    if answer > 0:
        handles[handle] = answer
        return {"status": 0}
    return outcome(answer)


@command
def wait_stream(handle: str, stream: str = "default", timeout_s: float = -1.0,
                context: str = "g") -> dict[str, Any]:
    started = time.monotonic()
    status = lib.gradd_wait_stream(contexts[context], handles[handle], streams[stream], timeout_s)
    return {**outcome(status), "seconds": time.monotonic() - started}


@command
def device_steps(n: int, key: str, rank: int, size: int, stream: str = "default",
                 context: str = "g") -> dict[str, Any]:
    """n times: write, all-reduce in place, wait by stream, check by stream, release."""
    for i in range(n):
        write(key, rank, seed=i, stream=stream)
        answer = submit_device(handle="step", stream=stream, context=context, ops=[
            {"kind": api.ALLREDUCE, "name": "step", "redop": api.SUM, "in": key, "out": key,
             "count": tensors[key][1]}])
        if answer["status"] != 0:
            return {"done": i, **answer}
        answer = wait_stream("step", stream, context=context)
        if answer["status"] != 0:
            return {"done": i, **answer}
        check_in_stream(key, "sum", size, stream, f"step.{i}", seed=i)
        # The name is free again when the op has ended.
        status = lib.gradd_wait(contexts[context], handles["step"], -1.0)
        if status != 0:
            return {"done": i, **outcome(status)}
    await_stream(stream)
    return {"done": n, "status": 0, "n_right": sum(bool(seen.get(f"step.{i}")) for i in range(n))}


if __name__ == "__main__":
    trainer.main()
