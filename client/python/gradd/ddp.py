# SPDX-License-Identifier: Apache-2.0
"""Gradients of DistributedDataParallel through gradd, whatever its process group is.

    model = DistributedDataParallel(net)
    model.register_comm_hook(None, gradd.ddp.hook)

Each bucket is copied once, into memory that the worker shares; it is averaged there while backward
computes the next one, and DDP reads the result from there. ``fp16_hook`` and ``bf16_hook`` convert
in that copy, so that half the bytes are summed (in float32 all the same).

The first argument of register_comm_hook may be None (the default process group's ranks), a process
group, a gradd Context, or a :class:`State`. Without a State each model gets one by itself. The
ranks must run the same models, and register their hooks, in the same order.

Errors leave backward() as RuntimeError with gradd's sentence; nothing waits for a rank that is gone.
Gradients of other devices than the CPU are copied through host memory.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with classes.

import itertools
import threading
import weakref
from datetime import timedelta
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist

import gradd
from gradd.c10d.join import join
from gradd.c10d.tensors import DTYPES
from gradd.context import Context, Region, make_op
from gradd.errors import GraddError, InvalidRequest, Unsupported
from gradd.types import Kind, ReduceOp

Future = torch.futures.Future

_JOIN_TIMEOUT = timedelta(minutes=30)


class _Bucket:
    """Shared memory that stands for one bucket.

    Invariant: from submission until DDP has read the result, nobody else writes to it. DDP reads
    it before backward() returns, and gives the bucket again in the next backward() only.
    """

    def __init__(self, context: Context, n: int, dtype: torch.dtype) -> None:
        self.region: Region = context.alloc(n * torch.empty((), dtype=dtype).element_size())
        self.tensor = torch.frombuffer(self.region.array, dtype=dtype, count=n)


class State:
    """What the hooks keep for one model: its ranks, and the shared memory of its buckets.

    Args:
        group: a process group, a Context, or None for the default process group.
    """

    def __init__(self, group: Any = None) -> None:
        self.context = context_of(group)
        self.name = f"ddp{next(_counter_of(self.context))}"
        self._buckets: dict[int, _Bucket] = {}

    def bucket(self, index: int, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Shared memory for n elements of the bucket of that index.

        DDP rebuilds its buckets after the first backward: then memory of the old size goes.
        """
        known = self._buckets.get(index)
        if known is None or known.tensor.numel() != n or known.tensor.dtype != dtype:
            self._buckets.pop(index, None)
            known = self._buckets[index] = _Bucket(self.context, n, dtype)
        return known.tensor


# ------------------------------------------------------------------ whose gradients

_counters: "weakref.WeakKeyDictionary[Context, Any]" = weakref.WeakKeyDictionary()
_contexts: dict[Any, Context] = {}
_states: dict[int, State] = {}  # by id of a parameter
_lock = threading.RLock()


def _counter_of(context: Context) -> Any:
    with _lock:
        return _counters.setdefault(context, itertools.count())


def context_of(group: Any = None) -> Context:
    """The job of a process group's ranks; joined now, by all of them, where there is none yet."""
    if isinstance(group, Context):
        return group
    is_world = group is None or group is dist.group.WORLD
    if is_world and not dist.is_initialized():
        return gradd.init()
    if is_world:
        group = dist.distributed_c10d._get_default_group()
    if hasattr(group, "context") and isinstance(group.context, Context):
        return group.context
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if is_world and gradd.is_initialized():
        mine = gradd.context()
        if (mine.rank, mine.size) != (rank, size):
            raise InvalidRequest(
                f"job {mine.job}: gradd.init() made this process rank {mine.rank} of {mine.size}, "
                f"torch.distributed rank {rank} of {size}")
        return mine
    return _join_group(group, rank, size)


def _join_group(group: Any, rank: int, size: int) -> Context:
    with _lock:
        known = _contexts.get(group)
        if known is not None and known.is_open:
            return known
        c10d = dist.distributed_c10d
        store = dist.PrefixStore(f"gradd/ddp/{c10d._pg_names[group]}", c10d._get_default_store())
        context = _contexts[group] = join(store, rank, size, _JOIN_TIMEOUT)
        return context


def _state_of(group: Any, bucket: dist.GradBucket) -> State:
    """The State of the model whose bucket this is: known by its parameters."""
    if isinstance(group, State):
        return group
    parameters = bucket.parameters()
    with _lock:
        state = next((_states[id(p)] for p in parameters if id(p) in _states), None)
        if state is None or not state.context.is_open:
            state = State(group)
        for parameter in parameters:
            if _states.get(id(parameter)) is not state:
                if id(parameter) not in _states:
                    weakref.finalize(parameter, _states.pop, id(parameter), None).atexit = False
                _states[id(parameter)] = state
        return state


# ------------------------------------------------------------------ the hooks

def _average(group: Any, bucket: dist.GradBucket, sent_as: Optional[torch.dtype]) -> Future:
    """Average the bucket over the ranks, sent as another type where one is given."""
    buffer = bucket.buffer()
    state = _state_of(group, bucket)
    dtype = sent_as or buffer.dtype
    if dtype not in DTYPES or buffer.is_sparse:
        raise Unsupported(f"job {state.context.job}: gradients of {buffer.dtype} cannot be averaged")
    shared = state.bucket(bucket.index(), buffer.numel(), dtype)
    shared.copy_(buffer)
    op = make_op(Kind.ALLREDUCE, f"{state.name}.bucket{bucket.index()}", dtype=DTYPES[dtype],
                 redop=ReduceOp.AVG, input=shared.data_ptr(), output=shared.data_ptr(),
                 count=shared.numel())
    is_direct = dtype == buffer.dtype and buffer.device.type == "cpu"

    def result() -> torch.Tensor:
        return shared if is_direct else buffer.copy_(shared)

    devices = [] if buffer.device.type == "cpu" else [buffer.device]
    return _run(state.context, op, result, devices)


def _run(context: Context, op: Any, result: Callable[[], torch.Tensor],
         devices: list[torch.device]) -> Future:
    """Submit, and return at once a Future of result(), which runs on the completion thread."""
    ended: Future = Future(devices=devices)
    errors: list[GraddError] = []

    def on_done(error: Optional[GraddError]) -> None:
        if error is not None:
            errors.append(error)
        ended.set_result(None)

    def value(_ended: Future) -> torch.Tensor:
        # Raised here, it reaches DDP as an error; an exception that is set on a Future is a value
        # to DDP.
        if errors:
            raise errors[0]
        return result()

    future = ended.then(value)
    try:
        context.add_done_callback(context.submit([op]), on_done)
    except GraddError as error:
        on_done(error)
    return future


def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook: gradients are averaged in their own type."""
    return _average(state, bucket, None)


def fp16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook: gradients travel as float16 and are averaged in float32.

    Values beyond 65504 become infinite, below 6e-8 zero.
    """
    return _average(state, bucket, torch.float16)


def bf16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook: gradients travel as bfloat16 (8 bits of precision, float32's range)."""
    return _average(state, bucket, torch.bfloat16)
