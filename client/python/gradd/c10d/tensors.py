# SPDX-License-Identifier: Apache-2.0
"""Tensors as gradd sees them: addresses of contiguous host or CUDA memory with an element type.

A tensor that is elsewhere, or strided, is represented by a contiguous copy; `bring_back` writes
the result to where it belongs once the op has ended.
"""

from __future__ import annotations

import torch

from gradd import _device
from gradd.errors import InvalidRequest, Unsupported
from gradd.types import DType

DTYPES = {
    torch.int8: DType.I8, torch.uint8: DType.U8, torch.int32: DType.I32, torch.int64: DType.I64,
    torch.float16: DType.F16, torch.bfloat16: DType.BF16, torch.float32: DType.F32,
    torch.float64: DType.F64,
}


class Flat:
    """A contiguous tensor that stands for `tensor`, and is it where possible: of CUDA tensors on
    their device, else on the host."""

    __slots__ = ("tensor", "flat")

    def __init__(self, tensor: torch.Tensor, *, is_read: bool = True,
                 as_type: torch.dtype | None = None, on_host: bool = False) -> None:
        if tensor.is_sparse:
            raise Unsupported("the gradd backend has no sparse collectives: densify the tensor")
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            raise InvalidRequest("a lazily conjugated tensor has no memory of its own: resolve it")
        self.tensor = tensor
        dtype = as_type or tensor.dtype
        is_there = tensor.device.type == "cpu" if on_host else _device.is_reachable(tensor)
        if is_there and tensor.is_contiguous() and dtype == tensor.dtype:
            self.flat = tensor.reshape(-1)
            return
        self.flat = torch.empty(tensor.numel(), dtype=dtype,
                                device=torch.device("cpu") if on_host else place(tensor))
        if is_read:
            self.flat.view(tensor.shape).copy_(tensor)

    @property
    def is_copy(self) -> bool:
        return self.tensor.data_ptr() != self.flat.data_ptr()

    def bring_back(self) -> None:
        """The result is in `flat`: put it where it belongs."""
        if self.is_copy:
            self.tensor.copy_(self.flat.view(self.tensor.shape))


def place(tensor: torch.Tensor) -> torch.device:
    """Where memory for gradd beside this tensor belongs."""
    return tensor.device if _device.is_device(tensor) else torch.device("cpu")


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The tensors' elements one after the other, in memory that gradd can work on."""
    return torch.cat([_device.reachable(tensor).reshape(-1) for tensor in tensors])


def address(flat: torch.Tensor) -> int:
    """Of a contiguous tensor's first byte; 0 where it has none."""
    return flat.data_ptr() if flat.numel() else 0


def as_elements(flat: torch.Tensor) -> tuple[DType, int]:
    """(element type, elements of that type in one of the tensor's), for ops that only move data."""
    dtype = DTYPES.get(flat.dtype)
    return (DType.U8, flat.element_size()) if dtype is None else (dtype, 1)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two contiguous tensors share memory?"""
    first, second = address(a), address(b)
    return bool(first and second) and first < second + b.numel() * b.element_size() and \
        second < first + a.numel() * a.element_size()


def apart(source: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    """`source`, or a copy of it where `destination` shares its memory."""
    return source.clone() if overlap(source, destination) else source


def same_type(tensors: list[torch.Tensor], what: str) -> None:
    """Raises InvalidRequest where the tensors of one call differ in their type."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise InvalidRequest(f"{what}: the tensors are of {len(types)} types: "
                             f"{', '.join(sorted(map(str, types)))}")
