# SPDX-License-Identifier: Apache-2.0
"""Families of collectives, run by every rank and compared with a float64 reference.

Every rank knows every rank's input (they come from a seed), computes the reference itself and
returns what differed, and a digest of all results: equal digests on all ranks and in all runs show
that the results are bit-identical.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import numpy as np

import gradd_ctypes as api

NUMPY = {
    api.I8: np.int8, api.U8: np.uint8, api.I32: np.int32, api.I64: np.int64, api.F16: np.float16,
    api.F32: np.float32, api.F64: np.float64, api.BF16: np.uint16,
}
FLOATS = (api.F16, api.BF16, api.F32, api.F64)
DTYPES = tuple(NUMPY)
REDOPS = (api.SUM, api.PROD, api.MAX, api.MIN, api.AVG)
# Relative error that one rounding to the type costs.
EPSILON = {api.F16: 2.0**-11, api.BF16: 2.0**-8, api.F32: 2.0**-24, api.F64: 2.0**-53}
# How `in` and `out` lie: (in is registered, out is registered), or one buffer in place.
PLACES = ("reg", "unreg", "reg>reg", "unreg>unreg", "reg>unreg", "unreg>reg")


def make_array(lib: Any, g: Any, count: int, dtype: int) -> tuple[np.ndarray | None, int | None]:
    """Shared memory when g is given, else memory of this process. Zeroed."""
    kind = NUMPY[dtype]
    if g is None:
        return np.zeros(max(count, 1), kind)[:count], None
    bytes_ = count * np.dtype(kind).itemsize
    memory = lib.gradd_alloc(g, bytes_)
    if not memory:
        return None, api.STATUS["NO_MEMORY"]
    raw = (ctypes.c_uint8 * max(bytes_, 1)).from_address(memory)
    return np.frombuffer(raw, kind, count), None


def to_float(array: np.ndarray, dtype: int) -> np.ndarray:
    if dtype == api.BF16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def from_float(values: np.ndarray, dtype: int) -> np.ndarray:
    if dtype != api.BF16:
        return values.astype(NUMPY[dtype])
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def make_input(seed: int, rank: int, count: int, dtype: int, redop: int = api.SUM) -> np.ndarray:
    random = np.random.default_rng([seed, rank, count, dtype, redop])
    if dtype in FLOATS:
        # Factors near 1 keep products in range.
        low, high = (0.5, 1.5) if redop == api.PROD else (-2.0, 2.0)
        return from_float(random.uniform(low, high, count), dtype)
    info = np.iinfo(NUMPY[dtype])
    return random.integers(info.min, info.max, count, NUMPY[dtype], endpoint=True)


def reduce_exact(inputs: list[np.ndarray], redop: int) -> np.ndarray:
    """Integers: wrapping sums and products; averages summed in int64, truncated toward zero."""
    with np.errstate(over="ignore"):
        if redop == api.AVG:
            total = sum(x.astype(np.int64) for x in inputs)
            quotient = np.where(total < 0, -(-total // len(inputs)), total // len(inputs))
            return quotient.astype(inputs[0].dtype)
        result = inputs[0].copy()
        for x in inputs[1:]:
            if redop == api.SUM:
                result = result + x
            elif redop == api.PROD:
                result = result * x
            elif redop == api.MAX:
                result = np.maximum(result, x)
            else:
                result = np.minimum(result, x)
        return result


def reduce_float(inputs: list[np.ndarray], redop: int, dtype: int, prescale: float,
                 postscale: float, n_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """The float64 reference, and the error that is allowed: between nodes, partial results travel
    in the tensor's own type."""
    wide = np.stack([to_float(x, dtype) * prescale for x in inputs])
    accumulate = EPSILON[api.F64] if dtype == api.F64 else EPSILON[api.F32]
    n = len(inputs)
    if redop == api.PROD:
        result, magnitude = wide.prod(axis=0), np.abs(wide).prod(axis=0)
    elif redop == api.MAX:
        result = wide.max(axis=0)
        magnitude = np.abs(result)
    elif redop == api.MIN:
        result = wide.min(axis=0)
        magnitude = np.abs(result)
    else:
        result, magnitude = wide.sum(axis=0), np.abs(wide).sum(axis=0)
        if redop == api.AVG:
            result, magnitude = result / n, magnitude / n
    result, magnitude = result * postscale, magnitude * abs(postscale)
    smallest = {api.F16: 2.0**-24, api.BF16: 2.0**-133}.get(dtype, 0.0)
    allowed = magnitude * accumulate * (n + 3) + np.abs(result) * EPSILON[dtype] + smallest
    if n_nodes > 1 and redop not in (api.MAX, api.MIN):
        allowed += n_nodes * (magnitude * EPSILON[dtype] + smallest)
    return result, allowed


