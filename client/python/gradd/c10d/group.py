# SPDX-License-Identifier: Apache-2.0
"""torch.distributed's ProcessGroup on a job of gradd.

Collectives of a group are matched by the order of the calls, as torch has it: the n-th call of
every rank bears the same name. Ranks that call different collectives are told so at once.

The methods' names and arguments are those that torch's Python functions, and DDP and FSDP in C++,
call; each returns a Work.
"""

from __future__ import annotations

import collections
import math
import threading
from datetime import timedelta
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist

from gradd import _device
from gradd._library import Op
from gradd.c10d import tensors as t
from gradd.c10d.join import join
from gradd.c10d.p2p import Peers
from gradd.c10d.work import Work
from gradd.context import make_op
from gradd.errors import InvalidRequest, Unsupported
from gradd.types import DType, Kind, ReduceOp

_REDOPS = {
    "SUM": ReduceOp.SUM, "PRODUCT": ReduceOp.PROD, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX,
    "AVG": ReduceOp.AVG,
}
_BITWISE: dict[str, Callable[..., torch.Tensor]] = {
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}
# Truth values as bytes: what "or" and "and" are among the operators.
_BOOL_REDOPS = {
    "SUM": ReduceOp.MAX, "MAX": ReduceOp.MAX, "BOR": ReduceOp.MAX, "PRODUCT": ReduceOp.MIN,
    "MIN": ReduceOp.MIN, "BAND": ReduceOp.MIN,
}
_KEPT_MAX = 4096
_WATCHED_BEYOND = 64


def operator_name(opts: Any) -> str:
    """Of an options object, an operator, or None (the sum)."""
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return "SUM"
    for name in (*_REDOPS, *_BITWISE):
        if op == getattr(dist.ReduceOp, name, None):
            return name
    raise Unsupported(f"the gradd backend has no reduction {op}")


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else opts.rootRank


def _first_device(kept: Any) -> torch.Tensor | None:
    """A CUDA tensor among what an op keeps alive, or None."""
    for one in kept if isinstance(kept, (list, tuple)) else (kept,):
        while isinstance(one, (_Reduced, t.Flat)):
            one = one.flat
        if isinstance(one, torch.Tensor) and _device.is_device(one):
            return one
    return None


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _one(tensors: Any, what: str) -> torch.Tensor:
    listed = _listed(tensors)
    if len(listed) != 1:
        raise InvalidRequest(f"{what}: {len(listed)} tensors, a rank of gradd has one device")
    return listed[0]


