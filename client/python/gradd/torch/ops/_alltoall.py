# SPDX-License-Identifier: Apache-2.0
"""All-to-all: rows for every rank; shapes first, since only they tell what will be received."""

from __future__ import annotations

from typing import Any

import torch

from gradd import _device
from gradd._device import reachable, stream_of
from gradd._library import Op
from gradd.context import make_op
from gradd.torch.basics import ProcessSet, global_process_set, rank, set_ranks
from gradd.torch.engine import (
    Pending, check_tensor, engine, set_id, shape_row, synchronize, wire_type,
)
from gradd.torch.ops._shapes import sum_rows
from gradd.torch.ops._submission import submit_two_steps
from gradd.types import Kind


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
        sum_rows(base, ranks, shapes, 0)
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
    return submit_two_steps(pending, row, len(ranks), second_step)


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
