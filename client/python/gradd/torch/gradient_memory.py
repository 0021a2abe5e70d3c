# SPDX-License-Identifier: Apache-2.0
"""Gradients in memory that the worker shares, so that reducing them copies nothing.

Every parameter has a place in one region per element type. ``adopt()`` moves a gradient there and
makes ``p.grad`` a view of it; from then on autograd accumulates into shared memory, until
somebody sets the gradient to None.
"""

from __future__ import annotations

from typing import Iterable

import torch

import gradd
from gradd.context import Context
from gradd.errors import GraddError
from gradd.torch.engine import DTYPES

_ALIGN_BYTES = 64  # a cache line


class GradientMemory:
    """Places for the gradients of `params`. Where shared memory is refused, there are none."""

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        self._params = [p for p in params if self._is_suitable(p)]
        self._context: Context | None = None
        self._views: dict[torch.nn.Parameter, torch.Tensor] = {}

    @staticmethod
    def _is_suitable(p: torch.Tensor) -> bool:
        return (p.device.type == "cpu" and p.layout == torch.strided and p.dtype in DTYPES
                and p.is_contiguous() and p.numel() > 0)

    def _allocate(self, context: Context) -> None:
        """(Re)make the places; those of an earlier membership stay ordinary memory."""
        self._context, self._views = context, {}
        if context.size == 1:
            return
        by_type: dict[torch.dtype, list[torch.nn.Parameter]] = {}
        for p in self._params:
            by_type.setdefault(p.dtype, []).append(p)
        for dtype, params in by_type.items():
            align = max(_ALIGN_BYTES // params[0].element_size(), 1)
            starts, total = [], 0
            for p in params:
                starts.append(total)
                total += -(-p.numel() // align) * align
            try:
                region = context.alloc(total * params[0].element_size())
            except GraddError:
                return  # beyond the job's quota: gradients are staged instead
            flat = torch.frombuffer(region.array, dtype=dtype)
            for p, start in zip(params, starts):
                self._views[p] = flat[start:start + p.numel()].view(p.shape)

    def adopt(self, p: torch.nn.Parameter) -> None:
        """Make p.grad shared memory, if it is suitable and is not shared already."""
        if self._context is None or not self._context.is_open:
            self._allocate(gradd.context())
        view, grad = self._views.get(p), p.grad
        if (view is None or grad is None or grad.data_ptr() == view.data_ptr()
                or grad.layout != torch.strided or grad.dtype != view.dtype
                or grad.device.type != "cpu" or grad.requires_grad):
            return
        view.copy_(grad)
        p.grad = view
