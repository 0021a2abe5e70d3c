# SPDX-License-Identifier: Apache-2.0
"""What a worker is to the kernel: no capability, no way to gain one, no inherited descriptor."""

from __future__ import annotations

import os
import re
import signal

import pytest

from harness import World, eventually, fds_of, memfd_mappings, settle, state_of, status_of

NOBODY = 65534
# Inherited: /dev/null twice, the daemon's log, the channel to the daemon. Its own: the loop and
# wake-ups, the members' sockets, /dev/null again. Never a memfd: mappings need no descriptor.
OWN = re.compile(r"^(anon_inode:\[(eventpoll|eventfd|signalfd|timerfd)\]|socket:\[\d+\]|/dev/null)$")


def check_worker(pid: int, uid: int, n_ranks: int) -> None:
    status = status_of(pid)
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[name], 16) == 0, (name, status[name])
    assert status["NoNewPrivs"] == "1"
    assert status["Uid"].split() == [str(uid)] * 4
    assert status["Gid"].split() == [str(uid)] * 4
    assert os.getpgid(pid) == pid
    fds = fds_of(pid)
    assert fds[0] == fds[1] == "/dev/null"
    assert fds[3].startswith("socket:")
    # The loop's own wake-up pipe: both of its ends are here, so nobody else can be at the other.
    links = list(fds.values())
    strangers = {fd: link for fd, link in fds.items() if fd > 3 and not OWN.match(link)
                 and not (link.startswith("pipe:") and links.count(link) == 2)}
    assert not strangers
    n_sockets = sum(link.startswith("socket:") for fd, link in fds.items() if fd > 3)
    assert n_sockets <= n_ranks + 1, fds


def test_a_worker_holds_nothing_but_its_own(world: World) -> None:
    daemon = world.daemon()
    trainers = world.job(daemon, 3)
    settle(trainers, "alloc", key="a", count=1000)
    settle(trainers, "fill", key="a", value=1)
    assert [r["status"] for r in settle(trainers, "allreduce", name="x", key="a")] == [0] * 3
    check_worker(daemon.worker_pid(), os.getuid(), 3)


def test_descriptors_that_the_daemon_inherits_go_no_further(world: World) -> None:
    with open("/etc/passwd") as leak:
        os.set_inheritable(leak.fileno(), True)
        # Popen closes what it does not pass on; the daemon itself is given one more.
        daemon = world.daemon()
        trainers = world.job(daemon, 2)
        assert not [x for x in fds_of(daemon.worker_pid()).values() if "passwd" in x]
    assert [r["status"] for r in settle(trainers, "barrier")] == [0, 0]


def test_the_signals_of_a_worker_are_as_at_the_start(world: World) -> None:
    daemon = world.daemon()
    world.job(daemon, 2)
    status = status_of(daemon.worker_pid())
    assert int(status["SigBlk"], 16) == 0
    # Its readers may be gone, and Ctrl-C at a terminal is meant for the trainers.
    ignored = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGINT - 1)
    assert int(status["SigIgn"], 16) & ~ignored == 0


@pytest.mark.root
def test_a_worker_runs_as_the_owner_of_its_job(world: World) -> None:
    daemon = world.daemon(socket_mode="0666")
    os.chmod(daemon.dir, 0o755)
    trainers = [world.trainer(daemon, uid=NOBODY) for _ in range(2)]
    assert [r["status"] for r in world.join(trainers)] == [0, 0]
    pid = daemon.worker_pid()
    check_worker(pid, NOBODY, 2)
    assert status_of(pid).get("Groups", "").split() in ([], [str(NOBODY)])
    settle(trainers, "alloc", key="a", count=1000)
    settle(trainers, "fill", key="a", value=1)
    assert [r["status"] for r in settle(trainers, "allreduce", name="x", key="a")] == [0, 0]


@pytest.mark.root
def test_a_worker_can_not_be_traced_or_killed_by_another_user(world: World) -> None:
    daemon = world.daemon(socket_mode="0666")
    os.chmod(daemon.dir, 0o755)
    world.job(daemon, 2)
    worker = daemon.worker_pid()
    import subprocess
    for command in ([f"kill -9 {worker}"], [f"ls /proc/{worker}/fd/ && false"]):
        result = subprocess.run(
            ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "sh", "-c",
             *command], capture_output=True, text=True, timeout=20)
        assert result.returncode != 0
    assert state_of(worker) not in ("", "Z")


def test_a_lingering_worker_keeps_no_memory_of_trainers(world: World) -> None:
    daemon = world.daemon(job_linger_s=30)
    trainers = world.job(daemon, 2)
    settle(trainers, "alloc", key="a", count=1 << 18)
    settle(trainers, "fill", key="a", value=1)
    assert [r["status"] for r in settle(trainers, "allreduce", name="x", key="a")] == [0, 0]
    worker = daemon.worker_pid()
    busy = fds_of(worker)
    settle(trainers, "shutdown")
    eventually(lambda: not memfd_mappings(worker), "no mapping of a trainer's memory")
    assert len(fds_of(worker)) <= len(busy) - 2
    check_worker(worker, os.getuid(), 0)
    # End it here: the linger time is longer than this test.
    os.kill(worker, signal.SIGTERM)
    daemon.assert_idle()


@pytest.mark.timing
def test_idle_processes_use_no_cpu(world: World) -> None:
    """A measurement over a fixed time: waiting trainers, worker and daemon under 1 % of a core."""
    import time
    from harness import cpu_seconds
    daemon = world.daemon()
    trainers = world.job(daemon, 2)
    trainers[0].send("barrier")
    daemon.admin("status")
    time.sleep(0.5)  # adaptive polling, if any, is over
    pids = [daemon.pid, daemon.worker_pid(), trainers[0].pid]
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(3)
    used = [cpu_seconds(pid) - b for pid, b in zip(pids, before)]
    print(f"CPU seconds in 3 s of waiting: daemon, worker, trainer {used}")
    assert all(u <= 0.03 for u in used), used
    trainers[1].send("barrier")
    assert [t.reply()["status"] for t in trainers] == [0, 0]
