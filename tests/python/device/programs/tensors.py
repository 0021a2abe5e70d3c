# SPDX-License-Identifier: Apache-2.0
"""gradd's torch modules on stand-ins for CUDA tensors; each check runs on every rank."""

from __future__ import annotations

import json
import traceback

import standin  # isort: skip
import torch
import torch.distributed as dist

import gradd
import gradd.c10d  # noqa: F401
import gradd.ddp
import gradd.torch as hvd
from standin import cuda, of, settle

N = 3000
STEPS = 30


def mine(seed: int = 0, n: int = N, rank: int | None = None) -> torch.Tensor:
    r = hvd.rank() if rank is None else rank
    return ((torch.arange(n) * 7 + 3 * r + seed) % 11).float()


def total(seed: int = 0, n: int = N) -> torch.Tensor:
    return torch.stack([mine(seed, n, r) for r in range(hvd.size())]).sum(0)


def check_steps_use_one_name_and_wait_by_stream() -> None:
    x = of(mine())
    for step in range(STEPS):
        settle()
        x.copy_(mine(step))
        hvd.allreduce_(x, op=hvd.Sum, name="grad")
        if step % 5 == 0:
            settle()
            assert torch.equal(x, total(step)), step


def check_the_host_runs_ahead_of_the_worker() -> None:
    """More ops of one name than there are turns, none of which is waited for."""
    tensors = [of(mine(i)) for i in range(20)]
    for x in tensors:
        hvd.allreduce_(x, op=hvd.Sum, name="ahead")
    settle()
    for i, x in enumerate(tensors):
        assert torch.equal(x, total(i)), i


def check_groups_and_new_tensors() -> None:
    xs = [of(mine(i, 100 + i)) for i in range(4)]
    ys = hvd.grouped_allreduce(xs, op=hvd.Sum, name="group")
    z = hvd.allreduce(of(mine(9)), op=hvd.Sum, name="new")
    settle()
    assert all(standin.is_device(y) for y in [*ys, z])
    for i, (x, y) in enumerate(zip(xs, ys)):
        assert torch.equal(x, mine(i, 100 + i)) and torch.equal(y, total(i, 100 + i))
    assert torch.equal(z, total(9))


def check_other_kinds() -> None:
    root = hvd.size() - 1
    x = of(mine())
    hvd.broadcast_(x, root, name="b")
    gathered = hvd.allgather(of(mine(0, 10 + hvd.rank())), name="g")
    part = hvd.reducescatter(of(mine(2, 4 * hvd.size())), op=hvd.Sum, name="r")
    swapped = hvd.alltoall(of(mine(3, 2 * hvd.size())), name="t")
    settle()
    assert torch.equal(x, mine(0, N, root))
    assert torch.equal(gathered, torch.cat([mine(0, 10 + r, r) for r in range(hvd.size())]))
    me = hvd.rank()
    assert torch.equal(part, total(2, 4 * hvd.size())[4 * me:4 * me + 4])
    assert torch.equal(swapped, torch.cat([mine(3, 2 * hvd.size(), r)[2 * me:2 * me + 2]
                                           for r in range(hvd.size())]))
    assert all(standin.is_device(y) for y in (gathered, part, swapped))


class Bucket:
    """As torch.distributed.GradBucket."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def buffer(self) -> torch.Tensor:
        return self._tensor

    def index(self) -> int:
        return 0

    def parameters(self) -> list[torch.Tensor]:
        return []


def check_ddp_hook() -> None:
    state = gradd.ddp.State(gradd.context())
    for step in range(12):
        x = of(mine(step))
        future = gradd.ddp.hook(state, Bucket(x))
        result = future.wait()
        settle()
        assert torch.allclose(result, total(step) / hvd.size()), step


def check_process_group() -> None:
    dist.init_process_group("gradd")
    x = of(mine())
    works = [dist.all_reduce(x, async_op=True)]
    for work in works:
        work.wait()
    whole = standin.empty((hvd.size() * 5,))
    dist.all_gather_into_tensor(whole, of(mine(1, 5)))
    part = standin.empty((5,))
    dist.reduce_scatter_tensor(part, of(mine(2, 5 * hvd.size())))
    settle()
    assert torch.equal(x, total())
    assert torch.equal(whole, torch.cat([mine(1, 5, r) for r in range(hvd.size())]))
    me = hvd.rank()
    assert torch.equal(part, total(2, 5 * hvd.size())[5 * me:5 * me + 5])
    dist.destroy_process_group()


def check_no_host_waited_for_a_stream() -> None:
    assert cuda.count("host_synchronisations") == 0


def main() -> None:
    hvd.init()
    results = {"path": standin.path()}
    for name, check in [*globals().items()]:
        if not name.startswith("check_"):
            continue
        try:
            check()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
            break
    hvd.shutdown()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
