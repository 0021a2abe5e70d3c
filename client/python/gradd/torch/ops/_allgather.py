# SPDX-License-Identifier: Apache-2.0
"""All-gather, of one tensor and of lists: shapes first, since only they tell the result's size."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Sequence

import torch

from gradd import _device
from gradd._device import reachable, stream_of
from gradd._library import Op
from gradd.context import make_op
from gradd.torch.basics import Average, ProcessSet, global_process_set, rank, set_ranks
from gradd.torch.engine import (
    Pending, check_tensor, engine, set_id, shape_row, synchronize, wire_type,
)
from gradd.torch.ops._allreduce import grouped_allreduce
from gradd.torch.ops._shapes import split_rows, sum_rows
from gradd.torch.ops._submission import check_list, check_one_device, submit_two_steps
from gradd.types import Kind


def gather_list(tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet,
                is_grouped: bool,
                convert: Callable[[list[torch.Tensor]], Any] | None = None) -> int:
    """All-gather of a list in two steps. `convert` makes the final result of the outputs."""
    group = set_id(process_set)
    ranks = set_ranks(group)
    for tensor in tensors:
        check_tensor(tensor, is_reduced=False)
        if tensor.dim() == 0:
            raise ValueError("a scalar cannot be gathered along its first dimension: give it one "
                             "(view(1))")
    check_one_device(tensors)
    state = engine()
    base = state.name(name, process_set)
    sources = [reachable(tensor) for tensor in tensors]
    stream = _device.current(sources[0])  # the second step is submitted by another thread
    row = list(itertools.chain.from_iterable(shape_row(source) for source in sources))
    targets: list[torch.Tensor] = []

    def second_step(table: list[list[int]]) -> list[Op]:
        rows = [split_rows(entry) for entry in table]
        ops = []
        for i, source in enumerate(sources):
            n_rows = sum_rows(base, ranks, rows, i)
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
    return submit_two_steps(pending, row, len(ranks), second_step)


def allgather_async(tensor: torch.Tensor, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> int:
    """Concatenate along dimension 0, which may differ between ranks; a handle."""
    return gather_list([tensor], name, process_set, False)


def grouped_allgather_async(tensors: Sequence[torch.Tensor], name: str | None = None,
                            process_set: ProcessSet = global_process_set) -> int:
    """all-gather of a list of tensors as one op; a handle."""
    check_list(tensors)
    return gather_list(tensors, name, process_set, True)


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
    check_list(tensors)
    return list(_GroupedAllgather.apply(name, process_set, *tensors))
