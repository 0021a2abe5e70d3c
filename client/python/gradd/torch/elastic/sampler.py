# SPDX-License-Identifier: Apache-2.0
"""A sampler that divides what is left of an epoch among the ranks that are left."""

from __future__ import annotations

import random
from typing import Any, Iterator, Sized

import torch.utils.data

from gradd.torch.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler):
    """Like DistributedSampler, but remembers how far an epoch has got.

    Call record_batch() after every batch, put the sampler into a TorchState, and call set_epoch()
    at the end of an epoch.

    Args:
        dataset: of constant length.
        shuffle: in an order that depends on seed and epoch only, hence the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # samples of this epoch that all ranks together have processed
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, with all samples."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Epoch and progress."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the state was taken; what is left is divided anew."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the unprocessed samples among the ranks of now."""
        self.num_replicas = size()
        self.rank = rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num:]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        indices = list(self.remaining_indices)
        while indices and len(indices) < self.total_size:
            indices += indices[:self.total_size - len(indices)]
        return iter(indices[self.rank:self.total_size:self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