class _Reduced:
    """An operand of a reduction in a type that gradd has: bool as bytes, int16 as int32."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        if tensor.is_complex():
            if name not in ("SUM", "AVG"):
                raise Unsupported(f"complex numbers have no {name}")
            tensor = torch.view_as_real(tensor)
        as_type = {torch.bool: torch.uint8, torch.int16: torch.int32}.get(tensor.dtype)
        self.flat = t.Flat(tensor, as_type=as_type)
        redops = _BOOL_REDOPS if tensor.dtype == torch.bool else _REDOPS
        if name not in redops:
            raise Unsupported(f"the gradd backend has no {name} of {tensor.dtype}")
        if self.flat.flat.dtype not in t.DTYPES:
            raise Unsupported(f"the gradd backend does not reduce {tensor.dtype}")
        self.dtype = t.DTYPES[self.flat.flat.dtype]
        self.redop = redops[name]


def _base() -> type:
    """What torch lets Python implement: a backend inside its process group, else the group itself.

    Backends can be written in Python where they have the newest names of the collectives.
    """
    backend = getattr(torch._C._distributed_c10d, "Backend", None)
    return backend if hasattr(backend, "all_gather_single") else dist.ProcessGroup


class GraddGroup(_base()):  # type: ignore[misc]
    """One group of ranks, which is one job of the daemon.

    Args:
        store: torch's rendezvous, the group's own part of it.
        rank, size: of this process in the group.
        timeout: how long to wait for the others, at the join and in each Work.
        name: what torch calls the group.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta,
                 name: str = "") -> None:
        super().__init__(rank, size)
        self._name = name
        self._rank = rank
        self._size = size
        self._timeout_s = timeout.total_seconds()
        self._sequence = 0
        self._lock = threading.Lock()
        # torch before 2.7 loses a Work that nobody else refers to; and memory must outlive its op.
        self._kept: collections.deque[Work] = collections.deque()
        self.context = join(store, rank, size, timeout)
        self._peers = Peers(store, self.context, timeout)

    # -------------------------------------------------------------- about the group

    # Asked by torch; a property that is not overridden would ask itself.
    supports_coalescing = supports_splitting = supports_shrinking = supports_window = False
    supports_tensor_alloc = supports_reconfigure = supports_abort_hooks = False
    supports_completion_hooks = _supports_time_estimate = False

    def getBackendName(self) -> str:
        return "gradd"

    _get_backend_name = getBackendName

    def name(self) -> str:
        return "gradd"

    def getGroupName(self) -> str:
        return self._name

    group_name = property(getGroupName)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _set_sequence_number_for_group(self) -> None:
        pass  # every rank begins at 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def shutdown(self) -> None:
        """Leave the job. Idempotent; also when the group is destroyed or the program ends."""
        self._peers.shutdown()
        self.context.shutdown()

    abort = shutdown

    def __del__(self) -> None:
        if hasattr(self, "_peers"):
            self.shutdown()

    # -------------------------------------------------------------- submitting

    def _submit(self, ops: Sequence[Op], outputs: list[Any], *,
                finish: Callable[[], None] | None = None, keep: Any = None) -> Work:
        """One handle for all ops, under the name of this call. Raises what refuses them."""
        with self._lock:
            name = f"collective {self._sequence}"
            for i, op in enumerate(ops):
                op.name = (name if len(ops) == 1 else f"{name}.{i}").encode()
            on_device = _first_device(keep)
            if on_device is not None:
                stream = _device.stream_of(on_device)
                for op in ops:
                    op.stream = stream or None
            handle = self.context.submit(ops)
            self._sequence += 1
            work = Work(name, outputs, self._timeout_s, finish, keep, on_device=on_device)
            work.start(self.context, handle)
            self._keep(work)
        return work

    def _ended(self, outputs: list[Any]) -> Work:
        """For a call without work to do."""
        work = Work("nothing", outputs, self._timeout_s, is_watched=True)
        work.end(None)
        with self._lock:
            self._keep(work)
        return work

    def _keep(self, work: Work) -> None:
        kept = self._kept
        while kept and kept[0].is_taken and kept[0].has_ended:
            kept.popleft()
        kept.append(work)
        if len(kept) > _WATCHED_BEYOND:
            kept[-_WATCHED_BEYOND].watch()  # nobody may ever wait for it
        if len(kept) > _KEPT_MAX and kept[0].has_ended:
            kept.popleft()

    # -------------------------------------------------------------- reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        tensor = _one(tensors, "all_reduce")
        return self._allreduce([tensor], operator_name(opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self._allreduce(_listed(tensors), operator_name(opts))

    def _allreduce(self, tensors: list[torch.Tensor], name: str) -> Work:
        if name in _BITWISE and any(tensor.dtype != torch.bool for tensor in tensors):
            return self._fold(tensors, _BITWISE[name])
        operands = [_Reduced(tensor, name) for tensor in tensors]
        ops = [make_op(Kind.ALLREDUCE, "", dtype=x.dtype, redop=x.redop,
                       input=t.address(x.flat.flat), output=t.address(x.flat.flat),
                       count=x.flat.flat.numel()) for x in operands]

        def finish() -> None:
            for operand in operands:
                operand.flat.bring_back()

        return self._submit(ops, tensors, finish=finish, keep=operands)

    def _fold(self, tensors: list[torch.Tensor], function: Callable[..., torch.Tensor]) -> Work:
        """A reduction that gradd lacks: everybody gathers, and computes the same."""
        if len(tensors) != 1:
            raise Unsupported("bitwise reductions take one tensor at a time")
        tensor = tensors[0]
        gathered = [torch.empty_like(tensor) for _ in range(self._size)]

        def finish() -> None:
            for other in gathered[1:]:
                function(gathered[0], other, out=gathered[0])
            tensor.copy_(gathered[0])

        return self._allgather(gathered, tensor, [tensor], finish)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> Work:
        tensor = _one(tensors, "reduce")
        root = _root(opts)
        operand = _Reduced(tensor, operator_name(op if isinstance(opts, int) else opts))
        flat = operand.flat.flat
        result = torch.empty_like(flat) if self._rank == root else None

        def finish() -> None:
            if result is not None:
                flat.copy_(result)
                operand.flat.bring_back()

        counts = [flat.numel() if r == root else 0 for r in range(self._size)]
        request = make_op(Kind.REDUCE_SCATTER, "", dtype=operand.dtype, redop=operand.redop,
                          input=t.address(flat), count=flat.numel(), counts=counts,
                          output=0 if result is None else t.address(result))
        return self._submit([request], [tensor], finish=finish, keep=(operand, result))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        output = _one(outputs, "reduce_scatter")
        parts = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
        if len(parts) != self._size:
            raise InvalidRequest(f"reduce_scatter: {len(parts)} inputs, the group has "
                                 f"{self._size} ranks")
        t.same_type([output, *parts], "reduce_scatter")
        whole = t.joined(parts)
        return self._reduce_scatter(output, whole, [part.numel() for part in parts],
                                    operator_name(opts))

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor,
                             opts: Any = None) -> Work:
        t.same_type([output, input], "reduce_scatter_tensor")
        if input.numel() != output.numel() * self._size:
            raise InvalidRequest(f"reduce_scatter_tensor: {input.numel()} elements, "
                                 f"{self._size} ranks want {output.numel()} each")
        return self._reduce_scatter(output, input, [output.numel()] * self._size,
                                    operator_name(opts))

    reduce_scatter_tensor = reduce_scatter_single = _reduce_scatter_base

    def _reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor, counts: list[int],
                        name: str) -> Work:
        if output.numel() != counts[self._rank]:
            raise InvalidRequest(f"reduce_scatter: the output has {output.numel()} elements, this "
                                 f"rank's input {counts[self._rank]}")
        operand = _Reduced(whole, name)
        destination = t.Flat(output, is_read=False, as_type=operand.flat.flat.dtype)
        if output.is_complex():
            destination = t.Flat(torch.view_as_real(output), is_read=False)
            counts = [2 * count for count in counts]
        source = t.apart(operand.flat.flat, destination.flat)
        request = make_op(Kind.REDUCE_SCATTER, "", dtype=operand.dtype, redop=operand.redop,
                          input=t.address(source), output=t.address(destination.flat),
                          count=source.numel(), counts=counts)
        return self._submit([request], [output], finish=destination.bring_back,
                            keep=(source, destination))

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        works = [self._reduce_scatter_base(output, input, opts)
                 for output, input in zip(outputs, inputs)]
        return self._all_of(works, list(outputs))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # -------------------------------------------------------------- data that only moves

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        tensor = _one(tensors, "broadcast")
        host = t.Flat(tensor, is_read=self._rank == _root(opts))
        dtype, factor = t.as_elements(host.flat)
        where = t.address(host.flat)
        request = make_op(Kind.BROADCAST, "", dtype=dtype, root=_root(opts), input=where,
                          output=where, count=host.flat.numel() * factor)
        return self._submit([request], [tensor], finish=host.bring_back, keep=host)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        lists = outputs if isinstance(outputs[0], (list, tuple)) else [outputs]
        if len(lists) != 1:
            raise InvalidRequest("all_gather: a rank of gradd has one device")
        return self._allgather(list(lists[0]), _one(inputs, "all_gather"), list(lists))

    def _allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, result: list[Any],
                   then: Callable[[], None] | None = None) -> Work:
        if len(outputs) != self._size:
            raise InvalidRequest(f"all_gather: {len(outputs)} outputs, the group has "
                                 f"{self._size} ranks")
        t.same_type([tensor, *outputs], "all_gather")
        for r, output in enumerate(outputs):
            if output.numel() != tensor.numel():
                raise InvalidRequest(f"all_gather: the output of rank {r} has {output.numel()} "
                                     f"elements, the input {tensor.numel()}")
        gathered = torch.empty(self._size * tensor.numel(), dtype=tensor.dtype,
                               device=t.place(tensor))

        def finish() -> None:
            for output, part in zip(outputs, gathered.chunk(self._size)):
                output.detach().copy_(part.view(output.shape))
            if then is not None:
                then()

        return self._gather_flat(gathered, tensor, result, finish)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        t.same_type([output, input], "all_gather_into_tensor")
        if output.numel() != input.numel() * self._size:
            raise InvalidRequest(f"all_gather_into_tensor: the output has {output.numel()} "
                                 f"elements, {self._size} ranks give {input.numel()} each")
        host = t.Flat(output, is_read=False)
        return self._gather_flat(host.flat, input, [output], host.bring_back)

    all_gather_into_tensor = all_gather_single = _allgather_base

    def _gather_flat(self, gathered: torch.Tensor, tensor: torch.Tensor, result: list[Any],
                     finish: Callable[[], None]) -> Work:
        # Ranks whose inputs differ in size are found out: the sum fits into no smaller output.
        source = t.apart(t.Flat(tensor).flat, gathered)
        dtype, factor = t.as_elements(source)
        request = make_op(Kind.ALLGATHER, "", dtype=dtype, input=t.address(source),
                          output=t.address(gathered), count=source.numel() * factor,
                          out_capacity=gathered.numel() * factor)
        return self._submit([request], result, finish=finish, keep=(source, gathered))

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        works = [self._allgather(list(outputs), tensor, [outputs])
                 for outputs, tensor in zip(zip(*output_lists), inputs)]
        return self._all_of(works, list(output_lists))

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        works = [self._allgather_base(output, input) for output, input in zip(outputs, inputs)]
        return self._all_of(works, list(outputs))

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor,
                      output_split_sizes: Sequence[int], input_split_sizes: Sequence[int],
                      opts: Any = None) -> Work:
        t.same_type([output, input], "all_to_all_single")
        sends = self._elements(input, input_split_sizes, "input")
        self._elements(output, output_split_sizes, "output")
        destination = t.Flat(output, is_read=False)
        return self._alltoall(t.Flat(input).flat, sends, destination.flat, [output],
                              destination.bring_back)

    all_to_all_single = alltoall_base

    def _elements(self, tensor: torch.Tensor, splits: Sequence[int], what: str) -> list[int]:
        """Elements for each rank, of splits in rows (none: even)."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise InvalidRequest(f"all_to_all_single: {rows} rows of the {what} do not divide "
                                     f"among {self._size} ranks")
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise InvalidRequest(f"all_to_all_single: splits {list(splits)} of the {what} do not "
                                 f"divide {rows} rows among {self._size} ranks")
        row = math.prod(tensor.shape[1:])
        return [split * row for split in splits]

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        outputs, inputs = list(outputs), list(inputs)
        for what, listed in (("outputs", outputs), ("inputs", inputs)):
            if len(listed) != self._size:
                raise InvalidRequest(f"all_to_all: {len(listed)} {what}, the group has "
                                     f"{self._size} ranks")
        t.same_type([*outputs, *inputs], "all_to_all")
        source = t.joined(inputs)
        return self._alltoall_lists(source, [x.numel() for x in inputs], outputs)

    def _alltoall_lists(self, source: torch.Tensor, sends: list[int],
                        outputs: list[torch.Tensor]) -> Work:
        sizes = [output.numel() for output in outputs]
        received = torch.empty(sum(sizes), dtype=source.dtype, device=source.device)

        def finish() -> None:
            for output, part in zip(outputs, received.split(sizes)):
                output.detach().copy_(part.view(output.shape))

        return self._alltoall(source, sends, received, outputs, finish)

    def _alltoall(self, source: torch.Tensor, sends: list[int], received: torch.Tensor,
                  result: list[Any], finish: Callable[[], None]) -> Work:
        source = t.apart(source, received)
        dtype, factor = t.as_elements(source)
        request = make_op(Kind.ALLTOALL, "", dtype=dtype, input=t.address(source),
                          output=t.address(received), count=source.numel() * factor,
                          out_capacity=received.numel() * factor,
                          counts=[count * factor for count in sends])
        return self._submit([request], result, finish=finish, keep=(source, received))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        root = _root(opts)
        tensor = _one(inputs, "gather")
        source = t.Flat(tensor).flat
        received: list[torch.Tensor] = []
        if self._rank == root:
            received = list(outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs)
            if len(received) != self._size:
                raise InvalidRequest(f"gather: {len(received)} outputs, the group has "
                                     f"{self._size} ranks")
            t.same_type([tensor, *received], "gather")
        sends = [source.numel() if r == root else 0 for r in range(self._size)]
        return self._alltoall_lists(source, sends, received)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        root = _root(opts)
        output = _one(outputs, "scatter")
        source, sends = torch.empty(0, dtype=output.dtype, device=t.place(output)), [0] * self._size
        if self._rank == root:
            parts = list(inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs)
            if len(parts) != self._size:
                raise InvalidRequest(f"scatter: {len(parts)} inputs, the group has {self._size} "
                                     "ranks")
            t.same_type([output, *parts], "scatter")
            source = t.joined(parts)
            sends = [part.numel() for part in parts]
        return self._alltoall_lists(source, sends, [output])

    def barrier(self, opts: Any = None) -> Work:
        return self._submit([make_op(Kind.BARRIER, "", dtype=DType.U8)], [])

    def monitored_barrier(self, timeout: timedelta | None = None,
                          wait_all_ranks: bool = False) -> None:
        self.barrier().wait(timeout or timedelta(0))

    def _all_of(self, works: list[Work], outputs: list[Any]) -> Work:
        """Waits for all; for forms that gradd has no single op for."""
        for work in works:
            work.wait()
        return self._ended(outputs)

    # -------------------------------------------------------------- messages

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        tensor = _one(tensors, "send")
        work = self._peers.send(tensor, dst, tag)
        with self._lock:
            self._keep(work)
        return work

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        tensor = _one(tensors, "recv")
        work = self._peers.receive(tensor, src, tag)
        with self._lock:
            self._keep(work)
        return work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        raise Unsupported("the gradd backend cannot receive from any source: name the source")
