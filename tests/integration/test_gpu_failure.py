# SPDX-License-Identifier: Apache-2.0
"""What fails on GPUs, in NCCL and around them, on the fakes: every rank hears what, where and why;
no sum is wrong; the node is usable, and the next epoch has its device path and right sums; nothing
of it is left."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any, Iterable

import pytest

import gradd_ctypes as api
from gpu import FAKES, Gpus
from gradd_ctypes import STATUS
from harness import SLOW, Daemon, Trainer, World, eventually, settle, wait_for_exit

pytestmark = pytest.mark.skipif(
    not ((FAKES / "libcuda.so.1").exists() and (FAKES / "libnccl.so.2").exists()),
    reason=f"{FAKES}/libcuda.so.1 or libnccl.so.2 is not built")

N = 5000
NODE = "gpunode"
ORDERS = ["event", "flag"]
FAKE_SPOKE = re.compile(r"^fake lib(cuda|nccl): .*$", re.MULTILINE)


class Node(Gpus):
    """Gpus whose end is looked at: no rule of the libraries was broken, nothing is left."""

    def __init__(self, world: World, nccl: dict[str, Any] | None = None, **cuda: Any) -> None:
        super().__init__(world, **cuda)
        self.environment |= {f"GRADD_FAKE_NCCL_{key}": str(v) for key, v in (nccl or {}).items()}

    def inject(self, items: str) -> None:
        """Errors of the driver from now on, in all processes."""
        with open(os.path.join(self.dir, "fail"), "r+b") as file:
            file.write(items.encode().ljust(1024, b"\0"))

    def node(self, **settings: Any) -> Daemon:
        return self.daemon(**{"node_name": NODE, "backend": "nccl", "job_linger_s": 0.5 * SLOW,
                              **settings})

    def _remove(self) -> list[str]:
        problems = []
        for source in [t.errors for t in self.world.trainers] + [d.log for d in self.world.daemons]:
            problems += [match.group() for match in FAKE_SPOKE.finditer(source.text())]
        problems += self.left()
        return problems + super()._remove()

    def left(self) -> list[str]:
        """Files of memory, events and meetings of processes that are gone, after the next start."""
        sweeper = self.world.popen(
            ["/usr/bin/python3", "-c", "import ctypes; assert ctypes.CDLL('libcuda.so.1').cuInit(0)"
             " == 0"], env={**os.environ, **self.environment})
        sweeper.wait(20)
        # A meeting of NCCL's ranks to which not all have come keeps its file.
        known = re.compile(r"counts\.\d+|lock|fail|exclusive\d+|gradd-fake-nccl\.\w+")
        return [f"left in {self.dir}: {name}" for name in os.listdir(self.dir)
                if not known.fullmatch(name)]


def join(world: World, node: Node, daemon: Daemon, devices: Iterable[int],
         job: str = "job", is_on: bool = True) -> list[Trainer]:
    trainers = [node.trainer(daemon, device) for device in devices]
    for answer in world.join(trainers, job):
        assert answer["status"] == 0, answer
    for trainer in trainers:
        path = trainer.call("device_path")
        assert path["is_on"] == is_on, path
        trainer.call("new_stream", key="s")
    expect_ok(settle(trainers, "tensor", key="a", count=N))
    return trainers


def expect_ok(answers: list[dict[str, Any]]) -> None:
    assert [a["status"] for a in answers] == [0] * len(answers), answers


def submit(trainers: list[Trainer], name: str = "x", **more: Any) -> None:
    expect_ok(settle(trainers, "submit_device", handle=name, stream="s", ops=[
        {"kind": api.ALLREDUCE, "name": name, "redop": api.SUM, "in": "a", "out": "a", "count": N,
         **more}]))


def write_all(trainers: list[Trainer], **more: Any) -> None:
    for rank, trainer in enumerate(trainers):
        trainer.call("write", key="a", rank=rank, stream="s", **more)


def sums_are_right(trainers: list[Trainer], n: int = 1) -> None:
    for rank, trainer in enumerate(trainers):
        trainer.send("device_steps", n=n, key="a", rank=rank, size=len(trainers), stream="s")
    for trainer in trainers:
        answer = trainer.reply()
        assert (answer["done"], answer.get("n_right")) == (n, n), answer


def failures(trainers: list[Trainer], name: str = "x", since: float = 0.0,
             within_s: float = 2.0) -> list[str]:
    """What every rank is told of the op, in time."""
    answers = settle(trainers, "wait", handle=name, timeout_s=20.0 * SLOW)
    for answer in answers:
        assert answer["status"] < 0, answer
        if since:
            assert answer["at"] - since < within_s * SLOW, answer
    return [answer["error"] for answer in answers]


def expect_told(texts: list[str], *words: str, job: str = "job") -> None:
    for text in texts:
        for word in (rf"\bjob {job}\b", *words):
            assert re.search(word, text), (word, text)


def again(world: World, trainers: list[Trainer], job: str = "job", n: int = 1,
          epoch: int = 2) -> None:
    """All leave and join the next epoch, whose sums on the device are right."""
    settle(trainers, "shutdown")
    answers = world.join(trainers, job)
    expect_ok(answers)
    assert {a["epoch"] for a in answers} == {epoch}, answers
    assert [p["is_on"] for p in settle(trainers, "device_path")] == [1] * len(trainers)
    sums_are_right(trainers, n)


GPU = r"GPU-fa4efa4e-0000-4000-8000-00000000000\d"
WHERE = (r"\bepoch 1\b", rf"\bnode {NODE}\b")


# ------------------------------------------------------------------ ops and communicators


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


@pytest.mark.limit(90)
def test_what_does_not_end_takes_the_worker_with_it(world: World) -> None:
    """Three jobs: an abort of NCCL that does not return, and wait for an event of a trainer that
    was killed, with the GPU to itself and with NCCL. All ranks hear of it at once; the next epoch
    begins when the GPUs are free, in another worker."""
    node = Node(world)
    settings = {"order": "event", "job_linger_s": 3}
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
        trainers[1].call("new_stream", key="s")
        trainers[1].call("tensor", key="a", count=N)
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
        trainers[0].call("new_stream", key="s")  # the old one waits for ever
        trainers[0].call("tensor", key="a", count=N)
        sums_are_right(trainers)
    assert "NCCL did not abort its communicators within 10 s" in impatient.log.text()
    assert daemon.log.text().count("did not end within 10 s") == 2
    assert not set(workers) & set(daemon.worker_pids() + impatient.worker_pids())


# ------------------------------------------------------------------ GPUs that break


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


# ------------------------------------------------------------------ trainers


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
    trainers[1].call("new_stream", key="s")
    trainers[1].call("tensor", key="a", count=N, kind="malloc")
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
