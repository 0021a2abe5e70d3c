# SPDX-License-Identifier: Apache-2.0
"""gradd on several nodes: a daemon in each namespace of netns.py, and jobs across them."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from typing import Any, Iterable

import netns
from gradd_ctypes import STATUS
from harness import (
    REPLY_S, SLOW, Daemon, Trainer, World, eventually, fds_of, memfd_mappings, settle,
)

PORT = 7010
JOB = "job"
DEAD_S = 2.0 * SLOW
# The job is remembered, with its epoch, for as long as its ranks need to join again.
SETTINGS = {"peer_dead_s": DEAD_S, "peer_heartbeat_s": DEAD_S / 5, "peer_port": PORT,
            "job_linger_s": 1.0 * SLOW}


@dataclasses.dataclass
class Member:
    """One rank's place: the node, and the process that holds the rank now."""

    node: int
    trainer: Trainer


class Cluster:
    """n nodes with a daemon each, that share a key. Ends with its world."""

    def __init__(self, world: World, n: int, **settings: Any) -> None:
        self.world = world
        self.settings = {**SETTINGS, **settings}
        self.home = tempfile.mkdtemp(prefix="gradd-nodes-")
        self.key = os.path.join(self.home, "key")
        write_key(self.key, secrets.token_bytes(32).hex())
        self.network = netns.Network(n)
        self.nodes = self.network.nodes
        world.on_destroy.append(self.close)
        self.daemons = [self.start_daemon(i) for i in range(n)]

    def start_daemon(self, i: int, **settings: Any) -> Daemon:
        node = self.nodes[i]
        together = {"node_name": node.name, "peer_address": node.address,
                    "cluster_key_file": self.key, **self.settings, **settings}
        daemon = self.world.daemon(prefix=node.prefix, **together)
        # A link each way may stay up for the next job.
        daemon.n_more_fds = 2 * (len(self.nodes) - 1)
        return daemon

    def restart_daemon(self, i: int) -> None:
        """Of a daemon that was killed."""
        old = self.daemons[i]
        old.process.wait(REPLY_S)
        if old.lifeline >= 0:  # a soak kills hundreds
            os.close(old.lifeline)
            old.lifeline = -1
        self.daemons[i] = self.start_daemon(i)

    def address(self, node: int) -> str:
        return f"{self.nodes[node].address}:{PORT}"

    def worker_pid(self, node: int) -> int:
        return self.daemons[node].worker_pid()

    # ------------------------------------------------------------ jobs

    def trainer(self, node: int) -> Trainer:
        return self.world.trainer(self.daemons[node], prefix=self.nodes[node].prefix)

    def members(self, slots: Iterable[int]) -> list[Member]:
        """slots[i] ranks on node i, that have not joined."""
        return [Member(node, self.trainer(node)) for node, n in enumerate(slots)
                for _ in range(n)]

    def arguments(self, members: list[Member], rank: int, job: str = JOB,
                  **more: Any) -> dict[str, Any]:
        """Of init, for the rank at this place of the list; the node of rank 0 coordinates."""
        member = members[rank]
        local = [i for i, other in enumerate(members) if other.node == member.node]
        # A daemon may have been started again since.
        return {"rank": rank, "size": len(members), "job": job,
                "socket": self.daemons[member.node].socket, "local_rank": local.index(rank),
                "local_size": len(local), "coordinator": self.address(members[0].node), **more}

    def send_join(self, members: list[Member], job: str = JOB, **more: Any) -> None:
        for rank, member in enumerate(members):
            member.trainer.send("init", **self.arguments(members, rank, job, **more))

    def join(self, members: list[Member], job: str = JOB, **more: Any) -> int:
        """All join; @return the epoch, which is the same for all."""
        self.send_join(members, job, **more)
        results = [member.trainer.reply() for member in members]
        assert [r["status"] for r in results] == [0] * len(members), results
        assert len({r["epoch"] for r in results}) == 1, results
        return results[0]["epoch"]

    def job(self, slots: Iterable[int], job: str = JOB, **more: Any) -> list[Member]:
        members = self.members(slots)
        self.join(members, job, **more)
        return members

    # ------------------------------------------------------------ the end

    def expect_nothing_left(self) -> None:
        """All ranks have left: of the epoch that is over no node keeps a process, a mapping or a
        socket. Workers may wait for the job's next epoch."""
        left: list[str] = []

        def is_clean() -> bool:
            left[:] = [line for i in range(len(self.nodes)) for line in self.left_on(i)]
            return not left

        try:
            eventually(is_clean, "nothing is left", 5.0 * SLOW)
        except AssertionError as error:
            logs = "".join(f"--- {daemon.log.text()[-3000:]}\n" for daemon in self.daemons)
            raise AssertionError("left behind: " + ", ".join(left) + "\n" + logs) from error

    def left_on(self, i: int) -> list[str]:
        node, daemon = self.nodes[i], self.daemons[i]
        workers = daemon.worker_pids()
        known = {daemon.pid, *workers, *(t.pid for t in self.world.trainers)}
        left = [f"{node.name}: process {pid}: {command_of(pid)}"
                for pid in node.pids() if pid not in known]
        for pid in workers:
            try:
                sockets = [link for link in fds_of(pid).values() if link.startswith("socket:")]
                mappings = memfd_mappings(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            if len(sockets) > 1:  # one is the daemon's
                left.append(f"{node.name}: {len(sockets) - 1} sockets of worker {pid}")
            if mappings:
                left.append(f"{node.name}: mappings of worker {pid}: {mappings}")
        return left

    def close(self) -> list[str]:
        """What is left on a node; the nodes are gone afterwards."""
        problems = []
        for node in self.nodes:
            deadline = time.monotonic() + 5.0
            while (pids := node.pids()) and time.monotonic() < deadline:
                time.sleep(0.01)
            for pid in pids:
                problems.append(f"{node.name}: process {pid} was left behind: {command_of(pid)}")
        for daemon in self.world.daemons:
            if "did not end when asked" in daemon.log.text():
                problems.append(f"a worker did not end when asked:\n{daemon.log.text()[-4000:]}")
        self.network.close()
        shutil.rmtree(self.home, ignore_errors=True)
        return problems


def write_key(path: str, text: str, mode: int = 0o600) -> None:
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, mode), "w") as file:
        file.write(text + "\n")
    os.chmod(path, mode)


