# SPDX-License-Identifier: Apache-2.0
"""Horovod's collectives on tensors.

Common to all: an op is matched across ranks by `name` (None: counted, so that ranks which make
the same calls meet); it starts when every rank of `process_set` has submitted it. Tensors must be
contiguous. Misuse that this rank can see is a ValueError; what ends an op after its submission is
a HorovodInternalError (RanksDisagree, RankLost, Timeout, ... say which), and after RanksDisagree
the job goes on.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any, Callable, Sequence

import torch

import gradd
from gradd import _device
from gradd._device import is_device, is_reachable, reachable, stream_of
from gradd._library import Op
from gradd.context import make_op
from gradd.errors import GraddError, HorovodInternalError, RanksDisagree
from gradd.torch import adasum, shared_memory
from gradd.torch.basics import (
    Adasum, Average, Max, Min, ProcessSet, Product, Sum, global_process_set, rank, set_ranks,
)
from gradd.torch.compression import Compression
from gradd.torch.engine import (
    Engine, Pending, check_mode, check_tensor, describe_row, engine, poll, register, set_id,
    shape_row, synchronize, wire_type,
)
from gradd.types import Kind, ReduceOp

_REDOPS = {
    Average: ReduceOp.AVG, Sum: ReduceOp.SUM, Min: ReduceOp.MIN, Max: ReduceOp.MAX,
    Product: ReduceOp.PROD,
}


def choose_op(op: int | None, average: bool | None) -> int:
    """`op`, or what the older `average` argument means; Average by default."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn("Parameter `average` has been replaced with `op` and will be removed in v1.0",
                      DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    op = Average if op is None else op
    if op != Adasum and op not in _REDOPS:
        raise ValueError(f"op {op!r} is none of Average, Sum, Adasum, Min, Max, Product")
    return op


def _submit(pending: Pending, ops: Sequence[Op]) -> int:
    """Submit, and give a handle. What ends the job is a HorovodInternalError here, too."""
    try:
        pending.engine.submit(pending, ops)
    except (HorovodInternalError, ValueError):
        raise
    except GraddError as error:
        raise HorovodInternalError(str(error), error.status) from error
    return register(pending)


# ------------------------------------------------------------------ allreduce


def _allreduce_list(tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor],
                    name: str | None, op: int, prescale: float, postscale: float,
                    process_set: ProcessSet, is_grouped: bool) -> int:
    group = set_id(process_set)
    for tensor in tensors:
        check_tensor(tensor, is_reduced=True)
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError("the tensors of a group must be on one device")
    state = engine()
    base = state.name(name, process_set)
    result: Any = list(outputs) if is_grouped else outputs[0]
    if op == Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        return _adasum(base, tensors, outputs, prescale, postscale, result)
    if prescale == 0 or postscale == 0:  # the library reads 0 as 1
        tensors = [torch.zeros_like(tensor) for tensor in tensors]
        prescale = postscale = 1.0
    sources = [reachable(tensor) for tensor in tensors]
    targets = [output.detach() if is_reachable(output) else source
               for output, source in zip(outputs, sources)]
    on_wire, stream = _on_wire(state, base, group, name, sources), stream_of(sources[0])
    ops = [
        make_op(Kind.ALLREDUCE, f"{on_wire}.{i}" if is_grouped else on_wire,
                dtype=wire_type(source)[0], redop=_REDOPS[op], set=group, input=source.data_ptr(),
                output=target.data_ptr(), count=source.numel(), prescale=prescale,
                postscale=postscale, dims=source.shape, check_finite=check_mode() is not None,
                stream=stream)
        for i, (source, target) in enumerate(zip(sources, targets))
    ]

    def finish() -> None:
        for output, target in zip(outputs, targets):
            if not is_reachable(output):
                output.detach().copy_(target)

    pending = Pending(state, base, group, "ALLREDUCE", result, (tensors, sources, targets), finish)
    return _submit(_in_stream(pending, sources, on_wire), ops)


def _on_wire(state: Engine, base: str, group: int, name: str | None,
             sources: Sequence[torch.Tensor]) -> str:
    """The name of an op of one step, whose end is awaited by a stream where it has CUDA tensors."""
    return state.device_name(base, group, bool(name)) if is_device(sources[0]) else base


