# SPDX-License-Identifier: Apache-2.0
"""Adasum: a sum that takes less of what two gradients have in common.

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

Parallel gradients are averaged, orthogonal ones summed. For n ranks the operator is applied in a
binary tree: ranks 0 and 1, 2 and 3, ...; then those results; n is a power of two. The formula is
that of Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020.
"""

from __future__ import annotations

import torch


def check_size(n_ranks: int) -> None:
    """NotImplementedError unless the number of ranks is a power of two."""
    if n_ranks & (n_ranks - 1):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """adasum(a, b) in float64. A zero vector contributes nothing and takes nothing."""
    dot = torch.dot(a, b)
    norm_a, norm_b = torch.dot(a, a), torch.dot(b, b)
    factor_a = 1.0 if norm_a == 0 else 1.0 - dot / (2 * norm_a)
    factor_b = 1.0 if norm_b == 0 else 1.0 - dot / (2 * norm_b)
    return factor_a * a + factor_b * b


def combine(contributions: list[torch.Tensor]) -> torch.Tensor:
    """The tree over all ranks' flat tensors, in the type of the first. The same on every rank."""
    if not contributions[0].dtype.is_floating_point:
        raise ValueError("Adasum needs floating-point tensors")
    level = [tensor.double() for tensor in contributions]
    while len(level) > 1:
        level = [pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0].to(contributions[0].dtype)
