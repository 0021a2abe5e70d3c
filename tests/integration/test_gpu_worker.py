# SPDX-License-Identifier: Apache-2.0
"""Device memory in the worker and the daemon, spoken to by raw sockets, on the fake driver: what
liars are told, who is released when ops end, and what is seen from outside."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from typing import Any, Callable, Iterator

import pytest

import gradd_ctypes as api
from gpu import FAKES, Gpus
from harness import Daemon, World, eventually, settle
from wire import RawConnection

pytestmark = pytest.mark.skipif(not (FAKES / "libcuda.so.1").exists(),
                                reason=f"{FAKES}/libcuda.so.1 is not built")

EVENT, FLAG = 1, 2  # enum QueueOrder
MEMFD, CUDA_IPC, CUDA_VMM = 0, 1, 2  # enum RegionKind
PAGE, FINISHED = 4096, 64


def uuid(gpu: int = 0) -> bytes:
    return bytes([0xFA, 0x4E, 0xFA, 0x4E, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, gpu])


def sealed(bytes_: int) -> int:
    fd = os.memfd_create("raw", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, bytes_)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class Raw:
    """The ranks of a job as raw sockets to the worker. Host memory is region 1 of each."""

    def __init__(self, daemon: Daemon, n: int = 2) -> None:
        self.daemon_side = [daemon.connect() for _ in range(n)]
        for rank, connection in enumerate(self.daemon_side):
            connection.hello()
            connection.send("join", job="raw", rank=rank, size=n, local_rank=rank)
        self.joined = [connection.expect("joined") for connection in self.daemon_side]
        self.worker = [RawConnection(socket.socket(fileno=c.take_fd())) for c in self.daemon_side]
        self.memory = []
        for rank in range(n):
            fd = sealed(PAGE)
            self.memory.append(mmap.mmap(fd, PAGE))
            self.register(rank, 1, fds=[fd], bytes=PAGE)
            os.close(fd)

    def close(self) -> None:
        for connection in self.daemon_side + self.worker:
            connection.close()

    def register(self, rank: int, region: int, fds: list[int] | None = None, **fields: Any) -> str:
        self.worker[rank].send("register", fds=fds or [], region=region, **fields)
        reply = self.worker[rank].expect("region_reply")
        assert reply["region"] == region
        assert ("code" in reply) == ("text" in reply), reply
        return reply.get("text", "")

    def open_queue(self, rank: int, queue: int = 1, gpu: int = 0, **fields: Any) -> str:
        """A queue of two slots in flag order, or as the fields say. Its page is self.words."""
        fds = []
        if "order" not in fields:
            fds = [sealed(PAGE)]
            self.words = mmap.mmap(fds[0], PAGE)
            fields["order"] = FLAG
        fields = {"queue": queue, "device": uuid(gpu), "slots": 2, **fields}
        self.worker[rank].send("open_queue", fds=fds, **fields)
        for fd in fds:
            os.close(fd)
        reply = self.worker[rank].expect("queue_reply")
        assert reply["queue"] == queue
        return reply.get("text", "")

    def submit(self, rank: int, **fields: Any) -> None:
        submit = {"id": 1, "name": "x", "kind": api.ALLREDUCE, "dtype": api.F32, "redop": api.SUM,
                  **fields}
        self.worker[rank].send("submit_batch", epoch=self.joined[rank]["epoch"], submits=[submit])

    def completion(self, rank: int) -> dict[str, Any]:
        while True:
            batch = self.worker[rank].expect("completion_batch")
            if "completions" in batch:
                return batch["completions"][0]

    def refused(self, rank: int, **fields: Any) -> str:
        self.submit(rank, **fields)
        completion = self.completion(rank)
        assert completion.get("code"), completion
        return completion["text"]

    def word(self, rank: int, offset: int) -> int:
        return int.from_bytes(self.memory[rank][offset:offset + 8], "little")


Join = Callable[..., Raw]
HOST = {"count": 4, "ready": 4, "in": {"region": 1, "offset": 0}, "out": {"region": 1, "offset": 16}}


@pytest.fixture
def gpus(world: World) -> Gpus:
    return Gpus(world)


@pytest.fixture
def join(gpus: Gpus) -> Iterator[Join]:
    """Makes a daemon with these settings and two raw ranks."""
    jobs = []

    def make(**settings: Any) -> Raw:
        jobs.append(Raw(gpus.daemon(**settings)))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


# ------------------------------------------------------------------ what is told


def test_device_memory_that_makes_no_sense_is_refused_in_words(join: Join) -> None:
    raw = join()
    assert raw.joined[0]["device_path"] is True
    handle = bytes(64)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("names its GPU by 16 bytes", {"kind": CUDA_IPC, "device": b"short", "handle": handle}),
        ("IPC handle has 64 bytes", {"kind": CUDA_IPC, "device": uuid(), "handle": b"x"}),
        ("IPC handle can not be opened", {"kind": CUDA_IPC, "device": uuid(), "handle": handle}),
        ("no such GPU", {"kind": CUDA_IPC, "device": uuid(77), "handle": handle}),
        ("no chunks", {"kind": CUDA_VMM, "device": uuid()}),
        ("unknown kind", {"kind": 99, "device": uuid()}),
    ]
    for why, fields in cases:
        assert why in raw.register(0, 7, bytes=PAGE, **fields), why
    fd = sealed(PAGE)
    assert "no descriptor" in raw.register(0, 7, fds=[fd], bytes=PAGE, kind=CUDA_IPC,
                                           device=uuid(), handle=handle)
    # Chunks of a region that was refused are just closed; those of a living one are looked at.
    raw.worker[0].send("register_chunks", fds=[fd], region=7, bytes=[PAGE])
    raw.worker[0].send("register", region=7, kind=CUDA_VMM, device=uuid(), bytes=2 << 20,
                       chunks=1)
    raw.worker[0].send("register_chunks", fds=[fd], region=7, bytes=[2 << 20])
    assert "descriptor can not be imported" in raw.worker[0].expect("region_reply")["text"]
    os.close(fd)
    # A message without its descriptors ends the connection.
    raw.worker[0].send("register_chunks", region=7, bytes=[PAGE])
    assert raw.worker[0].expect_closed()[0][0] == "error"


def test_queues_that_make_no_sense_are_refused_in_words(join: Join) -> None:
    raw = join()
    event = bytes(64)
    assert "1 to 256 slots" in raw.open_queue(0, slots=0)
    assert "1 to 256 slots" in raw.open_queue(0, slots=1 << 31)
    assert "no such GPU" in raw.open_queue(0, gpu=77)
    assert "by events or by flags" in raw.open_queue(0, order=0)
    assert "one event per slot" in raw.open_queue(0, order=EVENT, events=[event])
    assert "one event per slot" in raw.open_queue(0, order=EVENT, events=[event, b"x"])
    assert "can not be opened" in raw.open_queue(0, order=EVENT, events=[event, event])
    assert "one descriptor" in raw.open_queue(0, order=FLAG)
    assert raw.open_queue(0) == ""
    assert "in use" in raw.open_queue(0)
    assert "on one GPU" in raw.open_queue(0, queue=2, gpu=1)
    assert raw.open_queue(0, queue=2) == ""
    raw.worker[0].send("close_queue", queue=2)
    raw.worker[0].send("close_queue", queue=99)
    assert raw.open_queue(0, queue=2) == ""


def test_ops_are_checked_against_their_memory(join: Join) -> None:
    raw = join()
    assert raw.open_queue(0) == ""
    assert "queue that is not open" in raw.refused(0, queue=9, ticket=1, **HOST)
    assert "queue but is on host memory" in raw.refused(0, queue=1, ticket=1, **HOST)
    assert "names no queue" in raw.refused(0, is_device=True, **HOST)
    assert "came before its data" in raw.refused(0, queue=1, ticket=2, **{**HOST, "ready": 0})
    for signal in ({"region": 1, "offset": 4}, {"region": 1, "offset": PAGE}, {"region": 5}):
        text = raw.refused(0, signal=signal, signal_value=1, **HOST)
        assert "64-bit word" in text or "reaches beyond" in text or "not registered" in text, text


def test_host_and_device_ranks_disagree_in_words(join: Join) -> None:
    """Also where device tensors are staged, and the bytes are on the host in both cases."""
    raw = join(backend="host")
    assert raw.joined[0].get("device_path", False) is False
    assert raw.joined[0]["device_text"] == "backend = host"
    raw.submit(0, is_device=True, **HOST)
    text = raw.refused(1, **HOST)
    assert "device memory" in text and "host memory" in text, text
    assert raw.completion(0)["text"] == text
    assert "no device memory" in raw.open_queue(0)


# ------------------------------------------------------------------ who is released


def test_the_signal_is_stored_when_the_op_ends_well_or_not(join: Join) -> None:
    raw = join(backend="host")
    signal = {"region": 1, "offset": 64}
    for rank in (0, 1):
        raw.submit(rank, is_device=True, signal=signal, signal_value=5 + rank, **HOST)
    for rank in (0, 1):
        assert not raw.completion(rank).get("code")
        assert raw.word(rank, 64) == 5 + rank
    raw.refused(0, is_device=True, signal=signal, signal_value=8, **{**HOST, "count": 5000})
    assert raw.word(0, 64) == 8
    raw.submit(0, id=3, name="y", is_device=True, signal=signal, signal_value=9, **HOST)
    raw.daemon_side[1].close()
    raw.worker[1].close()
    assert raw.completion(0)["code"]
    assert raw.word(0, 64) == 9


def test_an_op_that_fails_writes_the_word_of_its_ticket(join: Join) -> None:
    raw = join()
    assert raw.open_queue(0) == ""

    def finished(slot: int) -> int:
        return int.from_bytes(raw.words[FINISHED + 8 * slot:FINISHED + 8 * slot + 8], "little")

    raw.refused(0, queue=1, ticket=1, **HOST)
    assert finished(1) == 1
    raw.submit(0, id=2, queue=1, ticket=2, is_device=True)
    raw.daemon_side[1].close()
    raw.worker[1].close()
    assert raw.completion(0)["code"]
    assert finished(0) == 2


def test_a_barrier_of_streams_is_enqueued_before_it_ends(join: Join) -> None:
    """Both streams reach it; the worker has launched its part when it says so."""
    raw = join()
    words = []
    for rank in (0, 1):
        assert raw.open_queue(rank) == ""
        words.append(raw.words)
        raw.submit(rank, kind=api.BARRIER, name="b", queue=1, ticket=1, is_device=True)
    for rank in (0, 1):
        assert raw.worker[rank].expect("completion_batch") == {
            "epoch": raw.joined[rank]["epoch"], "enqueued": [1]}
    for rank in (0, 1):
        words[rank][:8] = (1).to_bytes(8, "little")
    for rank in (0, 1):
        assert not raw.completion(rank).get("code")
        eventually(lambda r=rank: words[r][FINISHED + 8] == 1, "the result is marked")


# ------------------------------------------------------------------ seen from outside


def test_status_lists_gpus_and_what_workers_take_of_them(world: World, gpus: Gpus) -> None:
    daemon = gpus.daemon()
    eventually(lambda: daemon.gradctl_json("status")["cuda_driver"], "the GPUs have been listed")
    status = daemon.gradctl_json("status")
    assert status["cuda_driver"] == "13.0" and status["device_path"] is True, status
    assert [g["name"] for g in status["gpus"]] == ["Fake GPU 0", "Fake GPU 1"]
    assert status["gpus"][0]["uuid"] == "GPU-fa4efa4e-0000-4000-8000-000000000000"
    assert [g["workers"] for g in status["gpus"]] == [0, 0]
    trainers = gpus.job(daemon, 2)
    settle(trainers, "tensor", key="a", count=5000)
    for rank, trainer in enumerate(trainers):
        trainer.call("write", key="a", rank=rank)
    op = {"kind": api.ALLREDUCE, "name": "x", "redop": api.SUM, "in": "a", "out": "a",
          "count": 5000}
    settle(trainers, "submit_device", handle="h", ops=[op])
    assert [a["status"] for a in settle(trainers, "wait", handle="h")] == [0, 0]
    eventually(lambda: daemon.gradctl_json("status")["gpus"][0]["import_bytes"] > 0,
               "what the worker has mapped is known")
    assert [g["workers"] for g in daemon.gradctl_json("status")["gpus"]] == [1, 0]
    job = daemon.gradctl_json("job", "job")
    assert job["device_ops"] == 1 and job["staged_ops"] == 0, job
    assert job["gpus"][0]["imports"] == 2 and job["gpus"][0]["event_queues"] == 2, job["gpus"]
    assert job["communicators"] == [
        {"ranks": [0, 1], "gpus": 1, "state": "one GPU", "ops": 1}], job["communicators"]


def test_a_node_without_gpus_says_why(world: World) -> None:
    daemon = world.daemon(environment={"LD_LIBRARY_PATH": ""})
    eventually(lambda: daemon.gradctl_json("status")["cuda_driver"], "the GPUs were looked for")
    status = daemon.gradctl_json("status")
    if status["gpus"]:
        pytest.skip("this machine has a GPU")
    assert status["device_path"] is False and status["degraded"] is False, status
    assert status["cuda_driver"].startswith("- ") and status["device_text"], status


def test_backend_nccl_refuses_jobs_that_can_not(world: World, gpus: Gpus) -> None:
    gpus.environment["GRADD_FAKE_CUDA_WITHOUT"] = "cuIpcOpenMemHandle"
    daemon = gpus.daemon(backend="nccl")
    ranks = [daemon.connect() for _ in range(2)]
    for rank, connection in enumerate(ranks):
        connection.hello()
        connection.send("join", job="x", rank=rank, size=2, local_rank=rank)
    for connection in ranks:
        text = connection.expect("error")["text"]
        assert "backend = nccl" in text and "cuIpcOpenMemHandle" in text, text
        connection.close()
    problems = daemon.gradctl_json("status")["problems"]
    assert "backend = nccl" in problems[0] and "cuIpcOpenMemHandle" in problems[0], problems


def two_nodes(world: World, gpus: Gpus, backends: tuple[str, str]) -> list[RawConnection]:
    """A rank on each of two daemons, that have asked to join one job."""
    daemons = [world.daemon(environment=gpus.environment, node_name=name, backend=backend,
                            peer_port=0) for name, backend in zip(("left", "right"), backends)]
    for daemon in daemons:
        daemon.n_more_fds = 2
    port = daemons[0].gradctl_json("peers")["listening"].rpartition(":")[2]
    ranks = [daemon.connect() for daemon in daemons]
    for rank, connection in enumerate(ranks):
        connection.hello()
        connection.send("join", job="two", rank=rank, size=2, coordinator=f"127.0.0.1:{port}")
    return ranks


def test_a_job_takes_device_memory_when_all_its_nodes_do(world: World, gpus: Gpus) -> None:
    ranks = two_nodes(world, gpus, ("auto", "host"))
    joined = [connection.expect("joined") for connection in ranks]
    assert [j.get("device_path", False) for j in joined] == [False, False]
    assert [j["device_text"] for j in joined] == [
        "another node of the job takes no device memory", "backend = host"]
    for connection in ranks:
        connection.close()


@pytest.mark.parametrize("backends", [("nccl", "host"), ("host", "nccl")])
def test_one_node_that_can_not_is_refused_where_another_insists(
        world: World, gpus: Gpus, backends: tuple[str, str]) -> None:
    ranks = two_nodes(world, gpus, backends)
    insists = "left" if backends[0] == "nccl" else "right"
    text = ranks[backends.index("nccl")].expect("error")["text"]
    assert f"backend = nccl on node {insists}" in text, text
    other = ranks[backends.index("host")]
    said, fields = other.receive()
    if said == "joined":  # it coordinates, and its epoch has begun: its worker tells
        with RawConnection(socket.socket(fileno=other.take_fd())) as worker:
            said, fields = worker.receive()
    assert said in ("error", "epoch_failed") and "backend = nccl" in fields["text"], fields
    for connection in ranks:
        connection.close()
