# SPDX-License-Identifier: Apache-2.0
"""Train a model in several buckets with DDP; print its losses and parameters as one JSON object."""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradd
import gradd.c10d  # noqa: F401
import gradd.ddp

HOOKS = {"hook": gradd.ddp.hook, "fp16": gradd.ddp.fp16_hook, "bf16": gradd.ddp.bf16_hook}
STEPS = 6


class Net(nn.Module):
    """Eight layers; the odd steps leave the last branch out where `skips`."""

    def __init__(self, width: int, skips: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh())
                                      for _ in range(8)))
        self.branch = nn.Linear(width, width)
        self.skips = skips

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.layers(x)
        return x if self.skips and step % 2 else x + self.branch(x)


def make_model(arguments: argparse.Namespace, dtype: torch.dtype) -> DistributedDataParallel:
    model = DistributedDataParallel(
        Net(arguments.width, arguments.unused).to(dtype), bucket_cap_mb=arguments.bucket_cap,
        find_unused_parameters=arguments.unused,
        gradient_as_bucket_view=arguments.bucket_view)
    if arguments.hook:
        state = {"none": lambda: None, "state": gradd.ddp.State,
                 "copied": lambda: gradd.ddp.State(in_place=False),
                 "group": lambda: dist.group.WORLD,
                 "context": gradd.ddp.context_of}[arguments.state]()
        model.register_comm_hook(state, HOOKS[arguments.hook])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gradd")
    parser.add_argument("--hook", choices=tuple(HOOKS))
    parser.add_argument("--state", default="none")
    # A layer's weights are 160 kB: several buckets.
    parser.add_argument("--width", type=int, default=200)
    parser.add_argument("--bucket-cap", type=float, default=0.3, help="MiB")
    parser.add_argument("--one-bucket", action="store_true")
    parser.add_argument("--models", type=int, default=1)
    parser.add_argument("--unused", action="store_true")
    parser.add_argument("--bucket-view", action="store_true")
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--initialised", action="store_true", help="gradd.init() comes first")
    parser.add_argument("--rejoin", action="store_true", help="leave the job midway, join again")
    arguments = parser.parse_args()
    if arguments.one_bucket:
        arguments.bucket_cap, dist._DEFAULT_FIRST_BUCKET_BYTES = 1000.0, 1 << 30
    if arguments.initialised:
        gradd.init()
    dist.init_process_group(arguments.backend)
    rank = dist.get_rank()
    dtype = torch.float64 if arguments.double else torch.float32
    torch.manual_seed(1)
    models = [make_model(arguments, dtype) for _ in range(arguments.models)]
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    torch.manual_seed(10 + rank)
    losses = []
    for step in range(STEPS):
        if step == 3 and arguments.rejoin:
            gradd.shutdown()
            gradd.init()
        x = torch.randn(4, arguments.width, dtype=dtype)
        optimizer.zero_grad()
        # One backward for all models: their buckets are in flight together.
        loss = sum((model(x, step) - x).square().mean() for model in models)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    flat = torch.cat([p.detach().flatten() for p in parameters]).double()
    mine = flat.clone()
    dist.broadcast(flat, 0)
    dist.destroy_process_group()
    print(json.dumps({"losses": losses, "sum": mine.sum().item(), "square": mine.square().sum()
                      .item(), "is_equal_to_rank_0": torch.equal(mine, flat)}))


if __name__ == "__main__":
    main()