def _in_stream(pending: Pending, sources: Sequence[torch.Tensor], on_wire: str) -> Pending:
    pending.wire_name = on_wire
    pending.on_device = sources[0] if is_device(sources[0]) else None
    return pending


def _adasum(name: str, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor],
            prescale: float, postscale: float, result: Any) -> int:
    """Every rank gathers all contributions and combines them in the same order."""
    adasum.check_size(gradd.size())
    state = engine()
    n_ranks = gradd.size()
    sources = [reachable(tensor) for tensor in tensors]
    if prescale != 1:
        sources = [source * prescale for source in sources]
    gathered = [source.new_empty((n_ranks, source.numel())) for source in sources]
    n = len(sources)
    ops = [
        make_op(Kind.ALLGATHER, name if n == 1 else f"{name}.{i}", dtype=wire_type(source)[0],
                input=source.data_ptr(), output=all_.data_ptr(), count=source.numel(),
                out_capacity=all_.numel(), dims=source.shape, stream=stream_of(source))
        for i, (source, all_) in enumerate(zip(sources, gathered))
    ]

    def finish() -> None:
        for output, all_ in zip(outputs, gathered):
            combined = adasum.combine(list(all_)).view(output.shape)
            output.detach().copy_(combined * postscale if postscale != 1 else combined)

    return _submit(Pending(state, name, 0, "ALLREDUCE", result, (sources, gathered), finish), ops)


def allreduce_async(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
                    op: int | None = None, prescale_factor: float = 1.0,
                    postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> int:
    """Reduce into a new tensor of the same shape; a handle for poll() and synchronize()."""
    op = choose_op(op, average)
    return _allreduce_list([tensor], [shared_memory.empty_like(tensor)], name, op,
                           prescale_factor, postscale_factor, process_set, False)


def allreduce_async_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
                     op: int | None = None, prescale_factor: float = 1.0,
                     postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set) -> int:
    """Reduce in place; a handle."""
    op = choose_op(op, average)
    return _allreduce_list([tensor], [tensor], name, op, prescale_factor, postscale_factor,
                           process_set, False)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, op: int, prescale: float,
                postscale: float, process_set: ProcessSet) -> torch.Tensor:
        ctx.options = (op, prescale, postscale, process_set)
        return synchronize(allreduce_async(tensor, None, name, op, prescale, postscale,
                                           process_set))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        op, prescale, postscale, process_set = ctx.options
        grad = allreduce(grad_output.contiguous(), op=op, prescale_factor=prescale,
                         postscale_factor=postscale, process_set=process_set)
        return grad, None, None, None, None, None


def allreduce(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
              compression: Any = Compression.none, op: int | None = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0,
              process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Reduce over all ranks; a new tensor of the same shape and type. Differentiable.

    Average divides by the number of ranks of the set; integers are truncated toward zero.
    """
    op = choose_op(op, average)
    compressed, ctx = compression.compress(tensor)
    reduced = _Allreduce.apply(compressed, name, op, prescale_factor, postscale_factor,
                               process_set)
    return compression.decompress(reduced, ctx)


def allreduce_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
               op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Reduce in place; returns the tensor."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor,
                                        postscale_factor, process_set))


# ------------------------------------------------------------------ grouped allreduce


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], average: bool | None = None,
                            name: str | None = None, op: int | None = None,
                            prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> int:
    """Reduce a list of tensors as one op into new tensors; a handle."""
    op = choose_op(op, average)
    _check_list(tensors)
    outputs = [shared_memory.empty_like(tensor) for tensor in tensors]
    return _allreduce_list(tensors, outputs, name, op, prescale_factor, postscale_factor,
                           process_set, True)


def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], average: bool | None = None,
                             name: str | None = None, op: int | None = None,
                             prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> int:
    """Reduce a list of tensors as one op in place; a handle."""
    op = choose_op(op, average)
    _check_list(tensors)
    return _allreduce_list(tensors, tensors, name, op, prescale_factor, postscale_factor,
                           process_set, True)


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, op: int, prescale: float, postscale: float,
                process_set: ProcessSet, *tensors: torch.Tensor) -> tuple:
        ctx.options = (op, prescale, postscale, process_set)
        return tuple(synchronize(grouped_allreduce_async(
            tensors, None, name, op, prescale, postscale, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        op, prescale, postscale, process_set = ctx.options
        reduced = grouped_allreduce(
            [grad.contiguous() for grad in grads], op=op, prescale_factor=prescale,
            postscale_factor=postscale, process_set=process_set)
        return (None, None, None, None, None, *reduced)


def grouped_allreduce(tensors: Sequence[torch.Tensor], average: bool | None = None,
                      name: str | None = None, compression: Any = Compression.none,
                      op: int | None = None, prescale_factor: float = 1.0,
                      postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Reduce a list of tensors as one op; new tensors. Differentiable."""
    op = choose_op(op, average)
    _check_list(tensors)
    compressed, contexts = zip(*[compression.compress(tensor) for tensor in tensors])
    reduced = _GroupedAllreduce.apply(name, op, prescale_factor, postscale_factor, process_set,
                                      *compressed)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts)]