def differs(got: np.ndarray, inputs: list[np.ndarray], redop: int, dtype: int,
            prescale: float = 1.0, postscale: float = 1.0, n_nodes: int = 1) -> str | None:
    if got.size != inputs[0].size:
        return f"{got.size} elements instead of {inputs[0].size}"
    if got.size == 0:
        return None
    if dtype in FLOATS:
        want, allowed = reduce_float(inputs, redop, dtype, prescale, postscale, n_nodes)
        wide = to_float(got, dtype)
        bad = ~(np.abs(wide - want) <= allowed)
    else:
        want = wide = None
        want = reduce_exact(inputs, redop)
        wide = got
        bad = got != want
    if not bad.any():
        return None
    i = int(np.argmax(bad))
    return f"{int(bad.sum())} of {got.size} differ, [{i}] is {wide[i]!r} instead of {want[i]!r}"


class Places:
    """Buffers of a context by place and size, reused so that memory stays small."""

    def __init__(self, lib: Any, g: Any) -> None:
        self.lib, self.g = lib, g
        self.kept: dict[tuple[str, int, int, str], np.ndarray] = {}

    def array(self, registered: bool, count: int, dtype: int, role: str) -> np.ndarray:
        key = ("reg" if registered else "unreg", count, dtype, role)
        if key not in self.kept:
            array, _ = make_array(self.lib, self.g if registered else None, count, dtype)
            assert array is not None, self.lib.gradd_error().decode()
            self.kept[key] = array
        return self.kept[key]

    def pair(self, place: str, n_in: int, n_out: int, dtype: int) -> tuple[np.ndarray, np.ndarray]:
        if ">" not in place:
            both = self.array(place == "reg", max(n_in, n_out), dtype, "both")
            return both[:n_in], both[:n_out]
        source, target = place.split(">")
        return (self.array(source == "reg", n_in, dtype, "in"),
                self.array(target == "reg", n_out, dtype, "out"))

    def free(self) -> None:
        for (kind, _, _, _), array in self.kept.items():
            if kind == "reg":
                self.lib.gradd_free(self.g, array.ctypes.data)
        self.kept.clear()


class Verdict:
    def __init__(self, lib: Any) -> None:
        self.lib = lib
        self.n = 0
        self.bad: list[str] = []
        self.digest = hashlib.sha256()

    def status(self, label: str, status: int) -> bool:
        self.n += 1
        if status != 0:
            self.bad.append(f"{label}: {status} {self.lib.gradd_error().decode()}")
        return status == 0

    def compare(self, label: str, problem: str | None, got: np.ndarray | None) -> None:
        if problem and len(self.bad) < 10:
            self.bad.append(f"{label}: {problem}")
        if got is not None:
            self.digest.update(np.ascontiguousarray(got).tobytes())

    def report(self) -> dict[str, Any]:
        return {"n": self.n, "bad": self.bad, "digest": self.digest.hexdigest()}


def sizes_of(dtype: int) -> list[int]:
    page = 4096 // np.dtype(NUMPY[dtype]).itemsize
    return [0, 1, 3, 1023, page - 1, page, page + 1]


