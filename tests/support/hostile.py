# SPDX-License-Identifier: Apache-2.0
"""Liars, which are raw sockets to a daemon and to a worker, and an honest job beside them that must
not notice. conftest.py makes fixtures of both."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import socket
import struct
import time
from typing import Any

import gradd_ctypes as api
import wire
from harness import Daemon, World, fds_of, settle
from wire import Closed, RawConnection


class Honest:
    """A daemon and an honest job of two ranks beside whatever a test does."""

    def __init__(self, world: World, **how: Any) -> None:
        self.world = world
        self.daemon = world.daemon(**how)
        self.trainers = world.job(self.daemon, 2, "honest")
        settle(self.trainers, "alloc", key="a", count=5000)
        self.worker = self.daemon.worker_pid()
        self.n = 0

    def assert_alive(self) -> None:
        self.n += 1
        settle(self.trainers, "fill", key="a", value=self.n)
        results = settle(self.trainers, "allreduce", name=f"alive.{self.n}", key="a")
        assert [r["status"] for r in results] == [0, 0], results
        assert self.trainers[1].call("values", key="a", n=1) == [2.0 * self.n]
        assert self.worker in self.daemon.worker_pids()
        assert self.daemon.admin("status")["version"]


class Liars:
    """A job whose ranks are raw sockets to the worker."""

    def __init__(self, daemon: Daemon, n: int, job: str = "liars") -> None:
        self.daemon_side = [daemon.connect() for _ in range(n)]
        for rank, connection in enumerate(self.daemon_side):
            connection.hello()
            connection.send("join", job=job, rank=rank, size=n, local_rank=rank)
        self.worker_side = []
        self.epoch = 0
        for connection in self.daemon_side:
            joined = connection.expect("joined")
            self.epoch = joined["epoch"]
            sock = socket.socket(fileno=connection.take_fd())
            self.worker_side.append(RawConnection(sock))

    def close(self) -> None:
        for connection in self.daemon_side + self.worker_side:
            connection.close()

    def submit(self, rank: int, **fields: Any) -> None:
        submit = {"id": 1, "name": "x", "kind": api.ALLREDUCE, "dtype": api.F32,
                  "redop": api.SUM, "count": 4, "ready": 4, **fields}
        self.worker_side[rank].send("submit_batch", epoch=self.epoch, submits=[submit])

    def completion(self, rank: int) -> dict[str, Any]:
        batch = self.worker_side[rank].expect("completion_batch")
        return batch["completions"][0]


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros beyond": b"\0" * 8 + b"\xff" * 64,
    "oversize": struct.pack("<IB3x", wire.FRAME_MAX + 1, 0),
    "largest length": struct.pack("<IB3x", 0xFFFFFFFF, 0),
    "padding": struct.pack("<IB3s", 4, 0, b"abc") + b"abcd",
    "too many fds declared": struct.pack("<IB3x", 4, 255) + b"abcd",
    "fds declared, none there": struct.pack("<IB3x", 2, 1) + b"\x0a\x00",
    "not protobuf": struct.pack("<IB3x", 6, 0) + b"\xff" * 6,
    "random": random.Random(7).randbytes(5000),
}


def make_memfd(bytes_: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("liar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, bytes_)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def register(liars: Liars, rank: int, fd: int | None, bytes_: int,
             region: int = 1) -> dict[str, Any]:
    liars.worker_side[rank].send("register", fds=[fd] if fd is not None else [],
                                 region=region, bytes=bytes_)
    return liars.worker_side[rank].expect("region_reply")


def expect_refused_region(reply: dict[str, Any], *words: str) -> None:
    assert reply.get("code", 0) != 0, reply
    for word in words:
        assert word in reply["text"], reply


def wait_for_failure(*sides: RawConnection) -> dict[str, Any]:
    """The first epoch_failed that comes on any of these connections."""
    import select
    deadline = time.monotonic() + 20
    open_sides = list(sides)
    while open_sides and time.monotonic() < deadline:
        ready, _, _ = select.select([s.sock for s in open_sides], [], [], 1.0)
        for side in [s for s in open_sides if s.sock in ready]:
            try:
                body, fields = side.receive()
            except Closed:
                open_sides.remove(side)
                continue
            if body == "epoch_failed":
                return fields
    raise AssertionError("no epoch_failed came")


def limit_fds(pid: int, n_free: int) -> None:
    """From now on the process may open n_free descriptors more than the highest it has."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(fds_of(pid)) + 1 + n_free, hard))


def answers(daemon: Daemon) -> bool:
    """False: the daemon turned this connection away, as it does while it has no descriptor left."""
    try:
        return bool(daemon.admin("status")["version"])
    except (Closed, OSError):
        return False
