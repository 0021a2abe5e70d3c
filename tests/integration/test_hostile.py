# SPDX-License-Identifier: Apache-2.0
"""Clients that lie. Whatever they send, to the daemon or to the worker: the daemon and the other
jobs live, and nothing of the liar stays."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import socket
import struct
import time
from typing import Any, Iterator

import pytest

import gradd_ctypes as api
import wire
from gradd_ctypes import STATUS
from harness import Daemon, Trainer, World, cpu_seconds, eventually, fds_of, memfd_mappings, settle
from wire import Closed, RawConnection, frame


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


@pytest.fixture(scope="module")
def long_lived() -> Iterator[Honest]:
    """One daemon and one honest job for all lies of this file."""
    world = World()
    try:
        yield Honest(world, job_linger_s=0)
    except BaseException:
        world.close(is_failed=True)
        raise
    world.close(is_failed=False)


@pytest.fixture
def honest(long_lived: Honest) -> Iterator[Honest]:
    """After the test the honest job works, and nothing of the liars is left in the daemon."""
    daemon_fds, worker_fds = fds_of(long_lived.daemon.pid), fds_of(long_lived.worker)
    n_lines = len(long_lived.daemon.log.lines)
    yield long_lived
    long_lived.assert_alive()
    eventually(lambda: long_lived.daemon.worker_pids() == [long_lived.worker],
               "the workers of the liars are gone")
    eventually(lambda: long_lived.daemon.admin("status") and
               len(fds_of(long_lived.daemon.pid)) <= len(daemon_fds),
               f"the daemon has closed what it opened: {daemon_fds}")
    assert len(fds_of(long_lived.worker)) == len(worker_fds)
    assert not memfd_mappings(long_lived.daemon.pid)
    assert len(long_lived.daemon.log.lines) - n_lines < 200, "a liar can flood the log"


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


@pytest.fixture
def liars(honest: Honest) -> Iterator[Liars]:
    job = Liars(honest.daemon, 2)
    yield job
    job.close()


def make_memfd(bytes_: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("liar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, bytes_)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


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


@pytest.mark.parametrize("what", list(GARBAGE))
def test_garbage_to_the_daemon_ends_only_that_connection(honest: Honest, what: str) -> None:
    for after_hello in (False, True):
        with honest.daemon.connect() as liar:
            if after_hello:
                liar.hello()
            liar.send_bytes(GARBAGE[what])
            liar.expect_closed()
        honest.assert_alive()


@pytest.mark.parametrize("what", list(GARBAGE))
def test_garbage_to_the_worker_fails_only_that_job(honest: Honest, liars: Liars,
                                                   what: str) -> None:
    liars.worker_side[0].send_bytes(GARBAGE[what])
    liars.worker_side[0].expect_closed()
    # The other rank of the liar's job learns whose fault it is.
    failed = wait_for_failure(liars.worker_side[1], liars.daemon_side[1])
    assert "rank 0" in failed["text"], failed


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


def test_one_byte_at_a_time_is_slow_but_right(honest: Honest) -> None:
    with honest.daemon.connect() as patient:
        data = frame("hello", protocol_min=1, protocol_max=1, program="slow", version="0")
        patient.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        for i in range(len(data)):
            patient.send_bytes(data[i : i + 1])
        assert patient.expect("hello_reply")["protocol"] == 1
        join = frame("join", job="alone", rank=0, size=1)
        for i in range(len(join)):
            patient.send_bytes(join[i : i + 1])
        assert patient.expect("joined")["size"] == 1


def test_a_connection_that_closes_in_the_middle_of_a_frame(honest: Honest) -> None:
    data = frame("hello", protocol_min=1, protocol_max=1, program="x", version="0")
    for cut in range(len(data)):
        with honest.daemon.connect() as liar:
            liar.send_bytes(data[:cut])


def test_many_connections_that_say_nothing(honest: Honest) -> None:
    silent = [honest.daemon.connect() for _ in range(200)]
    honest.assert_alive()
    for connection in silent:
        connection.close()


def test_fds_where_none_belong_are_closed(honest: Honest, liars: Liars) -> None:
    fd = make_memfd(4096)
    for n in (1, 4, 30):
        with honest.daemon.connect() as liar:
            liar.send_bytes(frame("hello", protocol_min=1, protocol_max=1), [fd] * n)
            liar.expect_closed()
    with honest.daemon.connect() as liar:
        # Declared, so the codec passes it on; but this message has no use for it.
        liar.send("hello", fds=[fd], protocol_min=1, protocol_max=1, program="x", version="0")
        try:
            liar.receive()
        except Closed:
            pass
        honest.assert_alive()
        assert not [x for x in fds_of(honest.daemon.pid).values() if "memfd:liar" in x]
    liars.submit(0)
    liars.worker_side[0].send_bytes(
        frame("feed_batch", epoch=liars.epoch), [fd, fd])
    liars.worker_side[0].expect_closed()
    os.close(fd)
    honest.assert_alive()
    for pid in [honest.daemon.pid, *honest.daemon.worker_pids()]:
        eventually(lambda: not [x for x in fds_of(pid).values() if "memfd:liar" in x],
                   "no descriptor of the liar is left")


def register(liars: Liars, rank: int, fd: int | None, bytes_: int,
             region: int = 1) -> dict[str, Any]:
    liars.worker_side[rank].send("register", fds=[fd] if fd is not None else [],
                                 region=region, bytes=bytes_)
    return liars.worker_side[rank].expect("region_reply")


def expect_refused_region(reply: dict[str, Any], *words: str) -> None:
    assert reply.get("code", 0) != 0, reply
    for word in words:
        assert word in reply["text"], reply


def test_regions_that_would_hurt_the_worker_are_refused(honest: Honest, liars: Liars) -> None:
    unsealed = make_memfd(8192, seals=0)
    expect_refused_region(register(liars, 0, unsealed, 8192), "seal")
    small = make_memfd(4096)
    expect_refused_region(register(liars, 0, small, 8192), "4096", "8192")
    grown = make_memfd(8192)
    expect_refused_region(register(liars, 0, grown, 0))
    expect_refused_region(register(liars, 0, grown, 1 << 62))
    expect_refused_region(register(liars, 0, grown, (1 << 64) - 1))
    expect_refused_region(register(liars, 0, grown, 8192, region=0))
    pipe_read, pipe_write = os.pipe()
    expect_refused_region(register(liars, 0, pipe_read, 4096))
    directory = os.open("/", os.O_RDONLY)
    expect_refused_region(register(liars, 0, directory, 4096))
    null = os.open("/dev/zero", os.O_RDWR)
    expect_refused_region(register(liars, 0, null, 4096))
    write_sealed = make_memfd(8192, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    reply = register(liars, 0, write_sealed, 8192)
    assert reply.get("code", 0) != 0, reply
    # An honest one passes after all that, and its number is taken.
    assert register(liars, 0, grown, 8192).get("code", 0) == 0
    expect_refused_region(register(liars, 0, grown, 8192))
    for fd in (unsealed, small, grown, pipe_read, pipe_write, directory, null, write_sealed):
        os.close(fd)
    liars.worker_side[0].send("unregister", region=1)
    assert liars.worker_side[0].expect("region_reply").get("code", 0) == 0
    liars.worker_side[0].send("unregister", region=99)
    expect_refused_region(liars.worker_side[0].expect("region_reply"))


def test_a_register_without_its_fd_is_refused(honest: Honest, liars: Liars) -> None:
    liars.worker_side[0].send("register", region=1, bytes=4096)
    try:
        body, fields = liars.worker_side[0].receive()
        assert body == "region_reply" and fields["code"] != 0
    except Closed:
        pass


BOUNDS = {
    "past the end": {"offset": 8192 - 12},
    "far past the end": {"offset": 1 << 40},
    "offset overflow": {"offset": (1 << 64) - 8},
    "unknown region": {"region": 7},
    "no region": {"region": 0},
    "ring of nothing": {"offset": 8192, "ring_bytes": 1},
    "ring overflow": {"offset": 4096, "ring_bytes": (1 << 64) - 1},
    "misaligned": {"offset": 3},
}


@pytest.mark.parametrize("side", ["in", "out"])
def test_a_ring_that_leaves_its_region_is_refused(honest: Honest, liars: Liars, side: str) -> None:
    fds = [make_memfd(8192) for _ in range(2)]
    for rank in range(2):
        assert register(liars, rank, fds[rank], 8192).get("code", 0) == 0
        os.close(fds[rank])
    good = {"region": 1, "offset": 0}
    bad = {"region": 1, "offset": 4096, "ring_bytes": 8192}
    liars.submit(0, **{"in": good, "out": good, side: bad, "count": 2000, "ready": 1000})
    liars.submit(1, **{"in": good, "out": good, "count": 2000, "ready": 2000})
    expect_op_refused_or_harmless(honest, liars, "ring")


@pytest.mark.parametrize("side", ["in", "out"])
@pytest.mark.parametrize("what", list(BOUNDS))
def test_buffers_outside_their_region_are_refused(honest: Honest, liars: Liars, what: str,
                                                  side: str) -> None:
    fds = [make_memfd(8192) for _ in range(2)]
    for rank in range(2):
        assert register(liars, rank, fds[rank], 8192).get("code", 0) == 0
    good = {"region": 1, "offset": 0}
    bad = {**good, **BOUNDS[what]}
    liars.submit(0, **{"in": good, "out": good, side: bad})
    liars.submit(1, **{"in": good, "out": good})
    expect_op_refused_or_harmless(honest, liars, what)
    for fd in fds:
        os.close(fd)


def expect_op_refused_or_harmless(honest: Honest, liars: Liars, what: str) -> None:
    """The liar's op fails in words, or the liar is cut off; a misaligned one may even work."""
    try:
        body, fields = liars.worker_side[0].receive()
    except Closed:
        return
    if body == "completion_batch":
        completion = fields["completions"][0]
        if what != "misaligned":
            assert completion.get("code", 0) != 0, completion
            assert completion["text"], completion
    else:
        assert body in ("error", "epoch_failed"), (body, fields)
    honest.assert_alive()


