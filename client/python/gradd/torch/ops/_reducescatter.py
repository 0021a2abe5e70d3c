# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter along the first dimension, of one tensor and of lists."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from gradd._device import reachable, stream_of
from gradd.context import even_parts, make_op
from gradd.torch.basics import Average, ProcessSet, Sum, global_process_set, rank, set_ranks
from gradd.torch.compression import Compression
from gradd.torch.engine import Pending, check_tensor, engine, set_id, synchronize, wire_type
from gradd.torch.ops._allgather import allgather, grouped_allgather
from gradd.torch.ops._allreduce import REDOPS
from gradd.torch.ops._submission import (
    check_list, check_one_device, in_stream, submit, wire_name, without_zero_factors,
)
from gradd.types import Kind


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
    check_one_device(tensors)
    tensors, prescale, postscale = without_zero_factors(tensors, prescale, postscale)
    state = engine()
    base = state.name(name, process_set)
    me = ranks.index(rank())
    sources = [reachable(tensor) for tensor in tensors]
    on_wire = wire_name(state, base, group, name, sources)
    targets, ops = [], []
    for i, source in enumerate(sources):
        rows = even_parts(source.shape[0], len(ranks))
        row_elements = source[0].numel() if source.shape[0] else 0
        target = source.new_empty((rows[me], *source.shape[1:]))
        targets.append(target)
        ops.append(make_op(
            Kind.REDUCE_SCATTER, f"{on_wire}.{i}" if is_grouped else on_wire,
            dtype=wire_type(source)[0], redop=REDOPS[op], set=group, input=source.data_ptr(),
            output=target.data_ptr(), count=source.numel(),
            counts=[n * row_elements for n in rows], prescale=prescale, postscale=postscale,
            dims=source.shape, stream=stream_of(source)))
    pending = Pending(state, base, group, "REDUCESCATTER", None, (tensors, sources, targets))
    in_stream(pending, sources, on_wire)

    def finish() -> None:
        outputs = [target.to(tensor.device) for target, tensor in zip(targets, tensors)]
        pending.output = outputs if is_grouped else outputs[0]

    pending.finish = finish
    return submit(pending, ops)


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
    check_list(tensors)
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
    check_list(tensors)
    compressed, contexts = zip(*[compression.compress(tensor) for tensor in tensors])
    reduced = _GroupedReducescatter.apply(name, op, process_set, prescale_factor,
                                          postscale_factor, *compressed)
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts)]
