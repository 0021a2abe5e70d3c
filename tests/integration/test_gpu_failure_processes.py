# SPDX-License-Identifier: Apache-2.0
"""Trainers and workers that die or stop while GPUs work for them: what the others are told, and
that nobody gets a sum of data that was not there."""

from __future__ import annotations

import os
import signal
import time

import pytest

from gpu_failure import (
    N, NODE, Node, ORDERS, WHERE, again, expect_ok, expect_told, failures, join, needs_fakes, renew,
    submit, sums_are_right, write_all,
)
from gradd_ctypes import STATUS
from harness import World, eventually, settle

pytestmark = needs_fakes


def lost(world: World, kind: str, order: str, devices: list[int], when: str) -> None:
    """Rank 1 is killed while its memory is imported. Its stream never wrote what it submitted, or
    has: then the op may have gone through."""
    node = Node(world, DEAD="complete")
    daemon = node.node(order=order)
    trainers = join(world, node, daemon, devices)
    settle(trainers, "tensor", key="a", count=N, kind=kind, chunks=[2 << 20])
    sums_are_right(trainers, 2)
    victim, survivor = trainers[1], trainers[0]
    survivor.call("write", key="a", rank=0, stream="s")
    victim.call("write", key="a", rank=1, stream="s", **({} if when == "after" else
                                                         {"gate": "never"}))
    submit(trainers[:1] if when == "before" else trainers)
    if when == "during":
        expect_ok([survivor.call("wait_stream", handle="x", stream="s", timeout_s=5.0)])
    elif when == "after":
        expect_ok([survivor.call("wait", handle="x")])
        assert survivor.call("await_stream", stream="s")
        assert survivor.call("check_tensor", key="a", what="sum", n_ranks=2)
        submit(trainers[:1], "y")
    since = time.time()
    victim.kill()
    expect_told(failures([survivor], "y" if when == "after" else "x", since=since),
                r"\bepoch 1\b", rf"rank 1\b.*\bpid {victim.pid}\b.*killed", rf"\bnode {NODE}\b")
    assert survivor.call("await_stream", stream="s")
    trainers[1] = node.trainer(daemon, devices[1])
    renew(trainers[1], kind="malloc")
    settle([survivor], "shutdown")
    answers = world.join(trainers)
    expect_ok(answers)
    assert {a["epoch"] for a in answers} == {2}
    sums_are_right(trainers, 3)


@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind, devices", [("malloc", [0, 0]), ("chunks", [0, 1])])
def test_a_trainer_killed_while_its_memory_is_imported(
        world: World, kind: str, devices: list[int], order: str, when: str) -> None:
    lost(world, kind, order, devices, when)


def test_a_trainer_killed_while_a_communicator_is_made(world: World) -> None:
    node = Node(world, nccl={"INIT_MS": 1000})
    daemon = node.node()
    trainers = join(world, node, daemon, [0, 1])
    write_all(trainers)
    submit(trainers)
    eventually(lambda: [c["state"] for c in daemon.gradctl_json("job", "job")["communicators"]] ==
               ["creating"], "it is being made")
    victim = trainers[1]
    since = time.time()
    victim.kill()
    expect_told(failures(trainers[:1], since=since), rf"rank 1\b.*\bpid {victim.pid}\b.*killed")
    trainers[1] = node.trainer(daemon, 1)
    renew(trainers[1])
    settle(trainers[:1], "shutdown")
    expect_ok(world.join(trainers))
    sums_are_right(trainers, 2)


@pytest.mark.parametrize("devices", [[0, 0], [0, 1]], ids=["one", "two"])
def test_a_stopped_trainer_delays_and_hurts_nobody(world: World, devices: list[int]) -> None:
    node = Node(world)
    daemon = node.node(order="flag")
    trainers = join(world, node, daemon, devices)
    bystanders = join(world, node, daemon, devices, "bystander")
    write_all(trainers)
    os.kill(trainers[1].pid, signal.SIGSTOP)
    submit(trainers[:1])
    assert trainers[0].call("wait", handle="x", timeout_s=0.05)["status"] == STATUS["PENDING"]
    sums_are_right(bystanders, 3)
    os.kill(trainers[1].pid, signal.SIGCONT)
    submit(trainers[1:])
    expect_ok(settle(trainers, "wait", handle="x"))
    assert all(settle(trainers, "await_stream", stream="s"))
    assert all(settle(trainers, "check_tensor", key="a", what="sum", n_ranks=2))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("devices", [[0, 0], [0, 1]], ids=["one", "two"])
def test_a_worker_killed_while_streams_wait(world: World, devices: list[int], order: str) -> None:
    node = Node(world, DEAD="complete")
    daemon = node.node(order=order)
    trainers = join(world, node, daemon, devices)
    sums_are_right(trainers)
    write_all(trainers, gate="later")
    submit(trainers)
    expect_ok(settle(trainers, "wait_stream", handle="x", stream="s", timeout_s=10.0))
    worker = daemon.worker_pid()
    since = time.time()
    os.kill(worker, signal.SIGKILL)
    expect_told(failures(trainers, since=since), *WHERE, rf"worker .*\bpid {worker}\b.*killed")
    settle(trainers, "open_gate", gate="later")
    assert all(settle(trainers, "await_stream", stream="s"))
    again(world, trainers, n=3)
