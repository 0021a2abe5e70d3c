# SPDX-License-Identifier: Apache-2.0
"""Tensors in, handles out: how torch ops become submissions, and where their results go.

Every torch op is a :class:`Pending`: its tensors stay referenced until it has ended. Kinds whose
result has a size that only the other ranks know (all-gather, all-to-all) run in two steps: the
shapes are exchanged, which also shows every rank whether they fit; then the data. The second step
is submitted by the completion thread, so that no rank waits for another one's synchronize().

Invariant: of one process set, a name is in flight at most once, from submission until
synchronize(), or until poll() has said True; a handle is synchronised once.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import threading
import warnings
from contextlib import contextmanager
from ctypes import c_int64
from typing import Any, Callable, Iterator, Sequence

import torch

import gradd
from gradd import _device
from gradd._library import Op
from gradd.context import Context, make_op
from gradd.errors import GraddError, HorovodInternalError, InternalError, NonFinite, Shutdown
from gradd.progress import DoneFn
from gradd.torch import basics, timeline
from gradd.torch.basics import ProcessSet
from gradd.types import DType, Kind

DTYPES = {
    torch.int8: DType.I8, torch.uint8: DType.U8, torch.int32: DType.I32, torch.int64: DType.I64,
    torch.float16: DType.F16, torch.float32: DType.F32, torch.float64: DType.F64,
    torch.bfloat16: DType.BF16,
}
# Types that are moved as bytes, and cannot be reduced.
_MOVED = (torch.int16, torch.bool, torch.complex64, torch.complex128)
_CODES = {dtype: code for code, dtype in enumerate([*DTYPES, *_MOVED])}
_NAMES = {code: str(dtype).replace("torch.", "") for dtype, code in _CODES.items()}

_TURNS = 8  # names that ops on one name use by turns, where streams run ahead of the worker
_NAME_BYTES = 230  # the worker allows 255; suffixes of groups come on top
_SHAPE_MAX = 24    # numbers that describe one tensor in the exchange of shapes


_check = threading.local()


@contextmanager
def checking(mode: str | None, names: Sequence[str] = ()) -> Iterator[None]:
    """An all-reduce submitted within looks for NaN and infinity: "warn", "raise", or None.

    names: what to call its tensors; by default their names on the wire.
    """
    _check.mode, _check.names = mode, names
    try:
        yield
    finally:
        _check.mode, _check.names = None, ()


def check_mode() -> str | None:
    """What checking() said to this thread."""
    return getattr(_check, "mode", None)


class Pending:
    """One torch op between submission and synchronize()."""

    def __init__(self, engine: "Engine", name: str, process_set: int, kind: str,
                 output: Any, keep: Any, finish: Callable[[], None] | None = None) -> None:
        self.engine = engine
        self.key = (process_set, name)
        self.kind = kind
        self.output = output
        self.keep = keep
        self.finish = finish
        self.handle = 0        # of the library; 0: the completion thread has it
        self.error: GraddError | None = None
        self.was_seen_ended = False
        self.check_finite = check_mode()
        self.names: list[str] = []  # of the ops, for what check_finite finds
        self.done = threading.Event()  # for ops of two steps
        self.on_device: torch.Tensor | None = None  # CUDA: waiting is done by this one's stream
        self.wire_name = name

    def has_ended(self) -> bool:
        """Never blocks."""
        if self.handle:
            return self.engine.context.test(self.handle)
        return self.done.is_set()

    def wait(self) -> None:
        """Block until the end. Raises the op's error."""
        context = self.engine.context
        if self.handle and self.on_device is not None:
            self._wait_by_stream(self.on_device)
        elif self.handle:
            handle, self.handle = self.handle, 0
            try:
                context.wait(handle)
            except GraddError as error:
                self.error = error
            self.done.set()
        while not self.done.wait(0.2):
            if not context.is_open:
                self.error = Shutdown("the context has left its job while the op was running", -9)
                break
        if isinstance(self.error, NonFinite) and self.check_finite == "warn":
            warnings.warn(str(self.error), RuntimeWarning, stacklevel=4)
        elif self.error is not None:
            raise self.error


    def _wait_by_stream(self, tensor: torch.Tensor) -> None:
        """The current stream waits; the host does so until the op is launched only."""
        handle, self.handle = self.handle, 0
        try:
            self.engine.context.wait_stream(handle, _device.stream_of(tensor))
        except GraddError as error:
            self.error = error
        self.engine.in_flight.add(handle, (self.key[0], self.wire_name), (self.keep, self.output))
        self.done.set()


