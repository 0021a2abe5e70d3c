# SPDX-License-Identifier: Apache-2.0
"""Failures on the GPUs of one of two nodes: both hear of it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from gpu_failure import (
    GPU, Node, expect_ok, expect_told, failures, join, needs_fakes, renew, submit, sums_are_right,
    write_all,
)
from harness import SLOW, Trainer, World, settle, wait_for_exit

pytestmark = needs_fakes


class Nodes:
    """Two daemons of one machine, which NCCL takes for two machines. Rank 0 is on the left one."""

    def __init__(self, world: World, nccl: dict[str, dict[str, Any]] | None = None,
                 order: str = "auto", **settings: Any) -> None:
        self.world = world
        self.node = Node(world, DEAD=settings.pop("DEAD", "hang"))
        self.daemons = {}
        for name in ("left", "right"):
            extra = {f"GRADD_FAKE_NCCL_{k}": str(v) for k, v in (nccl or {}).get(name, {}).items()}
            self.daemons[name] = world.daemon(
                environment={**self.node.environment, "NCCL_HOSTID": name, **extra},
                node_name=name, backend="nccl", peer_port=0, peer_heartbeat_s=0.2, peer_dead_s=1.0,
                order=order, job_linger_s=0.5 * SLOW, **settings)
            self.daemons[name].n_more_fds = 2
        self.port = self.daemons["left"].gradctl_json("peers")["listening"].rpartition(":")[2]

    def trainer(self, rank: int) -> Trainer:
        trainer = self.node.trainer(self.daemons["left" if rank == 0 else "right"], rank % 2)
        renew(trainer)
        return trainer

    def join(self, trainers: list[Trainer]) -> set[int]:
        for rank, trainer in enumerate(trainers):
            trainer.send("init", **trainer.init_arguments(
                rank, len(trainers), "job", coordinator=f"127.0.0.1:{self.port}"))
        answers = [trainer.reply() for trainer in trainers]
        expect_ok(answers)
        assert all(t["is_on"] for t in settle(trainers, "device_path"))
        return {a["epoch"] for a in answers}

    def start(self, n: int = 2) -> list[Trainer]:
        trainers = [self.trainer(rank) for rank in range(n)]
        assert self.join(trainers) == {1}
        sums_are_right(trainers)
        return trainers

    def again(self, trainers: list[Trainer], n: int = 1) -> None:
        settle(trainers, "shutdown_all")
        assert len(self.join(trainers)) == 1
        sums_are_right(trainers, n)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_error_of_nccl_on_one_node_is_told_on_both(world: World, side: str) -> None:
    nodes = Nodes(world, nccl={side: {"ASYNC": "2:2"}})
    trainers = nodes.start()
    since = time.time()
    submit(trainers)
    expect_told(failures(trainers, since=since), r"\bepoch 1\b", rf"\bnode {side}\b", GPU,
                r"NCCL met an error: unhandled system error \(2\)")
    nodes.again(trainers)


def test_a_communicator_that_can_not_begin_is_told_on_both(world: World) -> None:
    nodes = Nodes(world, nccl={"left": {"FAIL": "ncclGetUniqueId:1+:2"}})
    trainers = [nodes.trainer(rank) for rank in range(2)]
    assert nodes.join(trainers) == {1}
    since = time.time()
    submit(trainers)
    expect_told(failures(trainers, since=since), r"\bepoch 1\b", r"\bnode left\b",
                "NCCL has no communicator")


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_op_that_hangs_on_one_node_is_told_on_both(world: World, side: str) -> None:
    nodes = Nodes(world, nccl={side: {"HANG_AT": 2}}, op_timeout_s=0.5)
    trainers = nodes.start()
    since = time.time()
    submit(trainers)
    expect_told(failures(trainers, since=since), r"\bepoch 1\b", r"\bnode (left|right)\b", GPU,
                "op_timeout_s")
    nodes.again(trainers)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_in_a_collective_of_two_nodes(world: World, victim: int) -> None:
    nodes = Nodes(world, DEAD="complete")
    trainers = nodes.start()
    daemon = list(nodes.daemons.values())[victim]
    write_all(trainers[:1])
    trainers[1].call("write", key="a", rank=1, stream="s", gate="later")
    submit(trainers)
    expect_ok(settle(trainers, "wait_stream", handle="x", stream="s", timeout_s=10.0))
    worker = daemon.worker_pid()
    since = time.time()
    os.kill(worker, signal.SIGKILL)
    expect_told(failures(trainers, since=since), rf"node {('left', 'right')[victim]}\b",
                rf"\bpid {worker}\b.*killed")
    trainers[1].call("open_gate", gate="later")
    assert all(settle(trainers, "await_stream", stream="s"))
    nodes.again(trainers, n=3)


def test_a_coordinator_killed_in_a_collective_of_two_nodes(world: World) -> None:
    nodes = Nodes(world, DEAD="complete")
    trainers = nodes.start()
    write_all(trainers[:1])
    trainers[1].call("write", key="a", rank=1, stream="s", gate="later")
    submit(trainers)
    expect_ok(settle(trainers, "wait_stream", handle="x", stream="s", timeout_s=10.0))
    left = nodes.daemons["left"]
    workers = left.worker_pids()
    left.process.kill()
    left.process.wait(20)
    since = time.time()
    expect_told(failures(trainers, since=since, within_s=4.0), r"\bnode left\b|coordinator")
    trainers[1].call("open_gate", gate="later")
    assert all(settle(trainers, "await_stream", stream="s"))
    settle(trainers, "shutdown_all")
    assert all(wait_for_exit(pid, 15.0) for pid in workers)
    # The other node is usable.
    alone = join(world, nodes.node, nodes.daemons["right"], [0, 1], "alone")
    sums_are_right(alone, 2)


# The coordinator's node waits for its GPUs: test_what_does_not_end_takes_the_worker_with_it.
@pytest.mark.parametrize("victim, order", [(0, "flag"), (1, "flag"), (1, "event")])
def test_a_trainer_killed_before_its_data_was_there_gives_no_sum(
        world: World, victim: int, order: str) -> None:
    """In flag order the worker of its node lets its stream go on without the data: nothing of that
    may come out as a sum anywhere. In event order the fake's streams wait until the worker goes."""
    nodes = Nodes(world, order=order)
    trainers = nodes.start()
    dead, survivor = trainers[victim], trainers[1 - victim]
    survivor.call("write", key="a", rank=1 - victim, stream="s")
    dead.call("write", key="a", rank=victim, stream="s", gate="never")
    submit(trainers)
    expect_ok([survivor.call("wait_stream", handle="x", stream="s", timeout_s=10.0)])
    since = time.time()
    dead.kill()
    expect_told(failures([survivor], since=since), r"\bepoch 1\b",
                rf"rank {victim}\b.*\bpid {dead.pid}\b.*killed")
    trainers[victim] = nodes.trainer(victim)
    if order == "flag":
        assert survivor.call("await_stream", stream="s")
    nodes.again(trainers, n=3)