def command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode()
    except OSError:
        return "?"


def trainers_of(members: Iterable[Member]) -> list[Trainer]:
    return [member.trainer for member in members]


def replace_dead(cluster: Cluster, members: Iterable[Member]) -> None:
    """New processes for dead ranks; the others leave the failed epoch once these are ready."""
    dead = [m for m in members if m.trainer.process.poll() is not None]
    for member in dead:
        member.trainer.destroy()
        member.trainer = cluster.trainer(member.node)
    settle(trainers_of(dead), "facts")
    settle(trainers_of(members), "shutdown_all")


def allreduce_is_right(members: list[Member], tag: str, n: int = 3, count: int = 5000) -> None:
    """A few sums on every rank, compared with what they must be."""
    trainers = trainers_of(members)
    results = settle(trainers, "launch", tag=tag, n=n, count=count)
    assert all(r["status"] == 0 for r in results), results
    for result in settle(trainers, "collect", tag=tag):
        assert (result["n_right"], result["n_wrong"], result["n_failed"]) == (n, 0, 0), result


def expect_told(results: list[dict[str, Any]], since: float, words: Iterable[str] = (),
                epoch: int | None = None, job: str = JOB, within_s: float = DEAD_S + SLOW) -> None:
    """Every rank has an error of the epoch, in time, that says what and where; no sum is wrong."""
    for result in results:
        assert result.get("n_wrong", 0) == 0, result
        assert result["status"] in (STATUS["RANK_LOST"], STATUS["UNAVAILABLE"]), result
        text = result["error"]
        assert re.search(rf"\bjob {re.escape(job)}\b", text), text
        if epoch is not None:
            assert re.search(rf"\bepoch {epoch}\b", text), text
        for word in words:
            assert re.search(word, text), (word, text)
        assert result["at"] - since <= within_s, \
            f"told after {result['at'] - since:.2f} s instead of {within_s:.2f}: {text}"


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def cont(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def wait_until_sent(cluster: Cluster, node: int, n_bytes: int, pid: int | None = None) -> None:
    """Until the node has sent so many bytes more: the op is under way."""
    pid = pid or cluster.daemons[node].pid
    begin = cluster.nodes[node].sent_bytes(pid)
    eventually(lambda: cluster.nodes[node].sent_bytes(pid) - begin >= n_bytes,
               f"{cluster.nodes[node].name} has sent {n_bytes} bytes", REPLY_S)