@pytest.mark.parametrize("fields", [
    {"count": 1 << 62, "ready": 1 << 62}, {"count": (1 << 64) - 1, "ready": 4},
    {"count": 1 << 63, "ready": 1 << 63}, {"count": 2049, "ready": 2049},
    {"dtype": 3}, {"dtype": 1 << 31}, {"redop": 99}, {"kind": 99}, {"name": ""},
    {"name": "n" * 256}, {"name": "n" * 100000}, {"ready": 100}, {"set": 5}, {"id": 0},
    {"kind": api.BROADCAST, "root": -1}, {"kind": api.BROADCAST, "root": 2},
    {"kind": api.BROADCAST, "root": -(1 << 31)},
    {"kind": api.ALLGATHER, "out_capacity": 1 << 62},
    {"kind": api.ALLGATHER, "out_capacity": 2048, "count": 2048},
    {"kind": api.REDUCE_SCATTER, "counts": [1 << 63, 1 << 63]},
    {"kind": api.REDUCE_SCATTER, "counts": [4]},
    {"kind": api.REDUCE_SCATTER, "counts": list(range(10000))},
    {"kind": api.ALLTOALL, "counts": [1 << 63, (1 << 63) + 4], "out_capacity": 4},
    {"kind": api.SET_ADD, "counts": [0, 0]}, {"kind": api.SET_ADD, "counts": [1 << 33]},
    {"kind": api.SET_ADD, "counts": []}, {"kind": api.SET_REMOVE, "root": 77},
    {"group": "g", "group_size": 0}, {"group": "g", "group_size": 1 << 31},
    {"group": "g" * 5000, "group_size": 2},
    {"prescale": float("nan")}, {"postscale": float("inf")},
], ids=lambda f: str(f)[:60])
@pytest.mark.parametrize("both", [False, True])
def test_submissions_that_make_no_sense(honest: Honest, liars: Liars, fields: dict[str, Any],
                                        both: bool) -> None:
    fds = [make_memfd(8192) for _ in range(2)]
    for rank in range(2):
        assert register(liars, rank, fds[rank], 8192).get("code", 0) == 0
    good = {"region": 1, "offset": 0}
    base = {"in": good, "out": good}
    liars.submit(0, **{**base, **fields})
    liars.submit(1, **{**base, **(fields if both else {})})
    for fd in fds:
        os.close(fd)
    honest.assert_alive()