def grouped_allreduce_(tensors: Sequence[torch.Tensor], average: bool | None = None,
                       name: str | None = None, op: int | None = None,
                       prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Reduce a list of tensors as one op in place; returns them."""
    return synchronize(grouped_allreduce_async_(tensors, average, name, op, prescale_factor,
                                                postscale_factor, process_set))


def _check_list(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise ValueError("a group has at least one tensor")


# ------------------------------------------------------------------ allgather


def _allgather_list(tensors: Sequence[torch.Tensor], name: str | None,
                    process_set: ProcessSet, is_grouped: bool,
                    convert: Callable[[list[torch.Tensor]], Any] | None = None) -> int:
    """All-gather of a list in two steps. `convert` makes the final result of the outputs."""
    group = set_id(process_set)
    ranks = set_ranks(group)
    for tensor in tensors:
        check_tensor(tensor, is_reduced=False)
        if tensor.dim() == 0:
            raise ValueError("a scalar cannot be gathered along its first dimension: give it one "
                             "(view(1))")
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError("the tensors of a group must be on one device")
    state = engine()
    base = state.name(name, process_set)
    sources = [reachable(tensor) for tensor in tensors]
    stream = _device.current(sources[0])  # the second step is submitted by another thread
    row = list(itertools.chain.from_iterable(shape_row(source) for source in sources))
    targets: list[torch.Tensor] = []

    def second_step(table: list[list[int]]) -> list[Op]:
        rows = [_split_row(entry) for entry in table]
        ops = []
        for i, source in enumerate(sources):
            n_rows = _sum_rows(base, ranks, rows, i)
            with _device.on(stream):
                target = source.new_empty((n_rows, *source.shape[1:]))
                handle = stream_of(source)
            targets.append(target)
            dtype, factor = wire_type(source)
            ops.append(make_op(
                Kind.ALLGATHER, f"{base}.{i}" if is_grouped else base, dtype=dtype, set=group,
                input=source.data_ptr(), output=target.data_ptr(), count=source.numel() * factor,
                out_capacity=target.numel() * factor, stream=handle))
        return ops

    pending = Pending(state, base, group, "ALLGATHER", None, (tensors, sources, targets))

    def finish() -> None:
        outputs = [target.to(tensor.device) for target, tensor in zip(targets, tensors)]
        pending.output = outputs if is_grouped else outputs[0]
        if convert is not None:
            pending.output = convert(outputs)

    pending.finish = finish
    return _submit_two_steps(pending, row, len(ranks), second_step)


def _submit_two_steps(pending: Pending, row: list[int], n_ranks: int,
                      second_step: Callable[[list[list[int]]], list[Op]]) -> int:
    try:
        pending.engine.submit_two_steps(pending, row, n_ranks, second_step)
    except (HorovodInternalError, ValueError):
        raise
    except GraddError as error:
        raise HorovodInternalError(str(error), error.status) from error
    return register(pending)


def _split_row(row: list[int]) -> list[list[int]]:
    """Cut shape_row()s that were laid end to end."""
    parts = []
    while len(row) >= 2:
        parts.append(row[:2 + row[1]])
        row = row[2 + row[1]:]
    return parts


def _sum_rows(name: str, ranks: list[int], rows: list[list[list[int]]], index: int) -> int:
    """Rows of the gathered tensor. RanksDisagree unless all but the first dimension agree."""
    first = rows[0][index] if index < len(rows[0]) else []
    total = 0
    for rank_, parts in zip(ranks, rows):
        mine = parts[index] if index < len(parts) else []
        if len(parts) != len(rows[0]):
            raise RanksDisagree(f"\"{name}\": rank {rank_} submitted {len(parts)} tensors, rank "
                                f"{ranks[0]} submitted {len(rows[0])}: all-gather needs the same "
                                "number", -2)
        if mine[:2] != first[:2] or mine[3:] != first[3:]:
            raise RanksDisagree(
                f"\"{name}\": rank {rank_} submitted {describe_row(mine)}, rank {ranks[0]} "
                f"submitted {describe_row(first)}: only the first dimension may differ", -2)
        total += mine[2]
    return total


def allgather_async(tensor: torch.Tensor, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> int:
    """Concatenate along dimension 0, which may differ between ranks; a handle."""
    return _allgather_list([tensor], name, process_set, False)


def grouped_allgather_async(tensors: Sequence[torch.Tensor], name: str | None = None,
                            process_set: ProcessSet = global_process_set) -> int:
    """all-gather of a list of tensors as one op; a handle."""
    _check_list(tensors)
    return _allgather_list(tensors, name, process_set, True)


def _own_slices(grads: Sequence[torch.Tensor], dims: Sequence[int],
                process_set: ProcessSet) -> list[torch.Tensor]:
    """Of averaged gradients, the rows that this rank had contributed."""
    reduced = grouped_allreduce([grad.contiguous() for grad in grads], op=Average,
                                process_set=process_set)
    all_dims = allgather(torch.tensor([list(dims)]), process_set=process_set)
    me = set_ranks(process_set.process_set_id or 0).index(rank())
    starts = all_dims[:me].sum(dim=0).tolist()
    return [grad.narrow(0, start, dim) for grad, start, dim in zip(reduced, starts, dims)]


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None,
                process_set: ProcessSet) -> torch.Tensor:
        ctx.dim = tensor.shape[0] if tensor.dim() else 0
        ctx.process_set = process_set
        return synchronize(allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        return _own_slices([grad_output], [ctx.dim], ctx.process_set)[0], None, None


def allgather(tensor: torch.Tensor, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Concatenate all ranks' tensors along dimension 0, which may differ. Differentiable.

    The gradient is averaged over the ranks, as Horovod has it.
    """
    return _Allgather.apply(tensor, name, process_set)


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet,
                *tensors: torch.Tensor) -> tuple:
        ctx.dims = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        ctx.process_set = process_set
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        return (None, None, *_own_slices(grads, ctx.dims, ctx.process_set))


