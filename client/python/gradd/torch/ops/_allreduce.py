# SPDX-License-Identifier: Apache-2.0
"""All-reduce, of one tensor and of lists, in place and not; Adasum, which gathers instead."""

from __future__ import annotations

import warnings
from typing import Any, Sequence

import torch

import gradd
from gradd._device import is_reachable, reachable, stream_of
from gradd.context import make_op
from gradd.torch import adasum, shared_memory
from gradd.torch.basics import (
    Adasum, Average, Max, Min, ProcessSet, Product, Sum, global_process_set,
)
from gradd.torch.compression import Compression
from gradd.torch.engine import (
    Pending, check_mode, check_tensor, engine, set_id, synchronize, wire_type,
)
from gradd.torch.ops._submission import (
    check_list, check_one_device, in_stream, submit, wire_name, without_zero_factors,
)
from gradd.types import Kind, ReduceOp

REDOPS = {
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
    if op != Adasum and op not in REDOPS:
        raise ValueError(f"op {op!r} is none of Average, Sum, Adasum, Min, Max, Product")
    return op


def _allreduce_list(tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor],
                    name: str | None, op: int, prescale: float, postscale: float,
                    process_set: ProcessSet, is_grouped: bool) -> int:
    group = set_id(process_set)
    for tensor in tensors:
        check_tensor(tensor, is_reduced=True)
    check_one_device(tensors)
    state = engine()
    base = state.name(name, process_set)
    result: Any = list(outputs) if is_grouped else outputs[0]
    if op == Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        return _adasum(base, tensors, outputs, prescale, postscale, result)
    tensors, prescale, postscale = without_zero_factors(tensors, prescale, postscale)
    sources = [reachable(tensor) for tensor in tensors]
    targets = [output.detach() if is_reachable(output) else source
               for output, source in zip(outputs, sources)]
    on_wire, stream = wire_name(state, base, group, name, sources), stream_of(sources[0])
    ops = [
        make_op(Kind.ALLREDUCE, f"{on_wire}.{i}" if is_grouped else on_wire,
                dtype=wire_type(source)[0], redop=REDOPS[op], set=group, input=source.data_ptr(),
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
    return submit(in_stream(pending, sources, on_wire), ops)


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

    return submit(Pending(state, name, 0, "ALLREDUCE", result, (sources, gathered), finish), ops)


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


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], average: bool | None = None,
                            name: str | None = None, op: int | None = None,
                            prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> int:
    """Reduce a list of tensors as one op into new tensors; a handle."""
    op = choose_op(op, average)
    check_list(tensors)
    outputs = [shared_memory.empty_like(tensor) for tensor in tensors]
    return _allreduce_list(tensors, outputs, name, op, prescale_factor, postscale_factor,
                           process_set, True)


def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], average: bool | None = None,
                             name: str | None = None, op: int | None = None,
                             prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> int:
    """Reduce a list of tensors as one op in place; a handle."""
    op = choose_op(op, average)
    check_list(tensors)
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
    check_list(tensors)
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
