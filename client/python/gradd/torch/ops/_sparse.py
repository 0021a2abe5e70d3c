# SPDX-License-Identifier: Apache-2.0
"""Sums of sparse tensors, which are gathered."""

from __future__ import annotations

from typing import Callable

import torch

from gradd.torch.basics import Average, ProcessSet, Sum, global_process_set, set_ranks
from gradd.torch.engine import set_id, synchronize
from gradd.torch.ops._allgather import gather_list
from gradd.torch.ops._allreduce import choose_op


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

    handle = gather_list([indices, values], name, process_set, True, convert)
    return lambda: synchronize(handle)