def allreduce(lib: Any, g: Any, *, seed: int, dtypes: list[int] | None = None,
              redops: list[int] | None = None, sizes: list[int] | None = None,
              places: list[str] | None = None) -> dict[str, Any]:
    rank, n_ranks = lib.gradd_rank(g), lib.gradd_size(g)
    verdict, room = Verdict(lib), Places(lib, g)
    for dtype in dtypes or DTYPES:
        for redop in redops or REDOPS:
            for count in sizes if sizes is not None else sizes_of(dtype):
                inputs = [make_input(seed, r, count, dtype, redop) for r in range(n_ranks)]
                first: bytes | None = None
                for place in places or PLACES:
                    source, target = room.pair(place, count, count, dtype)
                    source[:] = inputs[rank]
                    label = f"allreduce {dtype=} {redop=} {count=} {place=}"
                    status = lib.gradd_allreduce(
                        g, label.encode(), source.ctypes.data, target.ctypes.data, count, dtype,
                        redop)
                    if not verdict.status(label, status):
                        return verdict.report()
                    if first is None:
                        problem = differs(target, inputs, redop, dtype,
                                          n_nodes=lib.gradd_n_nodes(g))
                        verdict.compare(label, problem, target)
                        first = target.tobytes()
                    elif target.tobytes() != first:
                        verdict.compare(label, "not the bits of the first place", target)
                    if ">" in place and not np.array_equal(source, inputs[rank]):
                        verdict.compare(label, "the input changed", None)
        room.free()
    return verdict.report()


def scaled(lib: Any, g: Any, *, seed: int) -> dict[str, Any]:
    """Pre- and post-scale, on floats."""
    rank, n_ranks = lib.gradd_rank(g), lib.gradd_size(g)
    verdict, room = Verdict(lib), Places(lib, g)
    for dtype in FLOATS:
        for redop in (api.SUM, api.AVG, api.MAX):
            for prescale, postscale in ((0.5, 1.0), (1.0, 3.0), (0.25, -2.0)):
                for place in ("reg", "unreg>reg"):
                    inputs = [make_input(seed, r, 1025, dtype, redop) for r in range(n_ranks)]
                    source, target = room.pair(place, 1025, 1025, dtype)
                    source[:] = inputs[rank]
                    label = f"scaled {dtype=} {redop=} {prescale=} {postscale=} {place=}"
                    op = api.make_op(
                        kind=api.ALLREDUCE, dtype=dtype, redop=redop, name=label,
                        input=source.ctypes.data, output=target.ctypes.data, count=1025,
                        prescale=prescale, postscale=postscale)
                    handle = lib.gradd_submit(g, ctypes.byref(op), 1)
                    status = lib.gradd_wait(g, handle, -1.0) if handle > 0 else handle
                    if verdict.status(label, status):
                        verdict.compare(
                            label, differs(target, inputs, redop, dtype, prescale, postscale,
                                           lib.gradd_n_nodes(g)), target)
    room.free()
    return verdict.report()


def rank_order(lib: Any, g: Any, *, seed: int) -> dict[str, Any]:
    """Sums are taken in rank order: bit for bit the sum of a loop over the ranks."""
    rank, n_ranks = lib.gradd_rank(g), lib.gradd_size(g)
    verdict, room = Verdict(lib), Places(lib, g)
    for dtype in (api.F32, api.F64, api.F16, api.BF16):
        for count in (5, 70001):
            inputs = [make_input(seed, r, count, dtype) for r in range(n_ranks)]
            wide = np.float64 if dtype == api.F64 else np.float32
            total = to_float(inputs[0], dtype).astype(wide)
            for other in inputs[1:]:
                total = total + to_float(other, dtype).astype(wide)
            want = from_float(total, dtype)
            source, target = room.pair("reg>reg", count, count, dtype)
            source[:] = inputs[rank]
            label = f"rank order {dtype=} {count=}"
            status = lib.gradd_allreduce(
                g, label.encode(), source.ctypes.data, target.ctypes.data, count, dtype, api.SUM)
            if verdict.status(label, status):
                same = np.array_equal(target, want)
                verdict.compare(label, None if same else "not the sum in rank order", target)
    room.free()
    return verdict.report()