def grouped_allgather(tensors: Sequence[torch.Tensor], name: str | None = None,
                      process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """allgather() of a list of tensors as one op. Differentiable."""
    _check_list(tensors)
    return list(_GroupedAllgather.apply(name, process_set, *tensors))


# ------------------------------------------------------------------ sparse


def sparse_allreduce_async(tensor: torch.Tensor, name: str | None, op: int | None = None,
                           process_set: ProcessSet = global_process_set,
                           ) -> Callable[[], torch.Tensor]:
    """Gather the entries of a sparse tensor; a function that waits and returns the sum.

    The result is sparse and not coalesced; Average divides the values by the number of ranks.
    """
    op = choose_op(op, None)
    if op not in (Average, Sum):
        raise ValueError("sparse tensors can be averaged and summed only")
    if not tensor.is_sparse:
        raise ValueError("sparse_allreduce_async() takes a sparse (COO) tensor")
    indices = tensor._indices().transpose(0, 1).contiguous()
    values = tensor._values().contiguous()
    n_ranks = len(set_ranks(set_id(process_set)))

    def convert(outputs: list[torch.Tensor]) -> torch.Tensor:
        all_indices, all_values = outputs
        if op == Average:
            all_values = all_values / n_ranks
        return torch.sparse_coo_tensor(all_indices.transpose(0, 1), all_values, tensor.shape,
                                       dtype=tensor.dtype, device=tensor.device)

    handle = _allgather_list([indices, values], name, process_set, True, convert)
    return lambda: synchronize(handle)


# ------------------------------------------------------------------ broadcast


def _broadcast(tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None,
               process_set: ProcessSet) -> int:
    group = set_id(process_set)
    check_tensor(tensor, is_reduced=False)
    if root_rank not in set_ranks(group):
        raise ValueError(f"root rank {root_rank} is not in process set {group}, which has ranks "
                         f"{set_ranks(group)}")
    state = engine()
    base = state.name(name, process_set)
    is_root = root_rank == rank()
    source = reachable(tensor)
    target = output.detach() if is_reachable(output) else source
    on_wire = _on_wire(state, base, group, name, [source])
    if is_root and target.data_ptr() != source.data_ptr():
        target.copy_(source)
    dtype, factor = wire_type(source)

    def finish() -> None:
        if not is_reachable(output):
            output.detach().copy_(target)

    pending = Pending(state, base, group, "BROADCAST", output, (source, target), finish)
    return _submit(_in_stream(pending, [source], on_wire), [make_op(
        Kind.BROADCAST, on_wire, dtype=dtype, root=root_rank, set=group, input=target.data_ptr(),
        output=target.data_ptr(), count=source.numel() * factor, dims=source.shape,
        stream=stream_of(source))])


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> int:
    """A new tensor with the values of (global) rank `root_rank`; a handle."""
    return _broadcast(tensor, torch.empty_like(tensor.detach()), root_rank, name, process_set)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> int:
    """Overwrite the tensor with that of (global) rank `root_rank`; a handle."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None,
                process_set: ProcessSet) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        grad = allreduce(grad_output.contiguous(), op=Average, process_set=ctx.process_set)
        if rank() != ctx.root_rank:
            grad = torch.zeros_like(grad)
        return grad, None, None, None


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """A new tensor with the values of (global) rank `root_rank`. Differentiable.

    The gradient is averaged over the ranks, and zero off root.
    """
    return _Broadcast.apply(tensor, root_rank, name, process_set)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Overwrite the tensor with that of (global) rank `root_rank`; returns it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


# ------------------------------------------------------------------ alltoall


def _check_splits(tensor: torch.Tensor, splits: Any, n_ranks: int) -> list[int]:
    """Rows for each rank. ValueError where they do not fit the tensor."""
    if tensor.dim() == 0:
        raise ValueError("a scalar cannot be split along its first dimension")
    if splits is None:
        if tensor.shape[0] % n_ranks:
            raise ValueError(f"the first dimension, {tensor.shape[0]}, cannot be divided evenly "
                             f"among {n_ranks} ranks: give splits")
        return [tensor.shape[0] // n_ranks] * n_ranks
    if isinstance(splits, torch.Tensor):
        if splits.dtype != torch.int32:
            raise ValueError(f"splits must be int32, not {splits.dtype}")
        if splits.dim() != 1:
            raise ValueError("splits must have one dimension")
        splits = splits.tolist()
    rows = [int(split) for split in splits]
    if len(rows) != n_ranks:
        raise ValueError(f"{len(rows)} splits for {n_ranks} ranks")
    if any(split < 0 for split in rows):
        raise ValueError(f"splits must not be negative: {rows}")
    if sum(rows) > tensor.shape[0]:
        raise ValueError(f"splits {rows} add up to {sum(rows)} rows, the tensor has "
                         f"{tensor.shape[0]}")
    return rows


def alltoall_async(tensor: torch.Tensor, splits: Any = None, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> int:
    """Send splits[r] rows to rank r; a handle whose result is (tensor, received splits).

    Args:
        splits: one int32 per rank (tensor or list); None divides dimension 0 evenly.
    """
    group = set_id(process_set)
    ranks = set_ranks(group)
    check_tensor(tensor, is_reduced=False)
    rows = _check_splits(tensor, splits, len(ranks))
    state = engine()
    base = state.name(name, process_set)
    source = reachable(tensor)
    stream = _device.current(source)  # the second step is submitted by another thread
    dtype, factor = wire_type(source)
    row_elements = factor
    for dim in source.shape[1:]:
        row_elements *= dim
    me = ranks.index(rank())
    row = [*shape_row(source), *rows]
    received: list[int] = []
    targets: list[torch.Tensor] = []

    def second_step(table: list[list[int]]) -> list[Op]:
        shapes = [[entry[:2 + entry[1]]] for entry in table]
        _sum_rows(base, ranks, shapes, 0)
        received.extend(entry[2 + entry[1] + me] for entry in table)
        with _device.on(stream):
            target = source.new_empty((sum(received), *source.shape[1:]))
            handle = stream_of(source)
        targets.append(target)
        return [make_op(
            Kind.ALLTOALL, base, dtype=dtype, set=group, input=source.data_ptr(),
            output=target.data_ptr(), count=sum(rows) * row_elements,
            out_capacity=target.numel() * factor, counts=[n * row_elements for n in rows],
            stream=handle)]

    pending = Pending(state, base, group, "ALLTOALL", None, (tensor, source, targets))

    def finish() -> None:
        device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")
        pending.output = (targets[0].to(tensor.device),
                          torch.tensor(received, dtype=torch.int32, device=device))

    pending.finish = finish
    return _submit_two_steps(pending, row, len(ranks), second_step)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None,
                process_set: ProcessSet) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set = received, process_set
        # Rows that were not sent anywhere have no gradient.
        ctx.n_rows = tensor.shape[0]
        if splits is None:
            return output
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> tuple:
        grad, _ = alltoall(grad_output.contiguous(), splits=ctx.received,
                           process_set=ctx.process_set)
        if grad.shape[0] < ctx.n_rows:
            rest = grad.new_zeros((ctx.n_rows - grad.shape[0], *grad.shape[1:]))
            grad = torch.cat([grad, rest])
        return grad, None, None, None


def alltoall(tensor: torch.Tensor, splits: Any = None, name: str | None = None,
             process_set: ProcessSet = global_process_set) -> Any:
    """Send rows to every rank, receive rows from every rank, in rank order. Differentiable.

    Returns the received rows; with `splits` also how many came from each rank (int32).
    """
    return _Alltoall.apply(tensor, splits, name, process_set)


# ------------------------------------------------------------------ reducescatter


def _reducescatter_list(tensors: Sequence[torch.Tensor], name: str | None, op: int,
                        process_set: ProcessSet, prescale: float, postscale: float,
                        is_grouped: bool) -> int:
    group = set_id(process_set)
    ranks = set_ranks(group)
    if op not in (Average, Sum):
        raise NotImplementedError("reducescatter can only average and sum")
    for tensor in tensors:
        check_tensor(tensor, is_reduced=True)
        if tensor.dim() == 0:
            raise ValueError("a scalar cannot be scattered along its first dimension")
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError("the tensors of a group must be on one device")
    if prescale == 0 or postscale == 0:  # the library reads 0 as 1
        tensors = [torch.zeros_like(tensor) for tensor in tensors]
        prescale = postscale = 1.0
    state = engine()
    base = state.name(name, process_set)
    me = ranks.index(rank())
    sources = [reachable(tensor) for tensor in tensors]
    on_wire = _on_wire(state, base, group, name, sources)
    targets, ops = [], []
    for i, source in enumerate(sources):
        quotient, rest = divmod(source.shape[0], len(ranks))
        rows = [quotient + (r < rest) for r in range(len(ranks))]
        row_elements = source[0].numel() if source.shape[0] else 0
        target = source.new_empty((rows[me], *source.shape[1:]))
        targets.append(target)
        ops.append(make_op(
            Kind.REDUCE_SCATTER, f"{on_wire}.{i}" if is_grouped else on_wire,
            dtype=wire_type(source)[0], redop=_REDOPS[op], set=group, input=source.data_ptr(), output=target.data_ptr(),
            count=source.numel(), counts=[n * row_elements for n in rows], prescale=prescale,
            postscale=postscale, dims=source.shape, stream=stream_of(source)))
    pending = Pending(state, base, group, "REDUCESCATTER", None, (tensors, sources, targets))
    _in_stream(pending, sources, on_wire)

    def finish() -> None:
        outputs = [target.to(tensor.device) for target, tensor in zip(targets, tensors)]
        pending.output = outputs if is_grouped else outputs[0]

    pending.finish = finish
    return _submit(pending, ops)


def reducescatter_async(tensor: torch.Tensor, name: str | None = None, op: int = Average,
                        process_set: ProcessSet = global_process_set,
                        prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> int:
    """Reduce, and keep this rank's share of dimension 0 (the lowest ranks get the remainder)."""
    return _reducescatter_list([tensor], name, op, process_set, prescale_factor,
                               postscale_factor, False)


def grouped_reducescatter_async(tensors: Sequence[torch.Tensor], name: str | None = None,
                                op: int = Average, process_set: ProcessSet = global_process_set,
                                prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> int:
    """reducescatter of a list of tensors as one op; a handle."""
    _check_list(tensors)
    return _reducescatter_list(tensors, name, op, process_set, prescale_factor, postscale_factor,
                               True)


def _gradient_factor(options: tuple) -> float:
    op, process_set, prescale, postscale = options
    n_ranks = process_set.size() if op == Sum else 1
    return n_ranks * prescale * postscale


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, op: int,
                process_set: ProcessSet, prescale: float, postscale: float) -> torch.Tensor:
        ctx.options = (op, process_set, prescale, postscale)
        return synchronize(reducescatter_async(tensor, name, op, process_set, prescale,
                                               postscale))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        grad = grad_output.contiguous() * _gradient_factor(ctx.options)
        return allgather(grad, process_set=ctx.options[1]), None, None, None, None, None


def reducescatter(tensor: torch.Tensor, name: str | None = None,
                  compression: Any = Compression.none, op: int = Average,
                  process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> torch.Tensor:
    """Reduce over all ranks; this rank's share of dimension 0. Differentiable."""
    compressed, ctx = compression.compress(tensor)
    reduced = _Reducescatter.apply(compressed, name, op, process_set, prescale_factor,
                                   postscale_factor)
    return compression.decompress(reduced, ctx)


class _GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, op: int, process_set: ProcessSet, prescale: float,
                postscale: float, *tensors: torch.Tensor) -> tuple:
        ctx.options = (op, process_set, prescale, postscale)
        return tuple(synchronize(grouped_reducescatter_async(
            tensors, name, op, process_set, prescale, postscale)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        factor = _gradient_factor(ctx.options)
        gathered = grouped_allgather([grad.contiguous() * factor for grad in grads],
                                     process_set=ctx.options[1])
        return (None, None, None, None, None, *gathered)


def grouped_reducescatter(tensors: Sequence[torch.Tensor], name: str | None = None,
                          compression: Any = Compression.none, op: int = Average,
                          process_set: ProcessSet = global_process_set,
                          prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0) -> list[torch.Tensor]:
    """reducescatter() of a list of tensors as one op. Differentiable."""
    _check_list(tensors)
    compressed, contexts = zip(*[compression.compress(tensor) for tensor in tensors])
    reduced = _GroupedReducescatter.apply(name, op, process_set, prescale_factor,
                                          postscale_factor, *compressed)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts)]


# ------------------------------------------------------------------ waiting for each other


def join(device: int = -1) -> int:
    """This rank is out of data: until all ranks have joined, others count it as zeros.

    All-reduces of the others go on (Average still divides by all ranks); other kinds fail.
    `device` is accepted for compatibility. Returns the last rank that joined, same on all ranks.
    """
    engine()
    try:
        return gradd.context().join()
    except HorovodInternalError:
        raise
    except GraddError as error:
        raise HorovodInternalError(str(error), error.status) from error


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it."""
    group = set_id(process_set)
    try:
        gradd.context().barrier(group)
    except HorovodInternalError:
        raise
    except GraddError as error:
        raise HorovodInternalError(str(error), error.status) from error


__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "join",
    "poll", "reducescatter", "reducescatter_async", "sparse_allreduce_async", "synchronize",
]
