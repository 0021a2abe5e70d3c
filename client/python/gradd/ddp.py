# SPDX-License-Identifier: Apache-2.0
"""Gradients of DistributedDataParallel through gradd, whatever its process group is.

    model = DistributedDataParallel(net)
    model.register_comm_hook(None, gradd.ddp.hook)

Each bucket is averaged where it lies, by a worker that shares its pages, while backward computes
the next one. ``fp16_hook`` and ``bf16_hook`` copy it to half types first, so that half the bytes
are summed (in float32 all the same).

The first argument of register_comm_hook may be None (the default process group's ranks), a process
group, a gradd Context, or a :class:`State`. Without a State each model gets one by itself. The
ranks must run the same models, and register their hooks, in the same order.

Errors leave backward() as RuntimeError with gradd's sentence; nobody waits for a lost rank.
Of CUDA gradients the stream that backward() ends in waits, not the host; those of other devices
are copied through host memory.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with classes.

import itertools
import threading
import weakref
from datetime import timedelta
from typing import Any, Callable, Optional, Union

import torch
import torch.distributed as dist

import gradd
from gradd import _device
from gradd._pages import SharedPages
from gradd.c10d import context_of_group
from gradd.c10d.join import join
from gradd.c10d.tensors import DTYPES
from gradd.context import Context, Region, make_op
from gradd.errors import GraddError, InvalidRequest, OutOfMemory, Unsupported
from gradd.types import Kind, ReduceOp

Future = torch.futures.Future

_JOIN_TIMEOUT = timedelta(minutes=30)
_TURNS = 8
_IN_PLACE_BYTES = 256 << 10  # below, a copy costs less than a mapping of its own


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Copy:
    """Shared memory that stands for a bucket: gradients are copied there, in any element type.

    Invariant: from the copy until DDP has read the result, nobody else writes to it. DDP reads it
    before backward() returns, and gives the bucket again in the next backward() only.
    """

    def __init__(self, context: Context, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        n = buffer.numel()
        self._region: Region = context.alloc(n * torch.empty((), dtype=dtype).element_size())
        self._tensor = torch.frombuffer(self._region.array, dtype=dtype, count=n)
        self.address = self._tensor.data_ptr()

    def before_op(self, buffer: torch.Tensor) -> None:
        self._tensor.copy_(buffer)

    def after_op(self, buffer: torch.Tensor) -> torch.Tensor:
        """The result, in the bucket's type and on its device."""
        if buffer.dtype == self._tensor.dtype and buffer.device == self._tensor.device:
            return self._tensor
        return buffer.copy_(self._tensor)

    def close(self) -> None:
        pass  # goes with the last view of it


class _InPlace:
    """The bucket's own memory, whose pages the worker shares: nothing is copied."""

    def __init__(self, context: Context, buffer: torch.Tensor) -> None:
        self._pages = SharedPages(context, buffer.data_ptr(), _bytes_of(buffer), buffer)
        self.address = self._pages.shared_address

    def before_op(self, buffer: torch.Tensor) -> None:
        self._pages.before_op()

    def after_op(self, buffer: torch.Tensor) -> torch.Tensor:
        self._pages.after_op()
        return buffer

    def close(self) -> None:
        self._pages.close()