def special_values(lib: Any, g: Any) -> dict[str, Any]:
    """NaN and infinities: MAX and MIN give NaN when any rank has one; sums follow IEEE."""
    rank, n_ranks = lib.gradd_rank(g), lib.gradd_size(g)
    verdict, room = Verdict(lib), Places(lib, g)
    last = n_ranks - 1
    for dtype in FLOATS:
        table = np.ones((n_ranks, 70))
        table[last, 0] = np.nan
        table[0, 1] = np.nan
        table[last, 2] = np.inf
        table[0, 3] = -np.inf
        table[0, 4], table[last, 4] = np.inf, -np.inf
        table[:, 69] = table[:, 0]
        inputs = [from_float(table[r], dtype) if dtype != api.BF16 else bf16_of(table[r])
                  for r in range(n_ranks)]
        for redop in (api.SUM, api.MAX, api.MIN, api.AVG):
            source, target = room.pair("reg>reg", 70, 70, dtype)
            source[:] = inputs[rank]
            label = f"special {dtype=} {redop=}"
            status = lib.gradd_allreduce(
                g, label.encode(), source.ctypes.data, target.ctypes.data, 70, dtype, redop)
            if not verdict.status(label, status):
                continue
            with np.errstate(invalid="ignore"):
                total = {api.SUM: table.sum(0), api.AVG: table.sum(0) / n_ranks,
                         api.MAX: np.maximum.reduce(table), api.MIN: np.minimum.reduce(table)}[redop]
            got = to_float(target, dtype)
            same = (np.isnan(got) == np.isnan(total)) & (np.isnan(total) | (got == total))
            # An average of ones may be rounded once.
            same |= np.isfinite(total) & (np.abs(got - total) <= 2 * EPSILON[dtype])
            bad = int(np.argmax(~same))
            verdict.compare(label, None if same.all() else
                            f"[{bad}] is {got[bad]} instead of {total[bad]}", None)
    room.free()
    return verdict.report()


