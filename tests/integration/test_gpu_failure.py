# SPDX-License-Identifier: Apache-2.0
"""What fails on GPUs, in NCCL and around them, on the fakes: every rank hears what, where and why;
no sum is wrong; the node is usable, and the next epoch has its device path and right sums; nothing
of it is left."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import time
from pathlib import Path
from random import Random
from typing import Any, Iterable

import pytest

import gradd_ctypes as api
from gpu import FAKES, Gpus
from gradd_ctypes import STATUS
from harness import (
    SLOW, Daemon, Trainer, World, client_environment, eventually, settle, wait_for_exit,
)
from wire import RawConnection

pytestmark = pytest.mark.skipif(
    not ((FAKES / "libcuda.so.1").exists() and (FAKES / "libnccl.so.2").exists()),
    reason=f"{FAKES}/libcuda.so.1 or libnccl.so.2 is not built")

N = 5000
SEED = int(os.environ.get("GRADD_TEST_SEED") or time.time_ns() % 1000000)
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
             " == 0"], env={**client_environment(), **self.environment})
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
    assert "what was launched on the GPUs did not end within 10 s" in daemon.log.text()
    assert "NCCL did not abort its communicators within 10 s" in daemon.log.text()  # job two's
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
    trainers[1].call("new_stream", key="s")
    trainers[1].call("tensor", key="a", count=N)
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


# ------------------------------------------------------------------ imports, contexts, libraries


@pytest.mark.parametrize("order", ORDERS)
def test_memory_that_can_not_be_imported_is_copied(world: World, order: str) -> None:
    """By the trainer, to memory that can."""
    node = Node(world)
    trainers = join(world, node, node.node(order=order), [0, 0])
    node.inject("gradd-worker/cuIpcOpenMemHandle:*:201")
    sums_are_right(trainers, 3)
    assert settle(trainers, "cuda_counts", names=["cuMemCreate"]) == [{"cuMemCreate": 1}] * 2


def test_an_import_that_fails_is_told_and_heals(world: World) -> None:
    """The rank whose memory it is hears why, when it submits; nothing else is hurt."""
    node = Node(world)
    trainers = join(world, node, node.node(), [0, 0])
    expect_ok(settle(trainers, "tensor", key="a", count=N, kind="chunks", chunks=[2 << 20]))
    node.inject("gradd-worker/cuMemImportFromShareableHandle:*:201")
    answers = settle(trainers, "submit_device", handle="x", stream="s", ops=[
        {"kind": api.ALLREDUCE, "name": "x", "redop": api.SUM, "in": "a", "out": "a", "count": N}])
    for answer in answers:
        assert answer["status"] < 0 and "201" in answer["error"], answer
    node.inject("")
    sums_are_right(trainers, 2)


@pytest.mark.parametrize("error, word", [(2, "OUT_OF_MEMORY"), (46, "UNAVAILABLE")])
def test_a_gpu_without_room_for_a_context_is_told(world: World, error: int, word: str) -> None:
    """Memory that is full, or a compute mode that lets nobody else in."""
    node = Node(world)
    daemon = node.node()
    trainers = join(world, node, daemon, [0, 0])
    node.inject(f"gradd-worker/cuDevicePrimaryCtxRetain:*:{error},"
                f"gradd-worker/cuCtxCreate:*:{error}")
    for answer in settle(trainers, "submit_device", handle="x", stream="s", ops=[
            {"kind": api.ALLREDUCE, "name": "x", "redop": api.SUM, "in": "a", "out": "a",
             "count": N}]):
        assert answer["status"] < 0 and word in answer["error"], answer
        assert re.search(GPU, answer["error"]), answer
    node.inject("")
    again(world, trainers)


def status_of_node(daemon: Daemon) -> dict[str, Any]:
    eventually(lambda: daemon.gradctl_json("status")["cuda_driver"], "the GPUs were looked for")
    return daemon.gradctl_json("status")


def staged_sums(world: World, node: Node, daemon: Daemon) -> None:
    trainers = join(world, node, daemon, [0, 0], is_on=False)
    text = trainers[0].call("device_path")["text"]
    assert text == status_of_node(daemon)["device_text"], text
    sums_are_right(trainers, 2)
    eventually(lambda: daemon.gradctl_json("job", "job")["staged_ops"] >= 2, "they are counted")


@pytest.mark.parametrize("environment, words", [
    ({"GRADD_FAKE_CUDA_COMPUTE_MODE": "3"}, "compute mode.*second process"),
    ({"GRADD_FAKE_CUDA_WITHOUT": "cuIpcOpenMemHandle"}, "cuIpcOpenMemHandle"),
    ({"GRADD_FAKE_NCCL_VERSION": "21700"}, r"NCCL 2\.17\.0 is too old"),
    ({"CUDA_VISIBLE_DEVICES": ""}, "no CUDA-capable device"),
    ({"LD_LIBRARY_PATH": "no-nccl"}, r"libnccl\.so\.2"),
    ({"LD_LIBRARY_PATH": "nothing"}, r"libcuda\.so\.1"),
], ids=["exclusive", "lacking", "old NCCL", "no GPU", "no NCCL", "no driver"])
def test_what_the_node_lacks_is_said_and_the_host_serves(
        world: World, tmp_path: Path, environment: dict[str, str], words: str) -> None:
    """The trainers' own libraries are well."""
    node = Node(world)
    path = environment.get("LD_LIBRARY_PATH")
    if path is not None:
        (tmp_path / "libnccl.so.2").write_text("not a library, nor the machine's own\n")
        if path == "no-nccl":
            (tmp_path / "libcuda.so.1").symlink_to(FAKES / "libcuda.so.1")
        environment = {"LD_LIBRARY_PATH": str(tmp_path)}
    own = dict(node.environment)
    node.environment |= environment
    daemon, strict = node.node(backend="auto"), node.node()
    node.environment = own
    status = status_of_node(daemon)
    if path == "nothing" and status["gpus"]:
        pytest.skip("this machine has a driver of its own")
    assert status["device_path"] is False, status
    assert re.search(words, status["device_text"]), status["device_text"]
    if environment.get("GRADD_FAKE_CUDA_COMPUTE_MODE") != "3":
        staged_sums(world, node, daemon)
    # backend = nccl takes no other way.
    status_of_node(strict)
    trainers = [node.trainer(strict) for _ in range(2)]
    for answer in world.join(trainers, "strict"):
        assert answer["name"] == "GRADD_ERR_UNAVAILABLE", answer
        assert re.search(rf"job strict: backend = nccl on node {NODE}.*({words})",
                         answer["error"]), answer


