# SPDX-License-Identifier: Apache-2.0
"""gpu_trainer.py with random collectives on device memory, compared with a float64 reference.

Every rank draws the same ops from a seed and knows every rank's input. Several ops are submitted
at once; results are awaited by the stream and read when it is done.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

import fake_cuda as cuda
import gradd_ctypes as api
import gpu_trainer
import trainer
from collectives import DTYPES, FLOATS, NUMPY, REDOPS, differs, make_input
from gpu_trainer import DeviceOp, streams
from trainer import command, contexts, lib

KINDS = (api.ALLREDUCE, api.BROADCAST, api.ALLGATHER, api.REDUCE_SCATTER, api.ALLTOALL)
NAMES = ("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall")
COUNT_MAX = 3000
ARENA = 16 << 20


class Arena:
    """Device memory, given out in pieces; all free again with clear()."""

    def __init__(self) -> None:
        self.base = cuda.alloc(ARENA)
        self.used = 0

    def take(self, count: int, dtype: int) -> int:
        at = self.base + self.used
        self.used += (count * np.dtype(NUMPY[dtype]).itemsize + 31) // 16 * 16
        assert self.used <= ARENA
        return at


def view(address: int, count: int, dtype: int) -> np.ndarray:
    return cuda.view(address, NUMPY[dtype], count) if count else np.zeros(0, NUMPY[dtype])


class Case:
    """One op, as every rank draws it."""

    def __init__(self, random: np.random.Generator, n: int, kinds: list[int], dtypes: list[int],
                 scaled: bool) -> None:
        self.kind = int(random.choice(kinds))
        self.dtype = int(random.choice(dtypes))
        self.redop = int(random.choice(REDOPS))
        self.in_place = bool(random.integers(2))
        self.root = int(random.integers(n))
        self.seed = int(random.integers(1 << 30))
        self.uneven = bool(random.integers(2))
        count = int(random.choice([0, 1, 5, 16, int(random.integers(COUNT_MAX))]))
        self.count = count
        self.counts = [int(random.integers(COUNT_MAX)) if self.uneven else count
                       for _ in range(n)]
        self.sends = [[int(random.integers(50)) if self.uneven else count // n
                       for _ in range(n)] for _ in range(n)]
        factors = (1.0, 1.0, 0.5, 0.25)
        self.prescale = float(random.choice(factors))
        self.postscale = float(random.choice((1.0, 1.0, -2.0)))
        if not scaled or self.dtype not in FLOATS or self.kind not in (
                api.ALLREDUCE, api.REDUCE_SCATTER):
            self.prescale = self.postscale = 1.0

    def label(self) -> str:
        return (f"{NAMES[self.kind]} {self.dtype=} {self.redop=} {self.count=} {self.uneven=} "
                f"{self.in_place=} {self.prescale=} {self.postscale=}")

    def n_in(self, rank: int) -> int:
        if self.kind == api.ALLGATHER:
            return self.counts[rank]
        if self.kind == api.REDUCE_SCATTER:
            return sum(self.counts)
        if self.kind == api.ALLTOALL:
            return sum(self.sends[rank])
        return self.count

    def n_out(self, rank: int) -> int:
        if self.kind == api.ALLGATHER:
            return sum(self.counts)
        if self.kind == api.REDUCE_SCATTER:
            return self.counts[rank]
        if self.kind == api.ALLTOALL:
            return sum(sends[rank] for sends in self.sends)
        return self.count

    def inputs(self, n: int) -> list[np.ndarray]:
        is_reduced = self.kind in (api.ALLREDUCE, api.REDUCE_SCATTER)
        return [make_input(self.seed, r, self.n_in(r), self.dtype,
                           self.redop if is_reduced else api.SUM) for r in range(n)]

    def place(self, arena: Arena, rank: int) -> tuple[int, int]:
        if self.in_place:
            both = arena.take(max(self.n_in(rank), self.n_out(rank)), self.dtype)
            return both, both
        return (arena.take(self.n_in(rank), self.dtype), arena.take(self.n_out(rank), self.dtype))

    def problem(self, got: np.ndarray, rank: int, n: int, n_gpus: int) -> str | None:
        inputs = self.inputs(n)
        if self.kind in (api.ALLREDUCE, api.REDUCE_SCATTER):
            if self.kind == api.REDUCE_SCATTER:
                begin = sum(self.counts[:rank])
                inputs = [x[begin : begin + self.counts[rank]] for x in inputs]
            return differs(got, inputs, self.redop, self.dtype, self.prescale, self.postscale,
                           n_gpus + 1 if n_gpus > 1 else 1)
        if self.kind == api.BROADCAST:
            want = inputs[self.root]
        elif self.kind == api.ALLGATHER:
            want = np.concatenate(inputs)
        else:
            begins = [sum(sends[:rank]) for sends in self.sends]
            want = np.concatenate([x[b : b + self.sends[r][rank]]
                                   for r, (x, b) in enumerate(zip(inputs, begins))])
        return None if np.array_equal(got, want) else "not the ranks' data"


def fill_op(op: DeviceOp, case: Case, name: str, stream: str, rank: int, root: int, source: int,
            target: int) -> list[Any]:
    """@return what must live as long as the op's submission."""
    op.struct_size = ctypes.sizeof(DeviceOp)
    op.stream = streams[stream]
    op.kind, op.dtype, op.redop, op.root = case.kind, case.dtype, case.redop, root
    op.prescale, op.postscale = case.prescale, case.postscale
    op.name = name.encode()
    op.input, op.output = source, target
    op.count = case.n_in(rank)
    op.out_capacity = case.n_out(rank)
    counts = None
    if case.kind == api.ALLTOALL:
        counts = api.counts_array(case.sends[rank])
    elif case.kind == api.REDUCE_SCATTER:
        counts = api.counts_array(case.counts)
    if counts is not None:
        op.counts = ctypes.cast(counts, ctypes.POINTER(ctypes.c_uint64))
    return [counts]


