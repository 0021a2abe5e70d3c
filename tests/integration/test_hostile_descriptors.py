# SPDX-License-Identifier: Apache-2.0
"""A daemon that runs out of descriptors, or whose strangers would like to take all of them."""

from __future__ import annotations

import re
import resource
import socket
import time

import pytest

from harness import World, cpu_seconds, eventually, settle
from hostile import answers, limit_fds
from wire import RawConnection


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


def test_strangers_leave_room_for_trainers(world: World) -> None:
    """Whoever reaches the port for other nodes takes no more than is reserved for such."""
    daemon = world.daemon(n_fds=760, peer_listen="yes", peer_port=0)
    port = int(daemon.admin("peers")["listening"].rsplit(":", 1)[1])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    trainers: list[RawConnection] = []
    refusal = ""
    while not refusal:
        trainers.append(daemon.connect())
        trainers[-1].send("hello", protocol_min=1, protocol_max=1, program="many", version="0")
        body, fields = trainers[-1].receive()
        refusal = fields["text"] if body == "error" else ""
    assert "(max_sessions)" in refusal and len(trainers) > 3, (refusal, len(trainers))
    for connection in trainers[-3:]:
        connection.close()
    eventually(lambda: daemon.admin("status")["n_sessions"] <= len(trainers) - 2,
               "the daemon has closed the connections that went")
    honest = world.job(daemon, 2, "honest")
    assert [r["status"] for r in settle(honest, "barrier")] == [0, 0]
    assert not re.search(r"can not be accepted|Too many open files", daemon.log.text())
    for connection in [*strangers, *trainers]:
        connection.close()
