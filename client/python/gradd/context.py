# SPDX-License-Identifier: Apache-2.0
"""One rank's membership in a job: ``struct gradd`` as a Python object.

Invariant: no call reaches the library after :meth:`Context.shutdown`; shared memory that Python
objects still refer to outlives the context.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from ctypes import POINTER, c_int32, c_uint64, c_void_p
from typing import Any, Sequence

from gradd._buffer import Buffer
from gradd._library import PENDING, Op, Options, library
from gradd.errors import Forked, GraddError, Shutdown, from_status
from gradd.progress import DoneFn, Progress
from gradd.types import DType, Kind, ReduceOp

# A wait inside the library cannot be interrupted by Python's signal handlers; it is cut into
# slices, so that Ctrl-C works and a shutdown by another thread is seen.
_WAIT_SLICE_S = 0.2

_DIMS_MAX = 32

_libc = ctypes.CDLL(None)
_libc.munmap.argtypes = [c_void_p, ctypes.c_size_t]

_OP_BYTES = ctypes.sizeof(Op)


def counts_array(counts: Sequence[int]) -> ctypes.Array:
    """``uint64_t[]`` of the given numbers."""
    return (c_uint64 * len(counts))(*counts)


def even_parts(count: int, n_ranks: int) -> list[int]:
    """Elements or rows of each rank: the lowest ranks have one more where it is not even."""
    quotient, rest = divmod(count, n_ranks)
    return [quotient + (r < rest) for r in range(n_ranks)]


def make_op(kind: Kind, name: str, *, dtype: int = DType.U8, redop: int = ReduceOp.SUM,
            root: int = 0, set: int = 0, input: int = 0, output: int = 0, count: int = 0,
            out_capacity: int = 0, counts: Sequence[int] | None = None, prescale: float = 1.0,
            postscale: float = 1.0, dims: Sequence[int] | None = None,
            check_finite: bool = False, stream: int = 0) -> Op:
    """One request, as ``struct gradd_op`` has it.

    ``input`` and ``output`` are addresses; ``count`` and ``out_capacity`` are elements; ``counts``
    has one number per rank of the set (for SET_ADD: the set's ranks). `dims` is the shape, which
    ranks that give one must agree on (gathers: but for the first dimension). The memory must stay
    valid until the op has ended. Of CUDA memory, `stream` is the handle of the stream that makes the
    input.
    """
    op = Op(struct_size=_OP_BYTES, kind=kind, dtype=dtype, redop=redop, root=root, set=set,
            name=name.encode(), input=input or None, output=output or None, count=count,
            out_capacity=out_capacity, prescale=prescale, postscale=postscale,
            check_finite=check_finite, stream=stream or None)
    if dims is not None and 0 < len(dims) <= _DIMS_MAX:
        op.dims = ctypes.cast(counts_array(dims), POINTER(c_uint64))
        op.n_dims = len(dims)
    if counts is not None:
        op.counts = ctypes.cast(counts_array(counts), POINTER(c_uint64))
    return op


class Work:
    """An op in flight, for code that prefers objects to handles.

    Holds the memory of the op until it ends. ``result`` is what the op was asked to write to.
    """

    def __init__(self, context: "Context", handle: int, result: Any, keep: Any = None) -> None:
        self._context = context
        self._handle: int | None = handle
        self._keep = keep
        self.result = result

    def done(self) -> bool:
        """Has the op ended (well or not)? Never blocks."""
        return self._handle is None or self._context.test(self._handle)

    def wait(self, timeout: float | None = None) -> Any:
        """The result once the op has ended. Raises its error; Timeout after `timeout` seconds."""
        if self._handle is not None:
            try:
                has_ended = self._context.wait(self._handle, timeout)
            except GraddError:
                self._handle = self._keep = None
                raise
            if not has_ended:
                raise from_status(-4, f"the op has not ended within {timeout} s")
            self._handle = self._keep = None
        return self.result


class Region:
    """Memory that trainer and worker share: ops on it copy nothing.

    It has the buffer protocol through :attr:`array`, so ``numpy.frombuffer(region.array)`` and
    ``torch.frombuffer(region.array, ...)`` are views of it. It is freed when the last view is
    gone, also after the context has ended.
    """

    def __init__(self, context: "Context", address: int, n_bytes: int) -> None:
        self.address = address
        self.n_bytes = n_bytes
        self.array = (ctypes.c_char * n_bytes).from_address(address)
        # Views refer to the array, not to this object.
        weakref.finalize(self.array, context._free, address).atexit = False

    @property
    def view(self) -> memoryview:
        """The bytes, writable."""
        return memoryview(self.array).cast("B")


class DeviceRegion:
    """CUDA memory that trainer and worker share: ops on it copy nothing.

    It has ``__cuda_array_interface__``: ``torch.as_tensor(region, device="cuda")`` is a view of it.
    It is freed when the last reference is gone, or with the context.
    """

    def __init__(self, context: "Context", address: int, n_bytes: int) -> None:
        self.address = address
        self.n_bytes = n_bytes
        self.__cuda_array_interface__ = {
            "shape": (n_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}
        weakref.finalize(self, context._free_device, address).atexit = False


class Context:
    """Join a job; blocks until all its ranks have joined.

    Args:
        socket: the daemon's socket; None: GRADD_SOCKET, else /run/gradd/gradd.sock.
        job: the job's name within this uid; None: from the launcher.
        rank, size, local_rank, local_size: the identity; size None: from the launcher's variables.
        timeout_s: how long to wait for the other ranks; 0: the daemon's join_timeout_s.

    Raises:
        ServiceUnavailable, Timeout, RanksDisagree, DuplicateName, InvalidRequest, ...
    """

    def __init__(self, *, socket: str | None = None, job: str | None = None,
                 rank: int | None = None, size: int | None = None, local_rank: int = 0,
                 local_size: int = 0, timeout_s: float = 0.0) -> None:
        self.library = library()
        self.pointer: c_void_p | None = None
        self._pid = os.getpid()
        self._lock = threading.RLock()  # the collector may call _free() while it is held
        self._progress: Progress | None = None
        self._n_unnamed: dict[int, int] = {}
        self._regions: dict[int, int] = {}  # bytes by address, while something refers to them
        self._are_kept = False  # the regions are this process's own now
        self._n_calls = 0  # inside the library
        self._nobody_calls = threading.Condition(self._lock)
        options = Options(
            struct_size=ctypes.sizeof(Options), socket=_encode(socket), job=_encode(job),
            rank=rank or 0, size=size or 0, local_rank=local_rank, local_size=local_size,
            timeout_s=timeout_s)
        pointer = c_void_p()
        self._check(self.library.gradd_init(ctypes.byref(options), ctypes.byref(pointer)))
        self.pointer = pointer
        lib = self.library
        self.rank: int = lib.gradd_rank(pointer)
        self.size: int = lib.gradd_size(pointer)
        self.local_rank: int = lib.gradd_local_rank(pointer)
        self.local_size: int = lib.gradd_local_size(pointer)
        self.node_rank: int = lib.gradd_node_rank(pointer)
        self.n_nodes: int = lib.gradd_n_nodes(pointer)
        self.epoch: int = lib.gradd_epoch(pointer)
        self.job: str = lib.gradd_job(pointer).decode()
        self.source: str = lib.gradd_source(pointer).decode()
        _contexts.add(self)

    # -------------------------------------------------------------- life

    @property
    def is_open(self) -> bool:
        """False after shutdown(), and in a child process."""
        return self.pointer is not None and self._pid == os.getpid()

    def shutdown(self) -> None:
        """Leave the job. Ops in flight are abandoned. Idempotent; in a child it only frees."""
        with self._lock:
            pointer, self.pointer = self.pointer, None
            progress, self._progress = self._progress, None
        if pointer is None:
            return
        if progress is not None and self._pid == os.getpid():
            progress.stop()
        with self._lock:
            self._nobody_calls.wait_for(lambda: self._n_calls == 0)
            for address in list(self._regions):
                self.library.gradd_keep(pointer, address)
            self._are_kept = True
        self.library.gradd_shutdown(pointer)

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _open(self) -> c_void_p:
        pointer = self.pointer
        if pointer is None:
            raise Shutdown("the context has left its job", -9)
        if self._pid != os.getpid():
            raise Forked("this process is a child of the one that joined the job: only that one "
                         "may use the context", -10)
        return pointer

    def _call(self, function: Any, *args: Any) -> int:
        """Call the library; shutdown() by another thread waits until it has returned."""
        with self._lock:
            pointer = self._open()
            self._n_calls += 1
        try:
            return function(pointer, *args)
        finally:
            with self._lock:
                self._n_calls -= 1
                if self._n_calls == 0:
                    self._nobody_calls.notify_all()

    def _check(self, status: int) -> int:
        if status < 0:
            raise from_status(status, self.library.gradd_error().decode())
        return status

    # -------------------------------------------------------------- memory

    def alloc(self, n_bytes: int) -> Region:
        """Shared memory, page aligned, zeroed, counted against the job's quota."""
        address = self._call(self.library.gradd_alloc, n_bytes)
        if not address:
            raise from_status(-6, self.library.gradd_error().decode())
        self._regions[address] = max(n_bytes, 1)
        return Region(self, address, max(n_bytes, 1))

    def _free(self, address: int) -> None:
        with self._lock:
            n_bytes = self._regions.pop(address, 0)
            if self.is_open:
                self.library.gradd_free(self.pointer, address)
            elif self._are_kept and n_bytes:
                _libc.munmap(address, n_bytes)
            # Else shutdown() is about to unmap it, or this is a child of the process that joined.

    # -------------------------------------------------------------- CUDA memory

    def device_path(self) -> tuple[bool, str]:
        """Does the worker take CUDA memory? If not, why ops on it go through host memory."""
        text = ctypes.c_char_p()
        is_on = self._check(self._call(self.library.gradd_device_path, ctypes.byref(text)))
        return bool(is_on), (text.value or b"").decode()

    def alloc_device(self, device: int, n_bytes: int) -> DeviceRegion:
        """CUDA memory on this device of the process, which the worker uses without a copy."""
        address = self._call(self.library.gradd_alloc_device, device, n_bytes)
        if not address:
            raise from_status(-6, self.library.gradd_error().decode())
        return DeviceRegion(self, address, max(n_bytes, 1))

    def _free_device(self, address: int) -> None:
        with self._lock:
            if self.is_open:
                self.library.gradd_free(self.pointer, address)

    def register(self, address: int, n_bytes: int) -> None:
        """Share CUDA memory now instead of at the first op on it. InvalidRequest: it can not be."""
        self._check(self._call(self.library.gradd_register, address, n_bytes))

    def forget(self, address: int) -> None:
        """Share the CUDA memory around this address no longer, because it is about to be freed."""
        self._check(self._call(self.library.gradd_forget, address))

    def wait_stream(self, handle: int, stream: int, timeout: float | None = None) -> bool:
        """Make a CUDA stream wait for the op's results; the handle stays. Raises the op's error.

        Blocks at most until the op is launched, never for the device; False: it is not, after
        `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            slice_s = _WAIT_SLICE_S
            if deadline is not None:
                slice_s = max(0.0, min(slice_s, deadline - time.monotonic()))
            status = self._call(self.library.gradd_wait_stream, handle, stream, slice_s)
            if status != PENDING:
                self._check(status)
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    # -------------------------------------------------------------- ops

    def next_name(self, set: int = 0) -> str:
        """A name for an op without one: the same on all ranks that make the same calls.

        Counted per process set, and over all kinds: where ranks make different calls, they meet
        under one name and are told so.
        """
        with self._lock:
            n = self._n_unnamed.get(set, 0)
            self._n_unnamed[set] = n + 1
        return f"noname.{n}"

    def restart_names(self) -> None:
        """Count unnamed ops from 0 again: after a join, ranks have made different numbers."""
        with self._lock:
            self._n_unnamed.clear()

    def submit(self, ops: Sequence[Op]) -> int:
        """Submit ops as one; they complete together. Returns their handle (> 0).

        Returns at once. The caller keeps the memory alive until the handle has ended, and ends the
        handle with :meth:`wait` or :meth:`release`.
        """
        n = len(ops)
        array = ctypes.byref(ops[0]) if n == 1 else (Op * n)(*ops)
        return self._check(self._call(self.library.gradd_submit, array, n))

    def test(self, handle: int) -> bool:
        """Has the handle ended, well or not? Never blocks."""
        return self._call(self.library.gradd_test, handle) != PENDING

    def wait(self, handle: int, timeout: float | None = None) -> bool:
        """Wait for the end, then release the handle. Raises the op's error.

        Returns False when `timeout` seconds have passed; the handle is then still valid.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            slice_s = _WAIT_SLICE_S
            if deadline is not None:
                slice_s = max(0.0, min(slice_s, deadline - time.monotonic()))
            status = self._call(self.library.gradd_wait, handle, slice_s)
            if status != PENDING:
                self._check(status)
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def release(self, handle: int) -> None:
        """Forget a handle; an op in flight still runs, and still uses its memory."""
        try:
            self._call(self.library.gradd_release, handle)
        except (Shutdown, Forked):
            pass  # it went with the context

    def counts(self, handle: int, index: int = 0, capacity: int | None = None) -> list[int]:
        """What each rank contributed (see gradd_counts), between the op's end and its release."""
        out = (c_uint64 * (capacity or max(self.size, 1)))()
        n = self._check(self._call(self.library.gradd_counts, handle, index, out, len(out)))
        return list(out[:n])

    def nonfinite(self, handle: int, index: int = 0) -> tuple[int, int] | None:
        """(first rank, elements) of NaN and infinity in the inputs of an op with check_finite.

        Between the op's end and its release. None: every input was finite.
        """
        rank, count = c_int32(), c_uint64()
        found = self._check(self._call(
            self.library.gradd_nonfinite, handle, index, ctypes.byref(rank), ctypes.byref(count)))
        return (rank.value, count.value) if found > 0 else None

    def wait_counts(self, handle: int, index: int = 0) -> list[int]:
        """Wait for the end, release the handle, and return counts() of one op, or its error."""
        outcome: list[Any] = []
        done = threading.Event()

        def on_done(error: GraddError | None) -> None:
            try:
                outcome.append(error or self.counts(handle, index))
            except GraddError as late:
                outcome.append(late)
            done.set()

        self.add_done_callback(handle, on_done)
        while not done.wait(_WAIT_SLICE_S):
            self._open()
        if isinstance(outcome[0], GraddError):
            raise outcome[0]
        return outcome[0]

    def add_done_callback(self, handle: int, function: DoneFn) -> None:
        """Call ``function(error or None)`` on the completion thread once the op has ended.

        The function must not block. The handle is released after it has returned; its counts can
        be read there.
        """
        with self._lock:
            self._open()
            if self._progress is None:
                self._progress = Progress(self)
            progress = self._progress
        progress.watch(handle, function)

    def add_launch_callback(self, handle: int, stream: int, function: DoneFn, keep: Any) -> None:
        """Call ``function(error or None)`` on the completion thread once `stream` waits for the op.

        What is put into the stream from then on sees the results. `keep` is held until the op has
        ended; the handle is released then.
        """
        with self._lock:
            self._open()
            if self._progress is None:
                self._progress = Progress(self)
            progress = self._progress
        progress.watch_launch(handle, stream, function, keep)

    def _after_fork_in_child(self) -> None:
        # Locks may have been held by threads that the child does not have.
        self._lock = threading.RLock()
        self._nobody_calls = threading.Condition(self._lock)
        self._n_calls = 0
        self._progress = None

    # -------------------------------------------------------------- collectives on buffers

    def allreduce_async(self, buffer: Any, out: Any = None, *, name: str | None = None,
                        op: ReduceOp = ReduceOp.AVG, dtype: DType | None = None, set: int = 0,
                        prescale: float = 1.0, postscale: float = 1.0) -> Work:
        """Reduce `buffer` over all ranks into `out` (None: in place). Same shape on every rank.

        `buffer`, `out`: any C-contiguous objects with the buffer protocol. `dtype` overrides the
        element type of the buffer's format, for types that formats do not know (BF16).
        """
        out = buffer if out is None else out
        destination = Buffer(out, writable=True, dtype=dtype)
        source = destination if out is buffer else Buffer(buffer, writable=False, dtype=dtype)
        if source.n_bytes != destination.n_bytes or source.dtype != destination.dtype:
            raise ValueError(f"the input has {source.count} {source.dtype.name}, the output "
                             f"{destination.count} {destination.dtype.name}")
        handle = self.submit([make_op(
            Kind.ALLREDUCE, name or self.next_name(set), dtype=source.dtype, redop=op, set=set,
            input=source.address, output=destination.address, count=source.count,
            prescale=prescale, postscale=postscale)])
        return Work(self, handle, out, (source, destination))

    def allreduce(self, buffer: Any, out: Any = None, **options: Any) -> Any:
        """Blocking :meth:`allreduce_async`; returns the output."""
        return self.allreduce_async(buffer, out, **options).wait()

    def broadcast_async(self, buffer: Any, root: int = 0, *, name: str | None = None,
                        dtype: DType | None = None, set: int = 0) -> Work:
        """Overwrite `buffer` on every rank with that of (global) rank `root`."""
        memory = Buffer(buffer, writable=True, dtype=dtype)
        handle = self.submit([make_op(
            Kind.BROADCAST, name or self.next_name(set), dtype=memory.dtype, root=root, set=set,
            input=memory.address, output=memory.address, count=memory.count)])
        return Work(self, handle, buffer, memory)

    def broadcast(self, buffer: Any, root: int = 0, **options: Any) -> Any:
        """Blocking :meth:`broadcast_async`; returns the buffer."""
        return self.broadcast_async(buffer, root, **options).wait()

    def allgather(self, buffer: Any, out: Any = None, *, name: str | None = None,
                  dtype: DType | None = None, set: int = 0, set_size: int | None = None,
                  ) -> tuple[Any, list[int]]:
        """Concatenate the elements of all ranks in rank order; counts may differ between ranks.

        Returns (out, elements of each rank). Without `out`, memory for the result is made here:
        one more exchange tells how much is needed.
        """
        source = Buffer(buffer, writable=False, dtype=dtype)
        name = name or self.next_name(set)
        n_ranks = set_size or self.size
        if out is None:
            lengths = (c_uint64 * n_ranks)()
            mine = c_uint64(source.count)
            self.wait(self.submit([make_op(
                Kind.ALLGATHER, name + ".counts", dtype=DType.I64, set=set,
                input=ctypes.addressof(mine), output=ctypes.addressof(lengths), count=1,
                out_capacity=n_ranks)]))
            out = _new_like(buffer, source, sum(lengths))
        destination = Buffer(out, writable=True, dtype=source.dtype)
        handle = self.submit([make_op(
            Kind.ALLGATHER, name, dtype=source.dtype, set=set, input=source.address,
            output=destination.address, count=source.count, out_capacity=destination.count)])
        return out, self.wait_counts(handle)

    def reduce_scatter(self, buffer: Any, out: Any = None, *, counts: Sequence[int] | None = None,
                       name: str | None = None, op: ReduceOp = ReduceOp.AVG,
                       dtype: DType | None = None, set: int = 0, set_size: int | None = None,
                       set_rank: int | None = None, prescale: float = 1.0,
                       postscale: float = 1.0) -> Any:
        """Reduce `buffer`; rank r gets the r-th part, of counts[r] elements (None: even parts)."""
        source = Buffer(buffer, writable=False, dtype=dtype)
        n_ranks = set_size or self.size
        me = self.rank if set_rank is None else set_rank
        if counts is None:
            counts = even_parts(source.count, n_ranks)
        if out is None:
            out = _new_like(buffer, source, counts[me])
        destination = Buffer(out, writable=True, dtype=source.dtype)
        if destination.count != counts[me]:
            raise ValueError(f"the output has {destination.count} elements, this rank's part has "
                             f"{counts[me]}")
        self.wait(self.submit([make_op(
            Kind.REDUCE_SCATTER, name or self.next_name(set), dtype=source.dtype, redop=op, set=set,
            input=source.address, output=destination.address, count=source.count, counts=counts,
            prescale=prescale, postscale=postscale)]))
        return out

    def alltoall(self, buffer: Any, out: Any = None, *, counts: Sequence[int] | None = None,
                 name: str | None = None, dtype: DType | None = None, set: int = 0,
                 set_size: int | None = None, set_rank: int | None = None,
                 ) -> tuple[Any, list[int]]:
        """Send counts[r] elements to rank r (None: even parts), receive in rank order.

        Returns (out, elements received from each rank). Without `out`, memory for the result is
        made here: one more exchange tells how much is needed.
        """
        source = Buffer(buffer, writable=False, dtype=dtype)
        name = name or self.next_name(set)
        n_ranks = set_size or self.size
        me = self.rank if set_rank is None else set_rank
        if counts is None:
            counts = even_parts(source.count, n_ranks)
        if out is None:
            table = (c_uint64 * (n_ranks * n_ranks))()
            row = counts_array(counts)
            self.wait(self.submit([make_op(
                Kind.ALLGATHER, name + ".counts", dtype=DType.I64, set=set,
                input=ctypes.addressof(row), output=ctypes.addressof(table), count=n_ranks,
                out_capacity=n_ranks * n_ranks)]))
            out = _new_like(buffer, source, sum(table[me::n_ranks]))
        destination = Buffer(out, writable=True, dtype=source.dtype)
        handle = self.submit([make_op(
            Kind.ALLTOALL, name, dtype=source.dtype, set=set, input=source.address,
            output=destination.address, count=source.count, out_capacity=destination.count,
            counts=counts)])
        return out, self.wait_counts(handle)

    def barrier(self, set: int = 0) -> None:
        """Return when every rank (of the set) has called it."""
        self.wait(self.submit([make_op(Kind.BARRIER, "gradd.barrier", set=set)]))

    def add_set(self, ranks: Sequence[int]) -> int:
        """Make a process set of these ascending global ranks; all ranks call it. Its id."""
        handle = self.submit([make_op(Kind.SET_ADD, "gradd.set.add", count=len(ranks),
                                      counts=ranks)])
        return self.wait_counts(handle)[0]

    def remove_set(self, set: int) -> None:
        """Dissolve a process set; all ranks call it."""
        self.wait(self.submit([make_op(Kind.SET_REMOVE, "gradd.set.remove", root=set)]))

    def join(self) -> int:
        """Out of data: others' all-reduces count this rank as zeros. The last rank to join."""
        last = self.wait_counts(self.submit([make_op(Kind.JOIN, "gradd.join")]))[0]
        self.restart_names()
        return last


def _encode(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def _new_like(buffer: Any, info: Buffer, count: int) -> Any:
    """Memory for `count` elements: a NumPy array for one, else a memoryview of the same format."""
    if type(buffer).__module__.split(".")[0] == "numpy":
        import numpy
        return numpy.empty(count, dtype=buffer.dtype)
    memory = memoryview(bytearray(count * info.dtype.itemsize))
    return memory if count == 0 else memory.cast(info.format)


_contexts: "weakref.WeakSet[Context]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for context in list(_contexts):
        context._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
