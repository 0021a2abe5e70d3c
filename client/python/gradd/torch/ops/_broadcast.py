# SPDX-License-Identifier: Apache-2.0
"""Broadcast, in place and not."""

from __future__ import annotations

from typing import Any

import torch

from gradd._device import is_reachable, reachable, stream_of
from gradd.context import make_op
from gradd.torch.basics import Average, ProcessSet, global_process_set, rank, set_ranks
from gradd.torch.engine import Pending, check_tensor, engine, set_id, synchronize, wire_type
from gradd.torch.ops._allreduce import allreduce
from gradd.torch.ops._submission import in_stream, submit, wire_name
from gradd.types import Kind


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
    on_wire = wire_name(state, base, group, name, [source])
    if is_root and target.data_ptr() != source.data_ptr():
        target.copy_(source)
    dtype, factor = wire_type(source)

    def finish() -> None:
        if not is_reachable(output):
            output.detach().copy_(target)

    pending = Pending(state, base, group, "BROADCAST", output, (source, target), finish)
    return submit(in_stream(pending, [source], on_wire), [make_op(
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