def test_ids_and_names_used_twice(honest: Honest, liars: Liars) -> None:
    fds = [make_memfd(8192) for _ in range(2)]
    for rank in range(2):
        assert register(liars, rank, fds[rank], 8192).get("code", 0) == 0
    good = {"region": 1, "offset": 0}
    liars.submit(0, **{"in": good, "out": good})
    liars.submit(0, **{"in": good, "out": good, "id": 2})
    liars.submit(0, **{"in": good, "out": good, "name": "other"})
    liars.worker_side[0].send("feed_batch", epoch=liars.epoch,
                              feeds=[{"id": 77, "ready": 9}, {"id": 1, "ready": 1 << 63}])
    liars.worker_side[0].send("unregister", region=1)
    liars.worker_side[0].send("submit_batch", epoch=liars.epoch + 5, submits=[])
    liars.worker_side[0].send("hello", protocol_min=1)
    liars.worker_side[0].send("configure", job="mine")
    for fd in fds:
        os.close(fd)
    honest.assert_alive()


@pytest.mark.parametrize("body", sorted(wire.MESSAGES["Envelope"]))
def test_every_message_where_it_does_not_belong(honest: Honest, liars: Liars, body: str) -> None:
    with honest.daemon.connect() as liar:
        liar.hello()
        liar.send(body)
        liar.sock.shutdown(socket.SHUT_WR)
        liar.expect_closed()
    with honest.daemon.connect() as liar:
        liar.hello("admin")
        liar.send(body)
        liar.sock.shutdown(socket.SHUT_WR)
        liar.expect_closed()
    try:
        liars.daemon_side[0].send(body)
        liars.worker_side[1].send(body)
    except BrokenPipeError:
        # The first message ended the epoch, and the worker closed the other side.
        pass
    honest.assert_alive()


