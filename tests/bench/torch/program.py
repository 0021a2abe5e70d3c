# SPDX-License-Identifier: Apache-2.0
"""What one rank measures; started by `run`. Rank 0 prints one JSON object.

Peers are measured in the same processes, one after the other in every round, so that they meet
the same machine. A figure of a round is the time of a few iterations that begin together; every
list has one number per round, in seconds per iteration.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradd.c10d  # noqa: F401
import gradd.ddp
import gradd.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "client/examples"))
import resnet  # noqa: E402

Seconds = dict[str, list[float]]
MB = 1_000_000


def compare(contestants: dict[str, Callable[[], Any]], rounds: int, iterations: int) -> Seconds:
    """Every contestant once per round; one round before them warms up."""
    seconds: Seconds = {name: [] for name in contestants}
    for round_number in range(rounds + 1):
        for name, run in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(iterations):
                run()
            if round_number:
                seconds[name].append((time.perf_counter() - start) / iterations)
    return seconds


def measure_allreduce(quick: bool, rounds: int, group: Any) -> Seconds:
    """25 MB of float32."""
    n = (MB if quick else 25 * MB) // 4
    data = torch.ones(n)
    mine = torch.ones(n)
    return compare({
        "gloo": lambda: dist.all_reduce(mine),
        "hvd.allreduce": lambda: hvd.allreduce(data, name="data", op=hvd.Sum),
        "hvd.allreduce_": lambda: hvd.allreduce_(data, name="data", op=hvd.Average),
        "c10d": lambda: dist.all_reduce(data, group=group),
    }, rounds, 2 if quick else 10)


def local_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communicates nothing: what is left of a step without communication."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# DDP compares annotations with classes, not with their names.
local_hook.__annotations__ = {}


def measure_ddp(quick: bool, rounds: int, group: Any) -> Seconds:
    """Forward and backward of a perceptron of 25 million parameters, batch 2."""
    width = 200 if quick else 1767

    def contestant(hook: Any = None, process_group: Any = None) -> Callable[[], None]:
        torch.manual_seed(1)
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
        model = DistributedDataParallel(net, process_group=process_group)
        if hook is not None:
            model.register_comm_hook(None, hook)
        x = torch.randn(2, width)

        def step() -> None:
            model(x).sum().backward()

        return step

    return compare({
        "local": contestant(local_hook),
        "gloo": contestant(),
        "hook": contestant(gradd.ddp.hook),
        "bf16 hook": contestant(gradd.ddp.bf16_hook),
        "c10d": contestant(process_group=group),
    }, rounds, 2 if quick else 3)


def measure_optimizer(quick: bool, rounds: int, group: Any) -> Seconds:
    """161 gradients of ResNet-50 through the optimizer, and as one flat tensor with its copies."""
    model = resnet.resnet_tiny() if quick else resnet.resnet50()
    parameters = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1),
                                         named_parameters=model.named_parameters())
    for p in parameters:
        p.grad = torch.ones_like(p)
    others = [torch.ones_like(p) for p in parameters]
    shared = hvd_region(sum(p.numel() for p in parameters))
    ordinary = torch.empty_like(shared)

    def flat(buffer: torch.Tensor) -> Callable[[], None]:
        parts = list(buffer.split([p.numel() for p in parameters]))

        def run() -> None:
            torch.cat([other.view(-1) for other in others], out=buffer)
            hvd.allreduce_(buffer, name="flat")
            for other, part in zip(others, parts):
                other.view(-1).copy_(part)

        return run

    return compare({
        "optimizer": optimizer.synchronize,
        "flat in shared memory": flat(shared),
        "flat": flat(ordinary),
        "flat, no copies": lambda: hvd.allreduce_(shared, name="flat"),
    }, rounds, 2 if quick else 4)


def hvd_region(n: int) -> torch.Tensor:
    """float32[n] that the worker shares."""
    return torch.frombuffer(gradd.context().alloc(4 * n).array, dtype=torch.float32)


MEASUREMENTS = {"allreduce": measure_allreduce, "ddp": measure_ddp, "optimizer": measure_optimizer}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("measurements", nargs="+", choices=tuple(MEASUREMENTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gradd")
    results = {name: MEASUREMENTS[name](arguments.quick, arguments.rounds, group)
               for name in arguments.measurements}
    if hvd.rank() == 0:
        print(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
