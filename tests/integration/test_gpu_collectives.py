# SPDX-License-Identifier: Apache-2.0
"""Collectives on device memory: ranks that share GPUs, several GPUs, several nodes, on the fakes.

The worker sums by its kernels (their twins on the CPU) and calls the fake NCCL, which aborts it
when a rule is broken.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

import gradd_ctypes as api
from gpu import FAKES, Gpus
from harness import Daemon, Trainer, World, eventually, settle

pytestmark = pytest.mark.skipif(
    not ((FAKES / "libcuda.so.1").exists() and (FAKES / "libnccl.so.2").exists()),
    reason=f"{FAKES}/libcuda.so.1 or libnccl.so.2 is not built")

SCRIPT = "gpu_collectives.py"
# The GPU of each rank.
LAYOUTS = {"1 on 1": [0], "2 on 1": [0, 0], "4 on 1": [0, 0, 0, 0], "2 on 2": [0, 1],
           "3 on 2": [0, 1, 0], "4 on 2": [1, 0, 0, 1], "4 on 4": [0, 1, 2, 3]}
MADE = ["host_synchronisations", "event_creations", "imports", "allocations"]


def join(world: World, gpus: Gpus, devices: list[int], **settings: Any) -> list[Trainer]:
    daemon = gpus.daemon(backend="nccl", **settings)
    trainers = [gpus.trainer(daemon, device, script=SCRIPT) for device in devices]
    for answer in world.join(trainers):
        assert answer["status"] == 0, answer
    for trainer in trainers:
        path = trainer.call("device_path")
        assert path["is_on"] or len(devices) == 1, path
        trainer.call("new_stream", key="s")
    return trainers


def run(trainers: list[Trainer], seed: int, n_ops: int, devices: list[Any], **more: Any) -> None:
    print(f"seed {seed}")  # shown when the test fails
    for trainer in trainers:
        trainer.send("device_collectives", seed=seed, n_ops=n_ops, stream="s",
                     n_gpus=len(set(devices)), **more)
    waiting = list(trainers)
    while waiting:  # whoever fails first says why; the others may wait for it
        for trainer in eventually(lambda: [t for t in waiting if t.has_reply()], "a reply"):
            assert trainer.reply()["bad"] == []
            waiting.remove(trainer)


@pytest.mark.parametrize("order", ["event", "flag"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_collectives(world: World, layout: str, order: str) -> None:
    devices = LAYOUTS[layout]
    gpus = Gpus(world, DEVICES=4, DELAY_US=50, SEED=7)
    trainers = join(world, gpus, devices, order=order)
    run(trainers, 1000 + len(devices), 90, devices)
    assert settle(trainers, "cuda_counts", names=MADE[:1]) == [{MADE[0]: 0}] * len(devices)


def worker_counts(gpus: Gpus, daemon: Daemon) -> dict[str, int]:
    with open(os.path.join(gpus.dir, f"counts.{daemon.worker_pid()}")) as file:
        words = [line.split() for line in file]
    return {w[0]: int(w[1]) for w in words if len(w) == 2 and w[1].isdigit()}


@pytest.mark.parametrize("devices", [[0, 0], [0, 1, 0]])
def test_steady_state_makes_nothing(world: World, devices: list[int]) -> None:
    """After ops of every kind have run once: no import, event, allocation or host wait per op, in
    trainers and worker."""
    gpus = Gpus(world, DEVICES=2)
    trainers = join(world, gpus, devices)
    run(trainers, 5, 60, devices, scaled=False)
    before = settle(trainers, "cuda_counts", names=MADE)
    worker = trainers[0].daemon
    assert worker
    before_worker = worker_counts(gpus, worker)
    run(trainers, 5, 60, devices, scaled=False)
    assert settle(trainers, "cuda_counts", names=MADE) == before
    after_worker = worker_counts(gpus, worker)
    assert {name: after_worker[name] - before_worker[name] for name in MADE} == dict.fromkeys(
        MADE, 0)


@pytest.mark.parametrize("devices", [[0, 1, 0], [0, 1, 1]])
def test_process_sets_have_communicators_of_their_own(world: World, devices: list[int]) -> None:
    gpus = Gpus(world, DEVICES=2)
    trainers = join(world, gpus, devices)
    run(trainers, 11, 12, devices)
    for number, ranks in enumerate(([0, 1], [1, 2])):
        answers = settle(trainers, "add_set", ranks=ranks, name=f"set{number}")
        members = [trainers[rank] for rank in ranks]
        run(members, 20 + number, 30, [devices[rank] for rank in ranks], set=set_of(answers),
            ranks=ranks)
    run(trainers, 13, 12, devices)


def set_of(answers: list[dict[str, Any]]) -> int:
    assert len({a["set"] for a in answers}) == 1, answers
    return answers[0]["set"]


@pytest.mark.parametrize("kind", [api.ALLREDUCE, api.REDUCE_SCATTER])
@pytest.mark.parametrize("devices", [[0, 0], [0, 1], [0, 1, 0]])
def test_averages_of_halves_do_not_overflow(world: World, devices: list[int], kind: int) -> None:
    """The sum would: 40000 + 40000 is beyond float16."""
    gpus = Gpus(world, DEVICES=2)
    trainers = join(world, gpus, devices)
    n = len(devices)
    settle(trainers, "tensor", key="a", count=30 * n, dtype=api.F16)
    settle(trainers, "fill_device", key="a", value=40000.0)
    settle(trainers, "submit_device", handle="h", stream="s", ops=[
        {"kind": kind, "dtype": api.F16, "name": "x", "redop": api.AVG, "in": "a", "out": "a",
         "count": 30 * n}])
    assert [a["status"] for a in settle(trainers, "wait", handle="h")] == [0] * n
    for answer in settle(trainers, "peek", key="a", n=4):
        assert all(abs(value - 40000) <= 64 for value in answer), answer


def on_nodes(world: World, gpus: Gpus, nodes: list[int], devices: list[int],
             **settings: Any) -> list[Trainer]:
    """Two daemons of one machine as two nodes; NCCL takes them for two machines."""
    daemons = [world.daemon(environment={**gpus.environment, "NCCL_HOSTID": name}, node_name=name,
                            backend="nccl", peer_port=0, peer_heartbeat_s=0.2, **settings)
               for name in ("left", "right")]
    for daemon in daemons:
        daemon.n_more_fds = 2
    port = daemons[0].gradctl_json("peers")["listening"].rpartition(":")[2]
    trainers = [gpus.trainer(daemons[node], device, script=SCRIPT)
                for node, device in zip(nodes, devices)]
    for rank, trainer in enumerate(trainers):
        trainer.send("init", **trainer.init_arguments(rank, len(trainers), "job",
                                                      coordinator=f"127.0.0.1:{port}"))
    for trainer in trainers:
        answer = trainer.reply()
        assert answer["status"] == 0, answer
    for trainer in trainers:
        assert trainer.call("device_path")["is_on"]
        trainer.call("new_stream", key="s")
    return trainers


@pytest.mark.parametrize("nodes, devices", [
    ([0, 1], [0, 0]), ([0, 1, 0], [0, 1, 0]), ([0, 1, 1, 0], [0, 0, 1, 0])])
def test_random_collectives_over_nodes(world: World, nodes: list[int], devices: list[int]) -> None:
    gpus = Gpus(world, DEVICES=2, DELAY_US=50, SEED=3)
    trainers = on_nodes(world, gpus, nodes, devices)
    places = list(zip(nodes, devices))
    run(trainers, 2000 + len(nodes), 60, places)
    if len(nodes) > 2:
        answers = settle(trainers, "add_set", ranks=[0, 2], name="set")
        run([trainers[0], trainers[2]], 9, 18, [places[0], places[2]], set=set_of(answers),
            ranks=[0, 2])


@pytest.mark.parametrize("devices", [[0, 0, 0], [0, 1, 1], [0, 1, 0]])
def test_ranks_out_of_data_count_as_zeros(world: World, devices: list[int]) -> None:
    """Rank 2 has never brought device memory."""
    gpus = Gpus(world, DEVICES=2)
    trainers = join(world, gpus, devices)
    trainers[2].send("join_data")
    for op, want in (("sum", [3, 17]), ("avg", [1, 17 / 3]), ("min", [0, 0]), ("max", [3, 10])):
        for rank in (0, 1):
            key = f"{op}"
            trainers[rank].call("tensor", key=key, count=100)
            trainers[rank].call("write", key=key, rank=rank, stream="s")
        pair = trainers[:2]
        settle(pair, "submit_device", handle="h", stream="s", ops=[
            {"kind": api.ALLREDUCE, "name": op, "redop": getattr(api, op.upper()), "in": op,
             "out": op, "count": 100}])
        assert [a["status"] for a in settle(pair, "wait", handle="h")] == [0, 0]
        for values in settle(pair, "peek", key=op, n=2):
            assert values == pytest.approx(want), op
    for trainer in trainers[:2]:
        trainer.send("join_data")
    for trainer in trainers:
        assert trainer.reply()["status"] == 0


@pytest.mark.parametrize("devices", [[0, 0], [0, 1], [1, 0, 1]])
def test_elements_that_are_not_finite_are_counted_on_the_gpu(
        world: World, devices: list[int]) -> None:
    gpus = Gpus(world, DEVICES=2)
    trainers = join(world, gpus, devices)
    n = len(devices)
    for n_bad in (0, 3, 1):
        settle(trainers, "tensor", key="a", count=4000)
        settle(trainers, "fill_device", key="a", value=1.0)
        for place in range(n_bad):
            trainers[1].call("tensor_part_fill", key="a", at=place * 777, value=float("inf"))
        settle(trainers, "submit_device", handle="h", stream="s", ops=[
            {"kind": api.ALLREDUCE, "name": "x", "redop": api.SUM, "in": "a", "out": "a",
             "count": 4000, "check_finite": 1}])
        for answer in settle(trainers, "wait_nonfinite", handle="h"):
            assert answer["status"] == 0, answer
            assert answer["count"] == n_bad, answer
            assert n_bad == 0 or answer["rank"] == 1, answer