def test_many_ops_without_reading_completions(honest: Honest, liars: Liars) -> None:
    """A reader that stops reading is cut off; its job fails, and memory stays bounded."""
    liars.worker_side[0].sock.settimeout(0.2)
    text = "n" * 200
    batch = [{"id": i + 1, "name": f"{text}{i}", "kind": api.ALLREDUCE, "dtype": 77, "count": 4}
             for i in range(1000)]
    data = frame("submit_batch", epoch=liars.epoch, submits=batch)
    sent = 0
    try:
        for _ in range(2000):
            liars.worker_side[0].send_bytes(data)
            sent += len(data)
    except (TimeoutError, BrokenPipeError, ConnectionResetError):
        pass
    for pid in honest.daemon.worker_pids():
        with open(f"/proc/{pid}/status") as file:
            rss = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
        assert rss < 600 * 1024, f"worker {pid} grew to {rss} kB after {sent} bytes"
    honest.assert_alive()


def test_an_admin_that_stops_reading_is_cut_off(honest: Honest) -> None:
    with honest.daemon.connect() as liar:
        liar.hello("admin")
        liar.sock.settimeout(0.5)
        data = frame("config_request") * 500
        try:
            for _ in range(2000):
                liar.send_bytes(data)
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            pass
        honest.assert_alive()
        with open(f"/proc/{honest.daemon.pid}/status") as file:
            rss = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
        assert rss < 300 * 1024


def test_a_liar_that_closes_only_one_of_its_sockets(honest: Honest) -> None:
    for close_worker_side in (True, False):
        liars = Liars(honest.daemon, 2)
        if close_worker_side:
            liars.worker_side[0].close()
        else:
            liars.daemon_side[0].close()
        failed = wait_for_failure(liars.worker_side[1], liars.daemon_side[1])
        assert "rank 0" in failed["text"], failed
        liars.close()
        honest.assert_alive()


def test_half_a_leave_is_no_leave(honest: Honest) -> None:
    """Leave to the worker alone, then silence and end of stream to the daemon."""
    liars = Liars(honest.daemon, 2)
    liars.worker_side[0].send("leave")
    liars.daemon_side[0].close()
    liars.worker_side[1].send("leave")
    liars.daemon_side[1].send("leave")
    liars.daemon_side[1].expect("left")
    liars.close()


def test_a_liar_can_not_truncate_its_memfd_under_the_worker(honest: Honest,
                                                            liars: Liars) -> None:
    fds = [make_memfd(8192) for _ in range(2)]
    for rank in range(2):
        assert register(liars, rank, fds[rank], 8192).get("code", 0) == 0
    with pytest.raises(PermissionError):
        os.ftruncate(fds[0], 0)
    good = {"region": 1, "offset": 0}
    for rank in range(2):
        liars.submit(rank, **{"in": good, "out": good})
    assert liars.completion(0).get("code", 0) == 0
    for fd in fds:
        os.close(fd)


