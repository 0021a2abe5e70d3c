# SPDX-License-Identifier: Apache-2.0
"""Two daemons on one machine, as two nodes: needs neither root nor namespaces. Ranks of both meet,
are told what is wrong with a join, and are seen from either side."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from typing import Any

import pytest

from gradd_ctypes import STATUS
from harness import Daemon, Trainer, World, fds_of, settle, shut_down_socket

HEARTBEAT = {"peer_heartbeat_s": 0.2, "peer_dead_s": 1.0}


class Node:
    """A daemon that awaits others on a port of its own."""

    def __init__(self, world: World, name: str, **settings: Any) -> None:
        # No key: then daemons of one user on one machine are taken at their word.
        together = {"node_name": name, "peer_port": 0, **HEARTBEAT, **settings}
        self.world = world
        self.name = name
        self.daemon: Daemon = world.daemon(**together)
        self.daemon.n_more_fds = 2  # a link each way stays up for a while
        self.port = int(self.peers()["listening"].rpartition(":")[2])
        self.address = f"127.0.0.1:{self.port}"

    def peers(self) -> dict[str, Any]:
        return self.daemon.gradctl_json("peers")

    def trainer(self) -> Trainer:
        return self.world.trainer(self.daemon)


@pytest.fixture
def two(world: World) -> tuple[Node, Node]:
    return Node(world, "left"), Node(world, "right")


def send_join(trainers: list[Trainer], coordinator: str, size: int | None = None,
              **more: Any) -> None:
    """Ranks in order; local ranks are for the daemons to count."""
    for rank, trainer in enumerate(trainers):
        trainer.send("init", **trainer.init_arguments(rank, size or len(trainers), "job",
                                                      coordinator=coordinator, **more))


def replies(trainers: list[Trainer]) -> list[dict[str, Any]]:
    return [trainer.reply() for trainer in trainers]


def assert_joined(results: list[dict[str, Any]]) -> int:
    assert [r["status"] for r in results] == [0] * len(results), results
    assert len({r["epoch"] for r in results}) == 1, results
    return results[0]["epoch"]


def test_ranks_of_both_know_where_they_are(two: tuple[Node, Node]) -> None:
    left, right = two
    trainers = [left.trainer(), right.trainer(), left.trainer(), right.trainer(), left.trainer()]
    send_join(trainers, left.address)
    results = replies(trainers)
    assert_joined(results)
    places = [(r["node_rank"], r["local_rank"], r["local_size"], r["n_nodes"]) for r in results]
    assert places == [(0, 0, 3, 2), (1, 0, 2, 2), (0, 1, 3, 2), (1, 1, 2, 2), (0, 2, 3, 2)]
    settle(trainers, "shutdown")


def test_a_host_name_serves_as_well(two: tuple[Node, Node]) -> None:
    left, right = two
    trainers = [left.trainer(), right.trainer()]
    if socket.gethostbyname("localhost") != "127.0.0.1":
        pytest.skip("localhost is not 127.0.0.1 here")
    send_join(trainers, f"localhost:{left.port}")
    assert_joined(replies(trainers))
    settle(trainers, "shutdown")


def test_either_node_shows_the_whole_job_and_the_other_node(two: tuple[Node, Node]) -> None:
    left, right = two
    trainers = [left.trainer(), right.trainer()]
    send_join(trainers, left.address)
    assert_joined(replies(trainers))
    for node, other in ((left, right), (right, left)):
        job = node.daemon.gradctl_json("job", "job")
        assert [(r["rank"], r["node"]) for r in job["ranks"]] == [(0, "left"), (1, "right")], job
        assert (job["joined"], job["size"], job["stats_stale"]) == (2, 2, False), job
        assert job["nodes"] == ["left", "right"], job
        peers = [p for p in node.peers()["peers"] if p["state"] == "up"]
        assert [(p["node"], p["jobs"]) for p in peers] == [(other.name, 1)], peers
    settle(trainers, "shutdown")


def test_who_is_missing_is_seen_and_told_on_both(two: tuple[Node, Node]) -> None:
    left, right = two
    trainers = [left.trainer(), right.trainer()]
    for rank, trainer in zip((0, 2), trainers):
        trainer.send("init", **trainer.init_arguments(rank, 4, "job", coordinator=left.address,
                                                      timeout_s=1.5))
    left.daemon.wait_joined("job", 2)
    for node in two:
        job = node.daemon.gradctl_json("job", "job")
        assert (job["state"], job["missing"]) == ("gathering", [1, 3]), job
    for result in replies(trainers):
        assert result["status"] == STATUS["TIMEOUT"], result
        assert "ranks 1, 3 did not" in result["error"], result


def test_disagreements_name_both_sides(two: tuple[Node, Node]) -> None:
    left, right = two
    waiting, other = left.trainer(), right.trainer()
    waiting.send("init", **waiting.init_arguments(0, 2, "job", coordinator=left.address))
    left.daemon.wait_joined("job", 1)
    result = other.call("init", **other.init_arguments(1, 3, "job", coordinator=left.address))
    assert result["status"] == STATUS["DISAGREE"], result
    assert re.search(rf"rank 1 \(node right, pid {other.pid}\) says the job has 3 ranks, rank 0 "
                     "said 2", result["error"]), result
    result = other.call("init", **other.init_arguments(0, 2, "job", coordinator=left.address))
    assert result["status"] == STATUS["DUPLICATE"], result
    assert f"pid {waiting.pid} waits as this rank" in result["error"], result
    other.send("init", **other.init_arguments(1, 2, "job", coordinator=left.address))
    assert_joined(replies([waiting, other]))
    settle([waiting, other], "shutdown")


def test_the_coordinator_has_to_be_on_the_node_of_rank_0(two: tuple[Node, Node]) -> None:
    left, right = two
    trainers = [left.trainer(), right.trainer()]
    send_join(trainers, right.address)
    for result in replies(trainers):
        assert result["status"] == STATUS["DISAGREE"], result
        assert "rank 0" in result["error"] and "GRADD_COORDINATOR" in result["error"], result


def test_each_next_epoch_may_have_another_coordinator(two: tuple[Node, Node]) -> None:
    trainers = [node.trainer() for node in two]
    epochs = []
    for _ in range(3):
        send_join(trainers, f"127.0.0.1:{two[0].port}")
        epochs.append(assert_joined(replies(trainers)))
        settle(trainers, "shutdown")
        two = (two[1], two[0])
        trainers.reverse()
    assert epochs == [1, 2, 3]


def tcp_sockets(pid: int) -> list[int]:
    with open(f"/proc/{pid}/net/tcp") as table:
        inodes = {line.split()[9] for line in table.readlines()[1:]}
    return [fd for fd, link in fds_of(pid).items() if link[len("socket:["):-1] in inodes]


def test_a_link_lost_while_all_leave_does_not_fail_the_next_epoch(two: tuple[Node, Node]) -> None:
    trainers = [node.trainer() for node in two]
    send_join(trainers, two[0].address)
    assert_joined(replies(trainers))
    assert [r["status"] for r in settle(trainers, "barrier")] == [0, 0]
    worker = two[1].daemon.worker_pid()
    links = tcp_sockets(worker)
    assert links
    for fd in links:
        shut_down_socket(worker, fd)
    time.sleep(0.05)  # the coordinator hears of it, and waits a moment for a better cause
    settle(trainers, "shutdown")
    send_join(trainers, two[0].address)
    assert_joined(replies(trainers))
    end = time.time() + 0.5
    while time.time() < end:
        assert [r["status"] for r in settle(trainers, "barrier")] == [0, 0]
    settle(trainers, "shutdown")


def test_two_addresses_of_the_coordinator_serve_two_jobs(world: World) -> None:
    """As on nodes with several networks: neither job disturbs the other."""
    path = os.path.join(world.daemon().home, "key")
    with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o400), "w") as file:
        file.write("secret" * 8)
    left, right = (Node(world, name, cluster_key_file=path, peer_address="0.0.0.0")
                   for name in ("left", "right"))
    jobs = {}
    for job, host in (("one", "127.0.0.1"), ("two", "127.0.0.2")):
        jobs[job] = [left.trainer(), right.trainer()]
        for rank, trainer in enumerate(jobs[job]):
            trainer.send("init", **trainer.init_arguments(rank, 2, job,
                                                          coordinator=f"{host}:{left.port}"))
        assert_joined(replies(jobs[job]))
    for trainers in jobs.values():
        assert [r["status"] for r in settle(trainers, "barrier")] == [0, 0]
        settle(trainers, "shutdown")


def test_a_coordinator_that_is_not_there_is_told_in_time(two: tuple[Node, Node]) -> None:
    _, right = two
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        trainer = right.trainer()
        result = trainer.call("init", **trainer.init_arguments(1, 2, "job", coordinator=address,
                                                               timeout_s=0.5))
    assert result["status"] == STATUS["TIMEOUT"], result
    assert address in result["error"] and "Connection refused" in result["error"], result


def test_other_keys_are_told_at_once(world: World) -> None:
    nodes = []
    for name in ("left", "right"):
        path = os.path.join(world.daemon().home, "key")
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o400), "w") as file:
            file.write(name * 16)
        nodes.append(Node(world, name, cluster_key_file=path, peer_address="127.0.0.1"))
    trainer = nodes[1].trainer()
    result = trainer.call("init", **trainer.init_arguments(1, 2, "job",
                                                           coordinator=nodes[0].address))
    assert result["status"] == STATUS["UNAVAILABLE"], result
    assert "its cluster key is another one" in result["error"], result
    assert result["seconds"] < 5.0, result


@pytest.mark.timing
@pytest.mark.parametrize("lost", [0, 1], ids=["coordinator", "member"])
def test_a_stopped_daemon_is_told_to_the_other_node(two: tuple[Node, Node], lost: int) -> None:
    trainers = [node.trainer() for node in two]
    send_join(trainers, two[0].address)
    epoch = assert_joined(replies(trainers))
    survivor = trainers[1 - lost]
    os.kill(two[lost].daemon.pid, signal.SIGSTOP)
    try:
        since = time.monotonic()
        result = survivor.call("barrier")
        assert time.monotonic() - since < HEARTBEAT["peer_dead_s"] + 1.0
        assert result["status"] == STATUS["RANK_LOST"], result
        assert f"epoch {epoch}: " in result["error"], result
        assert two[lost].name in result["error"] and "no heartbeat" in result["error"], result
    finally:
        os.kill(two[lost].daemon.pid, signal.SIGCONT)
    # The stopped one finds out, and its rank with it: at the latest in the next operation, for the
    # one that the other rank had submitted may still come through.
    statuses = [trainers[lost].call("barrier")["status"]]
    if statuses[0] == STATUS["OK"]:
        statuses.append(trainers[lost].call("barrier")["status"])
    assert statuses[-1] == STATUS["RANK_LOST"], statuses
    settle(trainers, "shutdown")
    send_join(trainers, two[0].address)
    assert assert_joined(replies(trainers)) == epoch + 1
    settle(trainers, "shutdown")