@pytest.mark.parametrize("lacks, words", [
    ({"LD_LIBRARY_PATH": str(FAKES / "nccl_2_18") + ":" + str(FAKES)}, "ncclCommRevoke"),
    ({"GRADD_FAKE_CUDA_WITHOUT": "cuStreamWaitValue64_v2"}, ""),
    ({"GRADD_FAKE_CUDA_IPC_EVENTS": "0"}, "")], ids=["NCCL 2.18", "no flags", "no events"])
@pytest.mark.parametrize("devices", [[0, 0], [0, 1]], ids=["one", "two"])
def test_optional_functions_are_done_without(world: World, devices: list[int],
                                             lacks: dict[str, str], words: str) -> None:
    node = Node(world)
    node.environment |= lacks
    daemon = node.node()
    trainers = join(world, node, daemon, devices)
    sums_are_right(trainers, 3)
    assert re.search(words, str(status_of_node(daemon))), status_of_node(daemon)


# ------------------------------------------------------------------ trainers that do not agree


def test_host_and_device_memory_do_not_mix(world: World) -> None:
    node = Node(world)
    trainers = join(world, node, node.node(), [0, 0])
    sums_are_right(trainers)
    trainers[1].call("alloc", key="host", count=N)
    submit(trainers[:1])
    expect_ok([trainers[1].call("submit", handle="x", ops=[
        {"kind": api.ALLREDUCE, "dtype": api.F32, "name": "x", "redop": api.SUM, "in": "host",
         "out": "host", "count": N}])])
    texts = [t.call("wait", handle="x") for t in trainers]
    assert [a["status"] for a in texts] == [STATUS["DISAGREE"]] * 2, texts
    expect_told([a["error"] for a in texts], "rank 0", "rank 1", "device memory", "host memory")
    assert trainers[0].call("await_stream", stream="s")
    sums_are_right(trainers, 2)


@pytest.mark.parametrize("order", ORDERS)
def test_memory_that_came_back_is_not_taken_for_the_old(world: World, order: str) -> None:
    """Freed without a word, and again with the same address: in the epoch and in the next."""
    node = Node(world)
    trainers = join(world, node, node.node(order=order), [0, 1])
    for epoch in (1, 2):
        for _ in range(2):
            sums_are_right(trainers)
            expect_ok(settle(trainers, "forget", key="a"))
            settle(trainers, "free_tensor", key="a")
            expect_ok(settle(trainers, "tensor", key="a", count=N))
        if epoch == 1:
            again(world, trainers)