def test_a_punched_hole_in_the_memfd_reads_as_zeros(honest: Honest, liars: Liars) -> None:
    fds = [make_memfd(8192) for _ in range(2)]
    for rank in range(2):
        assert register(liars, rank, fds[rank], 8192).get("code", 0) == 0
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size, punch_hole = 1, 2
    assert libc.fallocate(fds[0], keep_size | punch_hole, ctypes.c_long(0),
                          ctypes.c_long(8192)) == 0
    good = {"region": 1, "offset": 0}
    for rank in range(2):
        liars.submit(rank, **{"in": good, "out": good})
    assert liars.completion(0).get("code", 0) == 0
    for fd in fds:
        os.close(fd)


def test_the_quota_of_a_job_holds_over_all_its_ranks(world: World) -> None:
    honest = Honest(world, job_memory_bytes="1M")
    liars = Liars(honest.daemon, 2)
    fd = make_memfd(1 << 20)
    half = make_memfd(1 << 19)
    assert register(liars, 0, half, 1 << 19).get("code", 0) == 0
    expect_refused_region(register(liars, 1, fd, 1 << 20))
    assert register(liars, 1, half, 1 << 19).get("code", 0) == 0
    expect_refused_region(register(liars, 1, half, 1 << 19, region=2))
    liars.worker_side[0].send("unregister", region=1)
    assert liars.worker_side[0].expect("region_reply").get("code", 0) == 0
    eventually(lambda: register(liars, 1, half, 1 << 19, region=2).get("code", 0) == 0,
               "the freed quota can be used")
    os.close(fd)
    os.close(half)
    liars.close()
    honest.assert_alive()


def test_too_many_ops_in_flight_are_refused(world: World) -> None:
    honest = Honest(world, max_in_flight=8)
    liars = Liars(honest.daemon, 2)
    for i in range(20):
        liars.submit(0, id=i + 1, name=f"x{i}", count=0, ready=0)
    try:
        body, fields = liars.worker_side[0].receive()
        assert body in ("completion_batch", "error", "epoch_failed"), (body, fields)
        if body == "completion_batch":
            assert fields["completions"][0]["code"] != 0
    except Closed:
        pass
    liars.close()
    honest.assert_alive()


