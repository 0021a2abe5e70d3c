# SPDX-License-Identifier: Apache-2.0
"""Trouble of one rank, as the others see it. Each rank's last line: what it got, and how soon."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradd.c10d  # noqa: F401
import gradd.ddp


trouble_began = 0.0


def trouble_begins() -> None:
    """From here on time counts: making the first model may import half of torch."""
    global trouble_began
    trouble_began = time.monotonic()


def make_model(use_hook: bool) -> DistributedDataParallel:
    net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    model = DistributedDataParallel(net, bucket_cap_mb=0.3)
    if use_hook:
        model.register_comm_hook(None, gradd.ddp.hook)
    return model


def step(model: nn.Module) -> None:
    model(torch.randn(2, 300)).sum().backward()


def killed(use_hook: bool) -> None:
    """Rank 1 is killed between two steps; rank 0 is in its backward."""
    model = make_model(use_hook)
    step(model)
    step(model)
    trouble_begins()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(model)


def forward_raises(use_hook: bool) -> None:
    model = make_model(use_hook)
    step(model)
    step(model)  # DDP has rebuilt its buckets, and needs its process group no more
    trouble_begins()
    if dist.get_rank() == 1:
        raise ValueError("bad sample")
    step(model)


def counts_differ() -> None:
    dist.all_reduce(torch.zeros(5 + dist.get_rank()))


def collectives_differ() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(5))
    else:
        dist.broadcast(torch.zeros(5), 0)


def gathered_sizes_differ() -> None:
    n = 3 + dist.get_rank()
    dist.all_gather([torch.zeros(n) for _ in range(dist.get_world_size())], torch.zeros(n))


def hooks_differ() -> None:
    """One rank sends half types."""
    model = DistributedDataParallel(nn.Linear(8, 8))
    model.register_comm_hook(None, gradd.ddp.fp16_hook if dist.get_rank() else gradd.ddp.hook)
    trouble_begins()
    model(torch.randn(2, 8)).sum().backward()


def late() -> None:
    """Rank 1 does not come before rank 0 has given up (op_timeout_s of the daemon)."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.get("gave up")
        return
    try:
        dist.all_reduce(torch.zeros(5))
    finally:
        store.set("gave up", "yes")


def wait_is_short() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.get("gave up")
        dist.all_reduce(torch.zeros(5))
        return
    tensor = torch.zeros(5)
    work = dist.all_reduce(tensor, async_op=True)
    error = None
    try:
        work.wait(timedelta(seconds=0.2))
    except gradd.Timeout as timeout:
        error = timeout
    store.set("gave up", "yes")
    work.wait()
    if error is not None:
        raise error


def receive_from_nobody() -> None:
    """A message that is never sent: the peer leaves."""
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(5), 1)
    else:
        dist.send(torch.zeros(5), 0)
        # Its job exists; the second message never comes.
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(5), 1)


def bad_arguments() -> None:
    """Refused before anything is sent; the group goes on."""
    world = dist.distributed_c10d._get_default_group()
    texts = []
    for call in (lambda: world._allgather_base(torch.zeros(3), torch.zeros(5)),
                 lambda: world.recv_anysource([torch.zeros(1)], 0),
                 lambda: world.send([torch.zeros(1)], dist.get_rank(), 0),
                 lambda: world.allgather([[torch.zeros(2)]], [torch.zeros(2)]),
                 lambda: world.alltoall_base(torch.zeros(3), torch.zeros(3), [1], [2])):
        try:
            call()
        except gradd.GraddError as error:
            texts.append(str(error))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()
    raise ValueError(" | ".join(texts))


CASES: dict[str, Callable[[], None]] = {
    "killed": lambda: killed(False), "killed_hook": lambda: killed(True),
    "forward_raises": lambda: forward_raises(False),
    "forward_raises_hook": lambda: forward_raises(True), "counts_differ": counts_differ,
    "collectives_differ": collectives_differ, "gathered_sizes_differ": gathered_sizes_differ,
    "hooks_differ": hooks_differ, "late": late, "wait_is_short": wait_is_short,
    "receive_from_nobody": receive_from_nobody, "bad_arguments": bad_arguments,
}


def main() -> None:
    # gradrun ends the other ranks when one fails; this rank's report comes first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.manual_seed(1)
    dist.init_process_group(sys.argv[2] if len(sys.argv) > 2 else "gradd")
    trouble_begins()
    try:
        CASES[sys.argv[1]]()
        outcome = {"error": None, "text": ""}
    except Exception as error:  # it is the result
        outcome = {"error": type(error).__name__, "text": str(error)}
    outcome["seconds"] = time.monotonic() - trouble_began
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