class Engine:
    """The ops of one membership in a job. Thread: any."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._lock = threading.Lock()
        self._in_flight: dict[tuple[int, str], Pending] = {}
        self._turns: dict[tuple[int, str], int] = {}
        self.in_flight = _device.InFlight(context)

    # -------------------------------------------------------------- names

    def name(self, name: str | None, process_set: ProcessSet) -> str:
        """The name on the wire: given, or counted."""
        if name is None or name == "":
            return self.context.next_name(process_set.process_set_id or 0)
        if len(name.encode()) > _NAME_BYTES:
            digest = hashlib.sha256(name.encode()).hexdigest()[:16]
            return name.encode()[:_NAME_BYTES - 20].decode(errors="ignore") + "~" + digest
        return name

    def device_name(self, base: str, set: int, is_given: bool) -> str:
        """The name on the wire of an op whose end nobody waits for: no earlier one bears it still.

        A stream waits for the op instead of the host, so the script may use the name again while the
        worker has not ended the op. Names take turns, in the same way on all ranks.
        """
        if not is_given:
            return base
        with self._lock:
            turn = self._turns[set, base] = (self._turns.get((set, base), -1) + 1) % _TURNS
        name = f"{base}~{turn}" if turn else base
        self.in_flight.await_tag((set, name))
        return name

    def claim(self, pending: Pending) -> None:
        """The name is this op's until the caller has seen its end. ValueError while another's.

        Whether an op that nobody has asked about has ended already is a matter of microseconds:
        if that decided, a script would fail on some days only.
        """
        with self._lock:
            if pending.key in self._in_flight:
                raise ValueError(
                    f"\"{pending.key[1]}\": this rank has an op of this name in flight already: "
                    "wait for it, or use another name")
            self._in_flight[pending.key] = pending

    def drop(self, pending: Pending) -> None:
        """The name is free again."""
        with self._lock:
            if self._in_flight.get(pending.key) is pending:
                del self._in_flight[pending.key]

    # -------------------------------------------------------------- submission

    def submit(self, pending: Pending, ops: Sequence[Op]) -> None:
        """Ops whose result's size is known: one step."""
        self.in_flight.reap()
        self.claim(pending)
        line, name = timeline.current, pending.key[1]
        if line is not None:
            line.begin(pending.kind, name, self.context.rank)
        try:
            pending.handle = self.context.submit(ops)
        except GraddError:
            self.drop(pending)
            raise
        if line is not None:
            line.submitted(pending.kind, name)
        if pending.check_finite:
            pending.on_device = None
            pending.names = list(_check.names) or [op.name.decode() for op in ops]
            handle, pending.handle = pending.handle, 0
            self.context.add_done_callback(handle, self._finite_check(pending, handle))

    def _finite_check(self, pending: Pending, handle: int) -> DoneFn:
        def on_done(error: GraddError | None) -> None:
            pending.error = error
            try:
                for index, name in enumerate(pending.names if error is None else ()):
                    found = self.context.nonfinite(handle, index)
                    if found is not None:
                        pending.error = NonFinite(
                            f"\"{name}\": rank {found[0]} submitted {found[1]} elements that are "
                            "NaN or infinite", -1)
                        break
            except GraddError as failure:
                pending.error = failure
            pending.done.set()
        return on_done

    def submit_two_steps(self, pending: Pending, row: Sequence[int], n_ranks: int,
                         second_step: Callable[[list[list[int]]], list[Op]]) -> None:
        """Exchange `row` with all ranks, then submit what second_step makes of all rows.

        second_step runs on the completion thread; where it raises, it raises on every rank.
        """
        set_id, name = pending.key
        mine = (c_int64 * len(row))(*row)
        # A longer row on another rank shows different tensors; one spare number makes room to see.
        capacity = n_ranks * (len(row) + _SHAPE_MAX)
        rows = (c_int64 * capacity)()
        context = self.context

        def end(error: GraddError | None) -> None:
            pending.error = error
            pending.done.set()

        def on_rows(error: GraddError | None) -> None:
            if error is not None:
                end(error)
                return
            try:
                lengths = context.counts(handle, 0, n_ranks)
                table, at = [], 0
                for length in lengths:
                    table.append(list(rows[at:at + length]))
                    at += length
                second = context.submit(second_step(table))
            except GraddError as failure:
                end(failure)
                return
            except Exception as failure:  # whoever waits must be told, whatever it was
                end(InternalError(f"\"{name}\": {failure!r} between the exchange of shapes and "
                                  "that of the data", -13))
                return
            context.add_done_callback(second, end)

        self.claim(pending)
        pending.keep = (pending.keep, mine, rows)
        line = timeline.current
        if line is not None:
            line.begin(pending.kind, name, context.rank)
        try:
            handle = context.submit([make_op(
                Kind.ALLGATHER, name, dtype=DType.I64, set=set_id, input=ctypes.addressof(mine),
                output=ctypes.addressof(rows), count=len(row), out_capacity=capacity)])
        except GraddError:
            self.drop(pending)
            raise
        context.add_done_callback(handle, on_rows)
        if line is not None:
            line.submitted(pending.kind, name)


