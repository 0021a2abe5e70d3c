# SPDX-License-Identifier: Apache-2.0
"""What fails in an op, in NCCL or in a GPU: every rank hears what, where and why; the next epoch
has its device path and right sums."""

from __future__ import annotations

import time

import pytest

from gpu_failure import (
    GPU, NODE, Node, WHERE, again, expect_ok, expect_told, failures, join, needs_fakes, renew,
    submit, sums_are_right, write_all,
)
from harness import World, settle, wait_for_exit

pytestmark = needs_fakes


def test_an_op_that_does_not_end_is_told_at_op_timeout(world: World) -> None:
    node = Node(world, nccl={"HANG_AT": 2})
    trainers = join(world, node, node.node(op_timeout_s=0.5), [0, 1])
    sums_are_right(trainers)
    since = time.time()
    submit(trainers)
    expect_told(failures(trainers, since=since), *WHERE, GPU, r"0\.5 s \(op_timeout_s\)")
    again(world, trainers)


def test_an_input_that_never_comes_is_told_at_op_timeout(world: World) -> None:
    """All have submitted, but the stream of one does not come to it."""
    node = Node(world)
    daemon = node.node(op_timeout_s=0.5, order="flag")
    trainers = join(world, node, daemon, [0, 0])
    trainers[0].call("write", key="a", rank=0, stream="s")
    trainers[1].call("write", key="a", rank=1, stream="s", gate="later")
    since = time.time()
    submit(trainers)
    expect_told(failures(trainers, since=since), *WHERE, GPU, r"op_timeout_s")
    trainers[1].call("open_gate", gate="later")
    assert all(settle(trainers, "await_stream", stream="s"))
    again(world, trainers)


@pytest.mark.parametrize("result", [6, 2])
def test_an_error_that_nccl_meets_is_told_to_all(world: World, result: int) -> None:
    node = Node(world, nccl={"ASYNC": f"2:{result}"})
    daemon = node.node()
    trainers = join(world, node, daemon, [0, 1])
    sums_are_right(trainers)
    since = time.time()
    submit(trainers)
    expect_told(failures(trainers, since=since), *WHERE, GPU, "NCCL")
    daemon.log.wait_for("epoch failed: .*NCCL")
    again(world, trainers)


def test_a_launch_that_nccl_refuses_is_told_to_all(world: World) -> None:
    node = Node(world, nccl={"FAIL": "ncclAllReduce:3:3"})
    trainers = join(world, node, node.node(), [0, 1])
    sums_are_right(trainers)
    submit(trainers)
    expect_told(failures(trainers), *WHERE, "NCCL could not launch")
    again(world, trainers)


def test_a_communicator_that_does_not_come_up_is_told_to_all(world: World) -> None:
    node = Node(world, nccl={"INIT_HANGS": 1})
    trainers = join(world, node, node.node(op_timeout_s=0.5), [0, 1])
    since = time.time()
    write_all(trainers)
    submit(trainers)
    expect_told(failures(trainers, since=since), *WHERE, "did not connect the GPUs within 0.5 s",
                GPU)
    # Ranks that share a GPU need no NCCL.
    settle(trainers, "shutdown")
    again_on = join(world, node, trainers[0].daemon, [0, 0])  # type: ignore[arg-type]
    sums_are_right(again_on)


def test_a_communicator_that_nccl_refuses_is_told_to_all(world: World) -> None:
    node = Node(world, nccl={"FAIL": "ncclCommInitRankConfig:2:2"})
    trainers = join(world, node, node.node(), [0, 1])
    write_all(trainers)
    submit(trainers)
    expect_told(failures(trainers), *WHERE, "NCCL could not begin a communicator", GPU)
    again(world, trainers)


@pytest.mark.timing
@pytest.mark.limit(90)
def test_what_does_not_end_takes_the_worker_with_it(world: World) -> None:
    """Three jobs: an abort of NCCL that does not return, and wait for an event of a trainer that
    was killed, with the GPU to itself and with NCCL. All ranks hear of it at once; the next epoch
    begins when the GPUs are free, in another worker."""
    node = Node(world)
    settings = {"order": "event", "job_linger_s": 10}
    daemon = node.node(**settings)
    node.environment |= {"GRADD_FAKE_NCCL_HANG_AT": "2", "GRADD_FAKE_NCCL_ABORT_HANGS": "1"}
    impatient = node.node(op_timeout_s=0.5, **settings)
    hanging = join(world, node, impatient, [0, 1], "hanging")
    sums_are_right(hanging)
    submit(hanging)
    waiting = {}
    for job, devices in (("one", [0, 0]), ("two", [0, 1])):
        trainers = join(world, node, daemon, devices, job)
        trainers[0].call("write", key="a", rank=0, stream="s")
        trainers[1].call("write", key="a", rank=1, stream="s", gate="never")
        submit(trainers)
        expect_ok([trainers[0].call("wait_stream", handle="x", stream="s", timeout_s=10.0)])
        waiting[job] = trainers
    workers = daemon.worker_pids() + impatient.worker_pids()
    assert len(workers) == 3
    expect_told(failures(hanging), *WHERE, "op_timeout_s", job="hanging")
    for job, trainers in waiting.items():
        since = time.time()
        victim = trainers[1]
        victim.kill()
        expect_told(failures(trainers[:1], since=since), rf"\brank 1\b.*\bpid {victim.pid}\b",
                    rf"\bnode {NODE}\b", job=job)
        trainers[1] = node.trainer(daemon, 0 if job == "one" else 1)
        renew(trainers[1])
    again_all = {"hanging": hanging, **waiting}
    for trainers in again_all.values():
        settle([t for t in trainers if t is trainers[0] or trainers is hanging], "shutdown")
    for job, trainers in again_all.items():
        for rank, trainer in enumerate(trainers):
            trainer.send("init", **trainer.init_arguments(rank, 2, job))
    for job, trainers in again_all.items():
        answers = [t.reply() for t in trainers]
        expect_ok(answers)
        assert {a["epoch"] for a in answers} == {2}
        renew(trainers[0])
        sums_are_right(trainers)
    assert "NCCL did not abort its communicators within 10 s" in impatient.log.text()
    assert "what was launched on the GPUs did not end within 10 s" in daemon.log.text()
    assert "NCCL did not abort its communicators within 10 s" in daemon.log.text()  # job two's
    assert not set(workers) & set(daemon.worker_pids() + impatient.worker_pids())


@pytest.mark.parametrize("devices", [[0, 0], [0, 1]], ids=["one", "two"])
def test_a_lost_context_is_told_and_another_worker_comes(world: World, devices: list[int]) -> None:
    node = Node(world)
    daemon = node.node()
    trainers = join(world, node, daemon, devices)
    sums_are_right(trainers)
    worker = daemon.worker_pid()
    since = time.time()
    node.inject("gradd-worker/cuEventQuery:1+:700")
    write_all(trainers)
    submit(trainers)
    expect_told(failures(trainers, since=since), *WHERE, GPU, "CUDA_ERROR_ILLEGAL_ADDRESS|700")
    assert wait_for_exit(worker, 5.0)
    node.inject("")
    again(world, trainers, n=3)
    assert daemon.worker_pid() != worker


def test_a_launch_that_the_driver_refuses_is_told(world: World) -> None:
    node = Node(world)
    daemon = node.node()
    trainers = join(world, node, daemon, [0, 0])
    sums_are_right(trainers)
    node.inject("gradd-worker/cuLaunchKernel:1+:719")
    submit(trainers)
    expect_told(failures(trainers), *WHERE, GPU, "could not launch.*719")
    node.inject("")
    again(world, trainers, n=3)
