# SPDX-License-Identifier: Apache-2.0
"""Trainers whose device memory makes no sense: by mistake, or on purpose."""

from __future__ import annotations

import fcntl
import os
import socket
from random import Random

import pytest

import gradd_ctypes as api
from gpu_failure import (
    N, Node, ORDERS, SEED, again, expect_ok, expect_told, join, needs_fakes, submit, sums_are_right,
)
from gradd_ctypes import STATUS
from harness import World, settle
from wire import RawConnection

pytestmark = needs_fakes


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