arenas: list[Arena] = []


@command
def fill_device(key: str, value: float) -> None:
    address, count, dtype = gpu_trainer.tensors[key]
    cuda.view(address, dtype, count)[:] = value


@command
def tensor_part_fill(key: str, at: int, value: float) -> None:
    address, count, dtype = gpu_trainer.tensors[key]
    cuda.view(address, dtype, count)[at] = value


@command
def join_data(context: str = "g") -> dict[str, Any]:
    """This rank is out of data; until all are."""
    op = api.make_op(kind=api.JOIN, name="join")
    handle = lib.gradd_submit(contexts[context], ctypes.byref(op), 1)
    return trainer.outcome(lib.gradd_wait(contexts[context], handle, -1.0))


@command
def device_collectives(seed: int, n_ops: int, n_gpus: int, at_once: int = 6,
                       kinds: list[int] = list(KINDS), dtypes: list[int] = list(DTYPES),
                       scaled: bool = True, stream: str = "default", set: int = 0,
                       ranks: list[int] | None = None, context: str = "g") -> dict[str, Any]:
    """Random ops on all ranks, or on those of a process set."""
    g = contexts[context]
    members = ranks if ranks is not None else list(range(lib.gradd_size(g)))
    n, rank = len(members), members.index(lib.gradd_rank(g))
    random = np.random.default_rng(seed)
    if not arenas:
        arenas.append(Arena())
    arena, bad = arenas[0], []
    for first in range(0, n_ops, at_once):
        cases = [Case(random, n, kinds, dtypes, scaled) for _ in range(at_once)]
        arena.used = 0
        placed = []
        for case in cases:
            source, target = case.place(arena, rank)
            view(source, case.n_in(rank), case.dtype)[:] = case.inputs(n)[rank]
            placed.append((source, target))
        handles = []
        for i, (case, (source, target)) in enumerate(zip(cases, placed)):
            op = DeviceOp()
            kept = fill_op(op, case, f"{set}.{first + i}", stream, rank, members[case.root], source,
                           target)
            op.set = set
            handle = lib.gradd_submit(g, ctypes.cast(ctypes.pointer(op), ctypes.POINTER(api.Op)),
                                      1)
            del kept
            if handle <= 0:
                return {"bad": [f"{case.label()}: {lib.gradd_error().decode()}"]}
            handles.append(handle)
        for case, handle in zip(cases, handles):
            status = lib.gradd_wait_stream(g, handle, streams[stream], 20.0)
            if status != 0:
                return {"bad": [f"{case.label()}: {status} {lib.gradd_error().decode()}"]}
        if not gpu_trainer.await_stream(stream):
            return {"bad": ["the stream did not come to its end"]}
        for case, (source, target), handle in zip(cases, placed, handles):
            problem = case.problem(view(target, case.n_out(rank), case.dtype), rank, n, n_gpus)
            if not problem and not case.in_place:
                same = np.array_equal(view(source, case.n_in(rank), case.dtype),
                                      case.inputs(n)[rank])
                problem = None if same else "the input changed"
            status = lib.gradd_wait(g, handle, -1.0)
            if status != 0:
                problem = f"{status} {lib.gradd_error().decode()}"
            if problem:  # and on, or the other ranks would wait
                bad.append(f"{case.label()} on rank {rank} of {n}: {problem}")
    return {"bad": bad[:10]}


if __name__ == "__main__":
    trainer.main()