def test_two_jobs_on_the_same_gpus_at_once(world: World) -> None:
    node = Node(world, DELAY_US=200, SEED=9)
    daemon = node.node()
    jobs = [join(world, node, daemon, devices, f"job{i}")
            for i, devices in enumerate(([0, 1], [1, 0], [0, 0]))]
    for trainers in jobs:
        for rank, trainer in enumerate(trainers):
            trainer.send("device_steps", n=30, key="a", rank=rank, size=2, stream="s")
    answers = [trainer.reply() for trainers in jobs for trainer in trainers]
    assert [(a["done"], a.get("n_right")) for a in answers] == [(30, 30)] * 6, answers


# ------------------------------------------------------------------ liars


def test_a_hostile_job_hurts_only_itself(world: World) -> None:
    """Tickets, handles, queues and counts beyond all sense, in the worker of another job."""
    node = Node(world)
    daemon = node.node()
    honest = join(world, node, daemon, [0, 0], "honest")
    random = Random(SEED)
    for i in range(3):
        connection = daemon.connect()
        connection.hello()
        connection.send("join", job=f"liar{i}", rank=0, size=1, local_rank=0)
        epoch = connection.expect("joined")["epoch"]
        worker = RawConnection(socket.socket(fileno=connection.take_fd()))
        try:
            for _ in range(60):
                lie(worker, random, epoch)
        except OSError:
            pass  # it was thrown out
        worker.close()
        connection.close()
        sums_are_right(honest, 2)


def lie(worker: RawConnection, random: Random, epoch: int) -> None:
    def number() -> int:
        return random.choice([0, 1, 2, 63, 64, 256, 257, (1 << 31) - 1, 1 << 32, (1 << 63) - 1,
                              1 << 63, (1 << 64) - 1])

    def number32() -> int:
        return number() & 0xFFFFFFFF

    gpu = bytes([0xFA, 0x4E, 0xFA, 0x4E, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0,
                 random.choice([0, 1, 2, 255])])
    fds = []
    if random.random() < 0.5:
        fds = [os.memfd_create("lie", os.MFD_ALLOW_SEALING) for _ in range(random.choice([1, 2]))]
        for fd in fds:
            os.ftruncate(fd, random.choice([0, 4096, 2 << 20]))
            if random.random() < 0.7:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    what = random.randrange(6)
    buffer = {"region": random.choice([0, 1, 2]), "offset": number()}
    if what == 0:
        worker.send("open_queue", fds[:1], queue=random.choice([0, 1, 2]), device=gpu,
                    slots=random.choice([0, 1, 2, 256, 257, 1 << 31]), order=random.randrange(4),
                    events=[random.randbytes(64) for _ in range(random.choice([0, 1, 2]))])
    elif what == 1:
        worker.send("register", fds[:1], region=random.choice([0, 1, 2]), bytes=number(),
                    kind=random.randrange(4), device=gpu, handle=random.randbytes(64),
                    chunks=number32())
    elif what == 2:
        worker.send("register_chunks", fds, region=random.choice([1, 2]),
                    bytes=[number() for _ in fds])
    elif what == 3:
        worker.send("close_queue", queue=random.choice([0, 1, 2, 99]))
    elif what == 4:
        worker.send("unregister", region=random.choice([0, 1, 2]))
    else:
        worker.send("submit_batch", epoch=epoch, submits=[{
            "id": number(), "name": "x", "kind": random.randrange(12),
            "dtype": random.randrange(12), "redop": random.randrange(6), "count": number(),
            "ready": number(), "in": buffer, "out": buffer, "queue": random.choice([0, 1, 2, 99]),
            "ticket": number(), "is_device": random.choice([0, 1]), "group_size": number32(),
            "signal": buffer, "signal_value": number()}])
    for fd in fds:
        os.close(fd)


# ------------------------------------------------------------------ several nodes


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
        trainer.call("new_stream", key="s")
        trainer.call("tensor", key="a", count=N)
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


# ------------------------------------------------------------------ chaos

CHAOS_S = float(os.environ.get("GRADD_TEST_CHAOS_S") or 15.0)
INJECTED = ["cuEventQuery:1+:700", "cuLaunchKernel:1+:719", "cuStreamWaitEvent:1+:700",
            "cuIpcOpenMemHandle:*:201", "cuMemAlloc:*:2", "cuEventRecord:1+:999",
            "cuStreamWriteValue64:1+:1", "cuMemcpyDtoDAsync:1+:719",
            "cuDevicePrimaryCtxRetain:*:2", "cuMemImportFromShareableHandle:*:1"]