# ------------------------------------------------------------------ handles

_engine: Engine | None = None
_numbers = itertools.count(1)
_pending: dict[int, Pending] = {}


def engine() -> Engine:
    """The engine of the current membership. HorovodInternalError before init()."""
    global _engine
    if not gradd.is_initialized():
        raise HorovodInternalError("gradd has not been initialized: call init() first", -9)
    context = gradd.context()
    if _engine is None or _engine.context is not context:
        _engine = Engine(context)
        _pending.clear()  # handles of an earlier membership
    return _engine


def forget_all() -> None:
    """Before shutdown: ops in flight end with an error where somebody waits for them."""
    for pending in list(_pending.values()):
        if pending.done.is_set():
            continue
        try:
            if pending.handle and pending.has_ended():
                pending.wait()
                continue
        except GraddError as error:
            pending.error = error
        if pending.error is None:
            pending.error = Shutdown("the job was shut down while the op was running", -9)
        pending.handle = 0
        pending.done.set()


basics.before_shutdown.append(forget_all)


def register(pending: Pending) -> int:
    """A number for poll() and synchronize()."""
    number = next(_numbers)
    _pending[number] = pending
    return number


def poll(handle: int) -> bool:
    """Was the op seen to have ended, by the last poll()? ValueError: unknown handle.

    After True, synchronize() does not block. Never True at once, also for an op whose result was
    there before poll() could ask: scripts (Horovod's own tests) take that for a synchronous op.
    """
    pending = _pending.get(handle)
    if pending is None:
        raise ValueError(f"handle {handle} is not in use: synchronised before, or never given")
    if not pending.was_seen_ended:
        # What is known is told; what has come meanwhile is read for the next call.
        pending.was_seen_ended = pending.has_ended()
        return False
    pending.engine.drop(pending)
    return True


def synchronize(handle: int) -> Any:
    """Wait for the op; its result (a tensor, or a list of them). None for an unknown handle.

    Raises HorovodInternalError, or a subclass that says what happened, with the daemon's sentence.
    """
    pending = _pending.get(handle)
    if pending is None:
        return None
    try:
        pending.wait()
    except (HorovodInternalError, NonFinite):
        _pending.pop(handle, None)
        pending.engine.drop(pending)
        raise
    except GraddError as error:
        _pending.pop(handle, None)
        pending.engine.drop(pending)
        raise HorovodInternalError(str(error), error.status) from error
    _pending.pop(handle, None)
    pending.engine.drop(pending)
    if pending.finish is not None:
        pending.finish()
    if timeline.current is not None:
        timeline.current.end(pending.kind, pending.key[1], _describe(pending.output))
    pending.keep = None
    return pending.output


def _describe(output: Any) -> dict[str, Any]:
    first = output[0] if isinstance(output, (list, tuple)) and output else output
    if not isinstance(first, torch.Tensor):
        return {}
    return {"dtype": str(first.dtype).replace("torch.", ""), "shape": str(list(first.shape))}


# ------------------------------------------------------------------ tensors


def check_tensor(tensor: torch.Tensor, *, is_reduced: bool) -> None:
    """ValueError for a tensor that no op takes."""
    if tensor.layout != torch.strided:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    known = tensor.dtype in DTYPES or (not is_reduced and tensor.dtype in _MOVED)
    if not known:
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")


def set_id(process_set: ProcessSet) -> int:
    """The set's id. ValueError for sets that are not registered or do not have this rank."""
    engine()
    number = process_set.process_set_id
    if number is None:
        raise ValueError(f"{process_set} is not registered: use add_process_set()")
    ranks = basics.set_ranks(number)
    if basics.rank() not in ranks:
        raise ValueError(f"rank {basics.rank()} is not part of process set {number}, which has "
                         f"ranks {ranks}")
    return number


def wire_type(tensor: torch.Tensor) -> tuple[DType, int]:
    """Element type on the wire, and wire elements per tensor element."""
    dtype = DTYPES.get(tensor.dtype)
    return (dtype, 1) if dtype is not None else (DType.U8, tensor.element_size())


def shape_row(tensor: torch.Tensor) -> list[int]:
    """How a tensor is described to the other ranks: type, rank, shape."""
    if tensor.dim() > _SHAPE_MAX - 2:
        raise ValueError(f"a tensor of {tensor.dim()} dimensions: at most {_SHAPE_MAX - 2} are "
                         "possible")
    return [_CODES[tensor.dtype], tensor.dim(), *tensor.shape]


def describe_row(row: Sequence[int]) -> str:
    """`float32[2,3]` for a shape_row()."""
    if len(row) < 2:
        return "nothing"
    return f"{_NAMES.get(row[0], '?')}[{','.join(map(str, row[2:2 + row[1]]))}]"