def bf16_of(values: np.ndarray) -> np.ndarray:
    """Rounding would turn a NaN's payload into infinity: truncate instead."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def split(count: int, n: int) -> list[int]:
    return [count // n + (1 if r < count % n else 0) for r in range(n)]


def moves(lib: Any, g: Any, *, seed: int) -> dict[str, Any]:
    """Broadcast, all-gather, reduce-scatter and all-to-all, even and uneven, in every place."""
    rank, n_ranks = lib.gradd_rank(g), lib.gradd_size(g)
    verdict, room = Verdict(lib), Places(lib, g)
    for dtype in DTYPES:
        for count in sizes_of(dtype):
            for registered in (True, False):
                arguments = (lib, g, verdict, room, seed, rank, n_ranks, dtype, count, registered)
                broadcast_case(*arguments)
                allgather_case(*arguments)
                reduce_scatter_case(*arguments)
                alltoall_case(*arguments)
                if verdict.bad:
                    return verdict.report()
        room.free()
    return verdict.report()


def broadcast_case(lib, g, verdict, room, seed, rank, n_ranks, dtype, count, registered) -> None:
    root = count % n_ranks
    buffer, _ = room.pair("reg" if registered else "unreg", count, count, dtype)
    want = make_input(seed, root, count, dtype)
    buffer[:] = want if rank == root else 0
    label = f"broadcast {dtype=} {count=} {registered=}"
    status = lib.gradd_broadcast(g, label.encode(), buffer.ctypes.data, count, dtype, root)
    if verdict.status(label, status):
        same = np.array_equal(buffer, want)
        verdict.compare(label, None if same else "not root's data", buffer)


def allgather_case(lib, g, verdict, room, seed, rank, n_ranks, dtype, count, registered) -> None:
    # Different counts: the first rank has none, the others one more each.
    for uneven in (False, True):
        counts = [count if not uneven else (count + r if r else 0) for r in range(n_ranks)]
        place = "reg>reg" if registered else "unreg>unreg"
        source, target = room.pair(place, counts[rank], sum(counts), dtype)
        inputs = [make_input(seed, r, counts[r], dtype) for r in range(n_ranks)]
        source[:] = inputs[rank]
        target[:] = 0
        out_counts = (ctypes.c_uint64 * n_ranks)()
        label = f"allgather {dtype=} {count=} {registered=} {uneven=}"
        status = lib.gradd_allgather(
            g, label.encode(), source.ctypes.data, counts[rank], target.ctypes.data, target.size,
            dtype, out_counts)
        if verdict.status(label, status):
            same = np.array_equal(target, np.concatenate(inputs)) and list(out_counts) == counts
            verdict.compare(label, None if same else "not the inputs in rank order", target)


def reduce_scatter_case(lib, g, verdict, room, seed, rank, n_ranks, dtype, count,
                        registered) -> None:
    for uneven in (False, True):
        if uneven:
            counts = [count if r == n_ranks - 1 else 0 for r in range(n_ranks)]
        else:
            counts = split(count, n_ranks)
        begin = sum(counts[:rank])
        place = "reg>reg" if registered else "unreg>unreg"
        source, target = room.pair(place, count, counts[rank], dtype)
        inputs = [make_input(seed, r, count, dtype) for r in range(n_ranks)]
        source[:] = inputs[rank]
        label = f"reduce_scatter {dtype=} {count=} {registered=} {uneven=}"
        status = lib.gradd_reduce_scatter(
            g, label.encode(), source.ctypes.data, count, target.ctypes.data,
            api.counts_array(counts) if uneven else None, dtype, api.SUM)
        if verdict.status(label, status):
            parts = [x[begin : begin + counts[rank]] for x in inputs]
            problem = differs(target, parts, api.SUM, dtype, n_nodes=lib.gradd_n_nodes(g))
            verdict.compare(label, problem, None)


def alltoall_case(lib, g, verdict, room, seed, rank, n_ranks, dtype, count, registered) -> None:
    for uneven in (False, True):
        # sends[r][p]: elements that rank r sends to rank p.
        if uneven:
            sends = [[(r + 2 * p) % 5 * (count // 5) for p in range(n_ranks)]
                     for r in range(n_ranks)]
        else:
            sends = [[count] * n_ranks for _ in range(n_ranks)]
        receives = [sends[r][rank] for r in range(n_ranks)]
        place = "reg>reg" if registered else "unreg>unreg"
        source, target = room.pair(place, sum(sends[rank]), sum(receives), dtype)
        inputs = [make_input(seed, r, sum(sends[r]), dtype) for r in range(n_ranks)]
        source[:] = inputs[rank]
        out_counts = (ctypes.c_uint64 * n_ranks)()
        label = f"alltoall {dtype=} {count=} {registered=} {uneven=}"
        status = lib.gradd_alltoall(
            g, label.encode(), source.ctypes.data, source.size,
            api.counts_array(sends[rank]) if uneven else None, target.ctypes.data, target.size,
            dtype, out_counts)
        if verdict.status(label, status):
            parts = []
            for r in range(n_ranks):
                begin = sum(sends[r][:rank])
                parts.append(inputs[r][begin : begin + receives[r]])
            same = np.array_equal(target, np.concatenate(parts)) and list(out_counts) == receives
            verdict.compare(label, None if same else "not the parts in rank order", None)


def shuffled(lib: Any, g: Any, *, seed: int, n_ops: int = 200) -> dict[str, Any]:
    """Many ops in flight, submitted in another order on every rank."""
    rank, n_ranks = lib.gradd_rank(g), lib.gradd_size(g)
    verdict = Verdict(lib)
    random = np.random.default_rng(seed)
    plan = [(i, int(random.integers(0, 3000)), int(random.choice(DTYPES)),
             int(random.choice(REDOPS)), bool(random.integers(0, 2))) for i in range(n_ops)]
    order = np.random.default_rng([seed, rank]).permutation(n_ops)
    waiting = {}
    for at in order:
        i, count, dtype, redop, registered = plan[at]
        array, _ = make_array(lib, g if registered else None, count, dtype)
        array[:] = make_input(seed + i, rank, count, dtype, redop)
        handle = lib.gradd_allreduce_async(
            g, f"shuffled.{i}".encode(), ctypes.c_void_p(array.ctypes.data),
            ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(count), dtype, redop)
        waiting[i] = (handle, array)
    for i, count, dtype, redop, registered in plan:
        handle, array = waiting[i]
        label = f"shuffled {i=} {count=} {dtype=} {redop=} {registered=}"
        status = lib.gradd_wait(g, handle, -1.0) if handle > 0 else handle
        if verdict.status(label, status):
            inputs = [make_input(seed + i, r, count, dtype, redop) for r in range(n_ranks)]
            problem = differs(array, inputs, redop, dtype, n_nodes=lib.gradd_n_nodes(g))
            verdict.compare(label, problem, array)
        if registered:
            lib.gradd_free(g, array.ctypes.data)
    return verdict.report()


def grouped(lib: Any, g: Any, *, seed: int, n_groups: int = 5, n_ops: int = 40) -> dict[str, Any]:
    """Many tensors of mixed types in one call complete together, under one handle."""
    rank, n_ranks = lib.gradd_rank(g), lib.gradd_size(g)
    verdict = Verdict(lib)
    for group in range(n_groups):
        arrays, ops = [], (api.Op * n_ops)()
        random = np.random.default_rng([seed, group])
        shapes = [(int(random.integers(0, 2000)), int(random.choice(DTYPES)),
                   int(random.choice(REDOPS))) for _ in range(n_ops)]
        for i, (count, dtype, redop) in enumerate(shapes):
            array, _ = make_array(lib, g if i % 3 else None, count, dtype)
            array[:] = make_input(seed + i, rank, count, dtype, redop)
            arrays.append(array)
            ops[i] = api.make_op(
                kind=api.ALLREDUCE, dtype=dtype, redop=redop, name=f"group.{group}.{i}",
                input=array.ctypes.data, output=array.ctypes.data, count=count)
        handle = lib.gradd_submit(g, ops, n_ops)
        status = lib.gradd_wait(g, handle, -1.0) if handle > 0 else handle
        if not verdict.status(f"group {group}", status):
            return verdict.report()
        for i, (count, dtype, redop) in enumerate(shapes):
            inputs = [make_input(seed + i, r, count, dtype, redop) for r in range(n_ranks)]
            problem = differs(arrays[i], inputs, redop, dtype, n_nodes=lib.gradd_n_nodes(g))
            verdict.compare(f"group {group} {i=}", problem, arrays[i])
            if i % 3:
                lib.gradd_free(g, arrays[i].ctypes.data)
    return verdict.report()


def large(lib: Any, g: Any, *, count: int, place: str, dtype: int = api.F32) -> dict[str, Any]:
    """One large all-reduce; the input is cheap to compute and differs everywhere."""
    rank, n_ranks = lib.gradd_rank(g), lib.gradd_size(g)
    verdict, room = Verdict(lib), Places(lib, g)
    source, target = room.pair(place, count, count, dtype)
    base = np.arange(count, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(8)
    source[:] = base * (rank + 1) / 65536
    label = f"large {count=} {place=}"
    status = lib.gradd_allreduce(
        g, label.encode(), source.ctypes.data, target.ctypes.data, count, dtype, api.SUM)
    if verdict.status(label, status):
        want = sum((base * (r + 1) / 65536).astype(NUMPY[dtype]).astype(np.float64)
                   for r in range(n_ranks))
        error = float(np.max(np.abs(target - want) / (np.abs(want) + 1e-30), initial=0.0))
        verdict.compare(label, None if error <= 1e-6 else f"relative error {error}", target)
    room.free()
    return verdict.report()


def narrowed(lib: Any, g: Any, *, seed: int, epsilon: float, n_nodes: int,
             sizes: list[int]) -> dict[str, Any]:
    """float32 that travels between nodes in a narrower type: close, the same on all ranks, and not
    as exact as float32 itself; other types are not touched."""
    rank, n_ranks = lib.gradd_rank(g), lib.gradd_size(g)
    verdict, room = Verdict(lib), Places(lib, g)
    for count in sizes:
        inputs = [make_input(seed, r, count, api.F32) for r in range(n_ranks)]
        source, target = room.pair("reg>reg", count, count, api.F32)
        source[:] = inputs[rank]
        label = f"narrowed {count=}"
        status = lib.gradd_allreduce(
            g, label.encode(), source.ctypes.data, target.ctypes.data, count, api.F32, api.SUM)
        if not verdict.status(label, status):
            return verdict.report()
        wide = np.stack([x.astype(np.float64) for x in inputs])
        error = np.abs(target - wide.sum(axis=0))
        # Each exchange rounds a partial sum once, and the result is rounded once more.
        allowed = np.abs(wide).sum(axis=0) * epsilon * (n_nodes + 1)
        problem = None
        if (error > allowed).any():
            i = int(np.argmax(error - allowed))
            problem = f"[{i}] is {target[i]!r}, off by {error[i]} instead of {allowed[i]} at most"
        elif count > 1000 and error.max() < 2.0**-20:
            problem = f"off by {error.max()} at most: nothing was rounded"
        verdict.compare(label, problem, target)
    verdict_of_others = allreduce(lib, g, seed=seed, dtypes=[api.I32, api.F64], redops=[api.SUM],
                                  sizes=[5000], places=["reg"])
    verdict.bad += verdict_of_others["bad"]
    room.free()
    return verdict.report()