class Chaos:
    """One job that takes steps for ever; whatever happens to it, it joins again."""

    def __init__(self, world: World, node: Node, daemon: Daemon, job: str,
                 devices: list[int]) -> None:
        self.world, self.node, self.daemon, self.job = world, node, daemon, job
        self.devices = devices
        self.trainers = [self.spawn(rank) for rank in range(len(devices))]
        self.n_epochs = self.n_steps = self.n_told = 0

    def spawn(self, rank: int) -> Trainer:
        trainer = self.node.trainer(self.daemon, self.devices[rank])
        self.renew(trainer)
        return trainer

    @staticmethod
    def renew(trainer: Trainer) -> None:
        """What a stream still waits for stays behind with it."""
        trainer.call("new_stream", key="s")
        trainer.call("tensor", key="a", count=N)

    def begin(self) -> None:
        for rank, trainer in enumerate(self.trainers):
            if trainer.process.poll() is not None:
                self.trainers[rank] = self.spawn(rank)
        for trainer in self.trainers:
            trainer.call("shutdown_all")
            self.renew(trainer)
        for rank, trainer in enumerate(self.trainers):
            trainer.send("init", **trainer.init_arguments(rank, len(self.trainers), self.job))
        expect_told_or_ok = [trainer.reply(30 * SLOW) for trainer in self.trainers]
        for answer in expect_told_or_ok:
            assert answer["status"] == 0 or answer["error"], answer
        self.n_epochs += all(a["status"] == 0 for a in expect_told_or_ok)

    def steps(self, n: int) -> None:
        for rank, trainer in enumerate(self.trainers):
            trainer.send("device_steps", n=n, key="a", rank=rank, size=len(self.trainers),
                         stream="s")

    def collect(self, n: int) -> None:
        """Sums are right, or the step failed in words; nothing else."""
        for trainer in self.trainers:
            try:
                answer = trainer.reply(30 * SLOW)
            except AssertionError:
                assert trainer.process.poll() is not None, "a trainer hangs"
                trainer.is_done = True
                continue
            if answer["status"] == 0:
                assert answer["n_right"] == n, answer
                self.n_steps += n
            else:
                assert answer["error"] and re.search(r"\bjob\b|GPU|CUDA", answer["error"]), answer
                self.n_told += 1


def strike(random: Random, node: Node, daemon: Daemon, jobs: list[Chaos]) -> str:
    victim = random.choice(random.choice(jobs).trainers)
    what = random.choice(["trainer", "worker", "stop trainer", "stop worker", "inject", "nothing"])
    workers = daemon.worker_pids()
    if what == "trainer":
        victim.process.kill()
        victim.process.wait(20)
    elif what == "worker" and workers:
        os.kill(random.choice(workers), signal.SIGKILL)
    elif what.startswith("stop"):
        pid = victim.pid if what == "stop trainer" else random.choice(workers or [victim.pid])
        os.kill(pid, signal.SIGSTOP)
        time.sleep(random.random() * 0.2)
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass
    elif what == "inject":
        what = "gradd-worker/" + random.choice(INJECTED)
        node.inject(what)
        time.sleep(random.random() * 0.1)
        node.inject("")
    return what


@pytest.mark.limit(120)
@pytest.mark.parametrize("order", ORDERS)
def test_chaos(world: World, order: str) -> None:
    """Random kills, stops and errors on two jobs that share GPUs: never a wrong sum, never a rank
    that is told nothing, and at the end all is well. GRADD_TEST_SEED repeats the choices."""
    print(f"GRADD_TEST_SEED={SEED}")
    random = Random(SEED)
    node = Node(world, DELAY_US=300, SEED=SEED, DEAD="complete")
    daemon = node.node(order=order, op_timeout_s=3)
    jobs = [Chaos(world, node, daemon, "one", [0, 0]), Chaos(world, node, daemon, "two", [0, 1, 0])]
    until = time.monotonic() + CHAOS_S / len(ORDERS)
    while time.monotonic() < until:
        for job in jobs:
            job.begin()
        for job in jobs:
            job.steps(12)
        time.sleep(random.random() * 0.03)
        print(strike(random, node, daemon, jobs))
        for job in jobs:
            job.collect(12)
    node.inject("")
    for job in jobs:
        job.begin()
        job.steps(5)
        before = job.n_steps
        job.collect(5)
        assert job.n_steps - before == 5 * len(job.trainers), "the last steps"
        print(job.job, job.n_epochs, "epochs", job.n_steps, "right steps", job.n_told, "told")
        assert job.n_epochs > 1 and job.n_steps > 0
