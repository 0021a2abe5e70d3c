# SPDX-License-Identifier: Apache-2.0
"""Train with FSDP on the CPU; print the losses as one JSON object."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

import gradd.c10d  # noqa: F401

WIDTH = 64


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH + 1), nn.Tanh(),
                                         nn.Linear(WIDTH + 1, WIDTH)) for _ in range(3)))


def wrap_whole() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    return FullyShardedDataParallel(make_net(), device_id=torch.device("cpu"),
                                    auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def wrap_layers() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = make_net()
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def main() -> None:
    dist.init_process_group(sys.argv[2])
    model = {"fsdp1": wrap_whole, "fsdp2": wrap_layers}[sys.argv[1]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + dist.get_rank())
    losses = []
    for _ in range(4):
        x = torch.randn(4, WIDTH)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