def test_the_limits_per_user_are_errors_in_words(world: World) -> None:
    daemon = world.daemon(max_jobs_per_uid=2, max_sessions_per_uid=4)
    kept = []
    for i in range(4):
        connection = daemon.connect()
        connection.hello()
        connection.send("join", job=f"job{i % 2}", rank=i // 2, size=3)
        kept.append(connection)
    daemon.admin("status")
    with daemon.connect() as liar:
        refused = liar_join(liar, "job0", 2, 3)
        assert refused and refused["text"], refused
    kept.pop().close()
    kept.pop().close()
    eventually(lambda: len(daemon.jobs()) == 2, "two jobs")
    with daemon.connect() as liar:
        refused = liar_join(liar, "a third job", 0, 3)
        assert refused and refused["text"], refused
    for connection in kept:
        connection.close()


def liar_join(liar: RawConnection, job: str, rank: int, size: int) -> dict[str, Any] | None:
    """Hello and Join; the Error that came instead of an answer."""
    liar.send("hello", protocol_min=1, protocol_max=1, program="liar", version="0")
    body, fields = liar.receive()
    if body == "error":
        return fields
    liar.send("join", job=job, rank=rank, size=size)
    body, fields = liar.receive()
    return fields if body == "error" else None


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


def test_running_out_of_descriptors_neither_kills_nor_spins(world: World) -> None:
    daemon = world.daemon()
    trainers = world.job(daemon, 2, "honest")
    settle(trainers, "alloc", key="a", count=100)
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    limit_fds(daemon.pid, 3)
    hoard: list[socket.socket] = []
    try:
        for _ in range(100):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            hoard.append(sock)
            try:
                sock.connect(daemon.socket)
            except BlockingIOError:
                break
        daemon.log.wait_for(r"descriptor|Too many open files")
        # What does waiting cost? This is a measurement over a fixed time, not a wait for an event.
        before, started = cpu_seconds(daemon.pid), time.monotonic()
        settle(trainers, "fill", key="a", value=1)
        while time.monotonic() - started < 1.0:
            results = settle(trainers, "allreduce", name="x", key="a")
            assert [r["status"] for r in results] == [0, 0], results
        used = cpu_seconds(daemon.pid) - before
        print(f"CPU time of the daemon in 1 s without descriptors: {used:.2f} s")
        assert used < 0.3
        assert len(daemon.log.lines) < 100, "the log is flooded"
        assert daemon.process.poll() is None
    finally:
        for sock in hoard:
            sock.close()
    # The limit still holds; once the hoard's connections have left its queue there is room again.
    eventually(lambda: answers(daemon), "the daemon answers again")
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("n_free", [2, 3, 4, 5, 6, 7, 8, 9])
def test_a_job_that_finds_no_descriptors_is_told_so(world: World, n_free: int) -> None:
    daemon = world.daemon()
    bystanders = world.job(daemon, 2, "bystander")
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    limit_fds(daemon.pid, n_free)
    trainers = [world.trainer(daemon) for _ in range(4)]
    for rank, trainer in enumerate(trainers):
        trainer.send("init", **trainer.init_arguments(rank, 4, "big", timeout_s=2.0))
    # A connection that can not be accepted waits in the listener's queue: let those go that do.
    refused = [t.reply() for t in trainers[:1]]
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
    refused += [t.reply() for t in trainers[1:]]
    assert any(r["status"] != 0 for r in refused), "the limit was too high for this test"
    assert all(r["error"] for r in refused if r["status"] != 0), refused
    settle(trainers, "shutdown_all")
    eventually(lambda: len(daemon.jobs()) == 1, "the job is gone")
    small = [world.trainer(daemon) for _ in range(2)]
    assert [r["status"] for r in world.join(small, "small")] == [0, 0]
    assert [r["status"] for r in settle(bystanders, "barrier")] == [0, 0]


def test_random_messages_hurt_only_their_sender(honest: Honest) -> None:
    seed = int(os.environ.get("GRADD_TEST_SEED", time.time_ns() % 1000000))
    print(f"GRADD_TEST_SEED={seed}")
    dice = random.Random(seed)
    for _ in range(60):
        with honest.daemon.connect() as liar:
            try:
                if dice.random() < 0.8:
                    liar.send("hello", protocol_min=1, protocol_max=1, role=dice.randrange(2))
                for _ in range(dice.randrange(1, 6)):
                    body, fields = random_message(dice)
                    liar.send(body, **fields)
            except (BrokenPipeError, ConnectionResetError):
                pass
    honest.assert_alive()
    for round_ in range(10):
        liars = Liars(honest.daemon, 2, f"random{round_}")
        try:
            for _ in range(20):
                body, fields = random_message(dice)
                liars.worker_side[dice.randrange(2)].send(body, **fields)
        except (BrokenPipeError, ConnectionResetError):
            pass
        liars.close()
    honest.assert_alive()


def random_message(dice: random.Random) -> tuple[str, dict[str, Any]]:
    body = dice.choice(sorted(wire.MESSAGES["Envelope"]))
    return body, random_fields(dice, wire.MESSAGES["Envelope"][body][1], 3)


def random_fields(dice: random.Random, message: str, depth: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, (_, kind, repeated) in wire.MESSAGES[message].items():
        if dice.random() < 0.3:
            continue
        make = lambda: random_value(dice, kind, depth)  # noqa: E731
        fields[name] = [make() for _ in range(dice.randrange(4))] if repeated else make()
    return fields


def random_value(dice: random.Random, kind: str, depth: int) -> Any:
    if kind in ("string", "bytes"):
        return dice.choice(["", "x", "job", "y" * 300, "z\n"])
    if kind == "double":
        return dice.choice([0.0, 1.0, -1e308, float("nan"), float("inf")])
    if kind in wire.MESSAGES:
        return random_fields(dice, kind, depth - 1) if depth else {}
    return dice.choice([0, 1, 2, 7, 255, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1])


def test_the_honest_worker_keeps_no_mapping_of_liars(honest: Honest) -> None:
    before = len(memfd_mappings(honest.worker))
    liars = Liars(honest.daemon, 2)
    fd = make_memfd(1 << 20)
    assert register(liars, 0, fd, 1 << 20).get("code", 0) == 0
    os.close(fd)
    liars.close()
    honest.assert_alive()
    assert len(memfd_mappings(honest.worker)) == before
