# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation over the batches of all ranks, on CPU and GPU.

The statistics are those of all ranks' samples together: mean first, then the sum of squared
distances from it, each as one all-reduce, so that ranks may have batches of different sizes (also
empty ones) and large means cost no precision.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from gradd.torch.basics import Sum, size
from gradd.torch.ops import allreduce_async_, synchronize


def _sum_over_ranks(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return synchronize(allreduce_async_(tensor, name=name, op=Sum))


def _channels(values: torch.Tensor, dims: int) -> torch.Tensor:
    """Per-channel values in a shape that broadcasts over (N, C, ...)."""
    return values.view(1, -1, *[1] * (dims - 2))


class SyncBatchNorm(_BatchNorm):
    """torch.nn.BatchNorm whose statistics in training are those of all ranks' batches.

    Input: (N, C, ...) with the same C on all ranks, at least 2 dimensions.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or size() == 1:
            return self._local(input, uses_batch)
        momentum = 0.0
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            momentum = (1.0 / float(self.num_batches_tracked) if self.momentum is None
                        else self.momentum)
        return _SyncBatchNorm.apply(input, self.weight, self.bias, self.running_mean,
                                    self.running_var, self.eps, momentum)

    def _local(self, input: torch.Tensor, uses_batch: bool) -> torch.Tensor:
        momentum = self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias,
                            uses_batch, 0.0 if momentum is None else momentum, self.eps)


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None,
                bias: torch.Tensor | None, running_mean: torch.Tensor | None,
                running_var: torch.Tensor | None, eps: float, momentum: float) -> torch.Tensor:
        n_dims = input.dim()
        others = [dim for dim in range(n_dims) if dim != 1]
        values = input.double() if input.dtype == torch.float64 else input.float()
        n_channels = input.shape[1]
        sums = torch.empty(n_channels + 1, dtype=values.dtype, device=input.device)
        sums[:n_channels] = values.sum(dim=others)
        sums[n_channels] = input.numel() // max(n_channels, 1)
        sums = _sum_over_ranks(sums, "sync_batch_norm.mean")
        count = sums[n_channels]
        mean = sums[:n_channels] / count
        centred = values - _channels(mean, n_dims)
        var = _sum_over_ranks((centred * centred).sum(dim=others), "sync_batch_norm.var") / count
        invstd = torch.rsqrt(var + eps)
        if running_mean is not None and running_var is not None and momentum:
            unbiased = var * (count / (count - 1).clamp(min=1))
            running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype) * momentum)
            running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype) * momentum)
        normal = centred * _channels(invstd, n_dims)
        ctx.save_for_backward(normal, weight, invstd, count)
        output = normal
        if weight is not None:
            output = output * _channels(weight.to(values.dtype), n_dims)
        if bias is not None:
            output = output + _channels(bias.to(values.dtype), n_dims)
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        normal, weight, invstd, count = ctx.saved_tensors
        n_dims = normal.dim()
        others = [dim for dim in range(n_dims) if dim != 1]
        grad = grad_output.to(normal.dtype)
        sum_grad = grad.sum(dim=others)
        sum_grad_normal = (grad * normal).sum(dim=others)
        grad_input = None
        if ctx.needs_input_grad[0]:
            both = _sum_over_ranks(torch.stack([sum_grad, sum_grad_normal]),
                                   "sync_batch_norm.backward") / count
            scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
            grad_input = (grad - _channels(both[0], n_dims)
                          - normal * _channels(both[1], n_dims)) * _channels(scale, n_dims)
            grad_input = grad_input.to(grad_output.dtype)
        # The parameters' own gradients are this rank's; the optimizer reduces them.
        has_weight = weight is not None
        grad_weight = (sum_grad_normal.to(weight.dtype)
                       if has_weight and ctx.needs_input_grad[1] else None)
        grad_bias = (sum_grad.to(weight.dtype if has_weight else sum_grad.dtype)
                     if ctx.needs_input_grad[2] else None)
        return grad_input, grad_weight, grad_bias, None, None, None, None