class _Ordinary:
    """The bucket's own memory: CUDA memory, or what the library copies piece by piece."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.address = buffer.data_ptr()

    def before_op(self, buffer: torch.Tensor) -> None:
        pass

    def after_op(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer

    def close(self) -> None:
        pass


class _DeviceCopy:
    """CUDA memory that stands for a bucket in another element type."""

    def __init__(self, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        self._tensor = torch.empty(buffer.numel(), dtype=dtype, device=buffer.device)
        self.address = self._tensor.data_ptr()

    def before_op(self, buffer: torch.Tensor) -> None:
        self._tensor.copy_(buffer)

    def after_op(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.copy_(self._tensor)

    def close(self) -> None:
        pass


_Memory = Union[_Copy, _InPlace, _Ordinary, _DeviceCopy]


class State:
    """What the hooks keep for one model: its ranks, and the memory of its buckets.

    Args:
        group: a process group, a Context, or None for the default process group.
        in_place: let the worker share the pages of DDP's own buckets, instead of copying them.
            They are then shared with children of this process, too, should those write to
            gradients.
    """

    def __init__(self, group: Any = None, in_place: bool = True) -> None:
        self.context = context_of(group)
        self.name = f"ddp{next(_counter_of(self.context))}"
        self._in_place = in_place
        self._is_refused = False
        self._buckets: dict[int, tuple[Any, _Memory]] = {}
        self._streams: dict[torch.device, Any] = {}
        self._n_runs: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._buckets).atexit = False

    def memory(self, index: int, buffer: torch.Tensor, dtype: torch.dtype) -> _Memory:
        """Where the bucket of that index is averaged, as elements of `dtype`.

        DDP rebuilds its buckets after the first backward: then the memory of the old one goes.
        """
        key = (buffer.data_ptr(), buffer.numel(), buffer.dtype, dtype)
        known = self._buckets.pop(index, None)
        if known is not None and known[0] != key:
            known[1].close()
            known = None
        if known is None:
            known = key, self._make(buffer, dtype)
        self._buckets[index] = known
        return known[1]

    def _make(self, buffer: torch.Tensor, dtype: torch.dtype) -> _Memory:
        if _device.is_device(buffer):
            return _Ordinary(buffer) if dtype == buffer.dtype else _DeviceCopy(buffer, dtype)
        is_plain = dtype == buffer.dtype and buffer.device.type == "cpu"
        if is_plain and (self.context.size == 1 or self._is_refused):
            return _Ordinary(buffer)
        try:
            if is_plain and self._in_place and _bytes_of(buffer) >= _IN_PLACE_BYTES:
                return _InPlace(self.context, buffer)
            return _Copy(self.context, buffer, dtype)
        except (OutOfMemory, OSError):
            if not is_plain:
                raise
            self._is_refused = True  # asking again would cost the library its idle buffers
            return _Ordinary(buffer)

    def side_stream(self, buffer: torch.Tensor) -> Any:
        """Where CUDA results are waited for, so that nothing that backward() computes is."""
        if buffer.device not in self._streams:
            self._streams[buffer.device] = _device.side_stream(buffer)
        return self._streams[buffer.device]

    def next_name(self, index: int) -> str:
        """A bucket's name on the wire. The host may be ahead of CUDA ops: names take turns."""
        n = self._n_runs[index] = self._n_runs.get(index, -1) + 1
        return f"{self.name}.bucket{index}.{n % _TURNS}"

    def close(self) -> None:
        """Give the buckets ordinary memory again; also done when the State is forgotten."""
        _close_all(self._buckets)


def _close_all(buckets: dict) -> None:
    while buckets:
        _, (_, memory) = buckets.popitem()
        memory.close()


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
    known = context_of_group(group)
    if known is not None:
        return known
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
        if state is not None and not state.context.is_open:
            state.close()  # before others share the same pages
            state = None
        if state is None:
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
        raise Unsupported(f"job {state.context.job}: gradients of {buffer.dtype} cannot be "
                          "averaged")
    memory = state.memory(bucket.index(), buffer, dtype)
    memory.before_op(buffer)
    is_device = _device.is_device(buffer)
    name = state.next_name(bucket.index()) if is_device else f"{state.name}.bucket{bucket.index()}"
    op = make_op(Kind.ALLREDUCE, name, dtype=DTYPES[dtype],
                 redop=ReduceOp.AVG, input=memory.address, output=memory.address,
                 count=buffer.numel(), stream=_device.stream_of(buffer))
    if is_device:
        return _run_in_stream(state, op, memory, buffer)
    devices = [] if buffer.device.type == "cpu" else [buffer.device]
    return _run(state.context, op, lambda: memory.after_op(buffer), devices)


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


def _run_in_stream(state: State, op: Any, memory: _Memory, buffer: torch.Tensor) -> Future:
    """Submit, and return a Future that ends when a stream waits for the op: DDP's waits for that."""
    ended = _device.future_of(buffer)
    stream = state.side_stream(buffer)
    errors: list[GraddError] = []

    def on_launched(error: Optional[GraddError]) -> None:
        if error is not None:
            errors.append(error)
            ended.set_result(None)
            return
        with _device.on(stream):
            ended.set_result(memory.after_op(buffer))

    def value(ended_: Future) -> torch.Tensor:
        if errors:  # see _run()
            raise errors[0]
        return ended_.value()

    future = ended.then(value)
    try:
        handle = state.context.submit([op])
        state.context.add_launch_callback(handle, stream.cuda_stream, on_launched,
                                          (memory, buffer))
    except GraddError as error:
        on_launched(error)
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
