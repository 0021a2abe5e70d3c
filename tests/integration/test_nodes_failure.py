# SPDX-License-Identifier: Apache-2.0
"""Whatever dies, stops or is cut on one of several nodes: every rank hears which, where and why in
time, no sum is wrong, and the survivors go on in the next epoch.

Most of the time goes by in waiting for links to be dead. GRADD_TESTS_FULL=1 tries every fault in
every phase; without, each in one of them.
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable

import pytest

from cluster import (
    DEAD_S, JOB, PORT, Cluster, Member, allreduce_is_right, cont, expect_told, replace_dead, stop,
    trainers_of, wait_until_sent,
)
from faults import (
    FAULTS, CablePulled, DaemonKilled, DaemonStopped, Fault, NodeKilled, NodeStopped,
    ReceivesNothing, SendsNothing, TrainerKilled,
)
from gradd_ctypes import STATUS
from harness import SLOW, Trainer, eventually, settle

# Two ranks with the coordinator, one each on two other nodes. Node 1 is where most things happen.
LAYOUT = (2, 1, 1)
MakeCluster = Callable[..., Cluster]


# ------------------------------------------------------------------ phases of a running job


def negotiating(cluster: Cluster, members: list[Member], tag: str, node: int) -> list[Member]:
    """An op that one rank has not submitted. @return the ranks that have."""
    last = [m for m in members if m.node == node][-1]
    others = [m for m in members if m is not last]
    settle(trainers_of(others), "launch", tag=tag, n=3)
    return others


def mid_ring(cluster: Cluster, members: list[Member], tag: str, node: int) -> list[Member]:
    """A large op under way on slow links."""
    for each in cluster.nodes:
        each.cap(100)
    settle(trainers_of(members), "launch", tag=tag, n=1, count=2 << 20)
    wait_until_sent(cluster, node, 512 << 10)
    return members


def completing(cluster: Cluster, members: list[Member], tag: str, node: int) -> list[Member]:
    """Some of many ops are through."""
    settle(trainers_of(members), "launch", tag=tag, n=100)
    assert members[0].trainer.call("first", tag=tag)["status"] == 0
    return members


PHASES = [negotiating, mid_ring, completing]
IS_FULL = os.environ.get("GRADD_TESTS_FULL", "") not in ("", "0")


def phases_of(fault_class: type[Fault], node: int) -> list[Callable[..., Any]]:
    """All, or one: over the faults and nodes each phase has its turn."""
    if IS_FULL:
        return PHASES
    return [PHASES[(FAULTS.index(fault_class) + node) % len(PHASES)]]


def ends(submitted: list[Member], others: list[Member], tag: str) -> list[dict[str, Any]]:
    """How it ends for every rank; whose ops all came through in time hears it at the next op."""
    for member in submitted:
        member.trainer.send("collect", tag=tag)
    for member in others:
        member.trainer.send("barrier")
    results = [m.trainer.reply() for m in submitted] + [m.trainer.reply() for m in others]
    for i, member in enumerate(submitted + others):
        assert results[i].get("n_wrong", 0) == 0, results[i]
        if results[i]["status"] == 0:
            results[i] = member.trainer.call("barrier")
    return results


def strike(cluster: Cluster, members: list[Member], fault: Fault, phase: Callable[..., Any],
           epoch: int) -> None:
    """Inject the fault in this phase and hear all who can tell."""
    tag = f"{phase.__name__}.{epoch}"
    submitted = phase(cluster, members, tag, fault.node)
    since = time.time()
    fault.inject()
    alive = [m for m in members if m.trainer.process.poll() is None]
    if fault.kills_trainers or fault.stops_trainers:
        alive = [m for m in alive if m.node != fault.node]
    at_once = [m for m in alive if m.node != fault.node]
    on_node = [m for m in alive if m.node == fault.node]
    results = ends([m for m in alive if m in submitted], [m for m in alive if m not in submitted],
                   tag)
    ordered = [m for m in alive if m in submitted] + [m for m in alive if m not in submitted]
    name = cluster.nodes[fault.node].name
    words = (rf"\b{name}\b", *fault.words)
    expect_told([r for m, r in zip(ordered, results) if m in at_once], since, words, epoch)
    expect_told([r for m, r in zip(ordered, results) if m in on_node], since)
    fault.heal()
    cluster.network.heal()
    if fault.stops_trainers:
        late = ends([m for m in fault.here if m in submitted],
                    [m for m in fault.here if m not in submitted], tag)
        expect_told(late, time.time())


@pytest.mark.limit(90)
@pytest.mark.parametrize("node", [1, 0], ids=["member", "coordinator"])
@pytest.mark.parametrize("fault_class", FAULTS, ids=lambda f: f.__name__)
def test_every_rank_hears_of_it_and_the_job_goes_on(make_cluster: MakeCluster, node: int,
                                                    fault_class: type[Fault]) -> None:
    cluster = make_cluster(3)
    members = cluster.job(LAYOUT)
    epoch = 1
    for phase in phases_of(fault_class, node):
        allreduce_is_right(members, f"before.{phase.__name__}")
        strike(cluster, members, fault_class(cluster, node, members), phase, epoch)
        replace_dead(cluster, members)
        cluster.expect_nothing_left()
        before, epoch = epoch, cluster.join(members)
        assert epoch == before + 1
    allreduce_is_right(members, "after")


# ------------------------------------------------------------------ joining


@pytest.mark.limit(90)
@pytest.mark.parametrize("fault_class", [TrainerKilled, DaemonKilled, DaemonStopped, NodeKilled,
                                         NodeStopped, SendsNothing, ReceivesNothing, CablePulled],
                         ids=lambda f: f.__name__)
def test_a_member_lost_while_joining_is_waited_for_again(make_cluster: MakeCluster,
                                                         fault_class: type[Fault]) -> None:
    cluster = make_cluster(3)
    members = cluster.members(LAYOUT)
    last = members[-1]
    cluster_join_all_but(cluster, members, last)
    fault = fault_class(cluster, 1, members)
    fault.inject()
    # Its rank is missing again, with the one that never came.
    missing = [2, 3]
    eventually(lambda: cluster.daemons[0].admin("job", name=JOB).get("missing") == missing,
               "the coordinator misses the rank", DEAD_S + 5 * SLOW)
    assert not any(members[rank].trainer.has_reply() for rank in (0, 1))
    fault.heal()
    if members[2].trainer.process.poll() is None:
        result = members[2].trainer.reply(DEAD_S + 5 * SLOW)
        assert result["status"] in (STATUS["UNAVAILABLE"], STATUS["RANK_LOST"]), result
        assert JOB in result["error"], result
    else:
        members[2].trainer = cluster.trainer(1)
    for rank in (2, 3):
        members[rank].trainer.send("init", **cluster.arguments(members, rank))
    results = [m.trainer.reply() for m in members]
    assert [r["status"] for r in results] == [0] * 4, results
    allreduce_is_right(members, "after")


def cluster_join_all_but(cluster: Cluster, members: list[Member], absent: Member) -> None:
    for rank, member in enumerate(members):
        if member is not absent:
            member.trainer.send("init", **cluster.arguments(members, rank))
    cluster.daemons[0].wait_joined(JOB, len(members) - 1)


@pytest.mark.limit(90)
@pytest.mark.parametrize("fault_class", [DaemonKilled, DaemonStopped, NodeKilled, NodeStopped,
                                         SendsNothing, CablePulled], ids=lambda f: f.__name__)
def test_a_coordinator_lost_while_joining_fails_every_join(make_cluster: MakeCluster,
                                                           fault_class: type[Fault]) -> None:
    cluster = make_cluster(3)
    members = cluster.members(LAYOUT)
    cluster_join_all_but(cluster, members, members[3])
    since = time.time()
    fault = fault_class(cluster, 0, members)
    fault.inject()
    expect_told([members[2].trainer.reply()], since, [r"node0|10\.77\.0\.1"])
    # Another coordinator serves at once.
    others = [members[3], members[2]]
    cluster.join(others)
    allreduce_is_right(others, "x")
    fault.heal()
    settle(trainers_of(others), "shutdown")
    if fault.kills_trainers:
        return
    if isinstance(fault, DaemonKilled):
        for result in [m.trainer.reply() for m in members[:2]]:
            assert result["status"] == STATUS["UNAVAILABLE"], result
        for rank in (0, 1):
            members[rank].trainer.send("init", **cluster.arguments(members, rank))
    # Whoever waited with the coordinator waits on.
    for rank in (2, 3):
        members[rank].trainer.send("init", **cluster.arguments(members, rank))
    results = [m.trainer.reply() for m in members]
    assert [r["status"] for r in results] == [0] * 4, results
    allreduce_is_right(members, "after")


def test_ranks_that_never_come_are_named_to_all(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3, join_timeout_s=1.0)
    members = cluster.members(LAYOUT)
    for rank in (0, 2):
        members[rank].trainer.send("init", **cluster.arguments(members, rank))
    for result in [members[rank].trainer.reply() for rank in (0, 2)]:
        assert result["status"] == STATUS["TIMEOUT"], result
        assert "1" in result["error"] and "3" in result["error"], result
    # The next attempt is not hurt.
    cluster.join(members)
    allreduce_is_right(members, "x")


# ------------------------------------------------------------------ partitions


@pytest.mark.parametrize("phase", PHASES if IS_FULL else [mid_ring], ids=lambda p: p.__name__)
def test_a_partition_stops_both_halves(make_cluster: MakeCluster,
                                       phase: Callable[..., Any]) -> None:
    cluster = make_cluster(4)
    members = cluster.job((1, 1, 1, 1))
    submitted = phase(cluster, members, "x", 1)
    since = time.time()
    cluster.network.partition(*cluster.nodes[2:])
    results = ends(submitted, [m for m in members if m not in submitted], "x")
    expect_told(results, since, epoch=1)
    # Neither half can do another op, or join the other half.
    for result in settle(trainers_of(members), "barrier"):
        assert result["status"] == STATUS["RANK_LOST"], result
    settle(trainers_of(members), "shutdown")
    cluster.send_join(members, timeout_s=2.0 * SLOW)
    for result in [m.trainer.reply() for m in members]:
        assert result["status"] in (STATUS["TIMEOUT"], STATUS["UNAVAILABLE"]), result
    cluster.network.heal()
    cluster.join(members)
    allreduce_is_right(members, "after")


def test_two_members_that_do_not_hear_each_other_fail_the_epoch(make_cluster: MakeCluster) -> None:
    """Both still hear the coordinator: its heartbeats are no proof that the ring works."""
    cluster = make_cluster(3)
    members = cluster.job((1, 1, 1))
    allreduce_is_right(members, "before")
    since = time.time()
    cluster.nodes[1].block(cluster.nodes[2])
    settle(trainers_of(members), "launch", tag="x", n=1, count=2 << 20)
    expect_told(ends(members, [], "x"), since, ["node1|node2"], 1)
    cluster.nodes[1].unblock(cluster.nodes[2])
    settle(trainers_of(members), "shutdown")
    assert cluster.join(members) == 2
    allreduce_is_right(members, "after")


def test_links_that_cannot_be_made_fail_the_join(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    cluster.nodes[1].block(cluster.nodes[2])
    members = cluster.members((1, 1, 1))
    settle(trainers_of(members), "facts")
    since = time.time()
    cluster.send_join(members)
    results = [m.trainer.reply() for m in members]
    for i, member in enumerate(members):
        if results[i]["status"] == 0:  # joined before the links are needed: told by the first op
            member.trainer.send("barrier")
    results = [members[i].trainer.reply() if r["status"] == 0 else r
               for i, r in enumerate(results)]
    expect_told(results, since, ["node1|node2"])
    settle(trainers_of(members), "shutdown")
    cluster.expect_nothing_left()


def test_ranks_may_leave_before_the_links_stand(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3, peer_dead_s=30.0 * SLOW)
    cluster.nodes[1].block(cluster.nodes[2])
    members = cluster.job((1, 1, 1))
    settle(trainers_of(members), "shutdown")
    # By itself: the cluster's end finds none that had to be killed.
    for daemon in cluster.daemons:
        eventually(lambda: not daemon.worker_pids(), "the worker ends with its job")


# ------------------------------------------------------------------ slow, but alive


def test_a_slow_link_is_not_a_dead_one(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    members = cluster.job((1, 1, 1))
    # More than peer_dead_s of transfer, in which heartbeats must still come through.
    cluster.nodes[1].cap(10)
    count = int(10e6 / 8 * DEAD_S * 1.5 / 4)
    settle(trainers_of(members), "launch", tag="x", n=1, count=count)
    for result in settle(trainers_of(members), "collect", tag="x"):
        assert (result["status"], result["n_right"]) == (0, 1), result


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stopped_trainer_is_late_and_not_lost(make_cluster: MakeCluster, rank: int) -> None:
    cluster = make_cluster(3, stall_warn_s=0.5)
    members = cluster.job(LAYOUT)
    late = members[rank].trainer
    others = [m.trainer for m in members if m.trainer is not late]
    stop(late.pid)
    late.send("launch", tag="x", n=3)
    settle(others, "launch", tag="x", n=3)
    # The coordinator says who is waited for.
    cluster.daemons[0].log.wait_for(rf"rank {rank}\b.*node{members[rank].node}|"
                                    rf"node{members[rank].node}.*rank {rank}\b")
    time_to_die = time.monotonic() + DEAD_S + SLOW
    while time.monotonic() < time_to_die:
        assert cluster.daemons[0].admin("job", name=JOB)  # it lives, and nobody is told anything
    cont(late.pid)
    assert late.reply()["status"] == 0
    for result in settle(trainers_of(members), "collect", tag="x"):
        assert (result["status"], result["n_right"]) == (0, 3), result


def test_a_stopped_trainer_fails_the_op_after_op_timeout(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, op_timeout_s=1.0)
    members = cluster.job((1, 1))
    late = members[1].trainer
    stop(late.pid)
    members[0].trainer.call("launch", tag="x", n=1)
    result = members[0].trainer.call("collect", tag="x")
    cont(late.pid)
    assert result["status"] == STATUS["TIMEOUT"], result
    assert "rank 1" in result["error"] and "node1" in result["error"], result


# ------------------------------------------------------------------ links that only look alive


@pytest.mark.limit(90)
@pytest.mark.parametrize("is_large", [True, False], ids=["large", "small"])
def test_a_link_that_stalls_is_named_after_op_timeout(make_cluster: MakeCluster,
                                                      is_large: bool) -> None:
    """A firewall drops what two workers send each other; their daemons hear each other. Node 0
    waits as long as they do, but it is not its link."""
    limit_s = 2.0 * SLOW
    cluster = make_cluster(3, op_timeout_s=limit_s, stall_warn_s=0.75 * limit_s,
                           peer_dead_s=10 * limit_s)
    members = cluster.job(LAYOUT)
    allreduce_is_right(members, "before")
    if is_large:
        for node in cluster.nodes:
            node.cap(10)
        settle(trainers_of(members), "launch", tag="x", n=1, count=2 << 20)
        wait_until_sent(cluster, 1, 512 << 10)
    for node, other in ((1, 2), (2, 1)):
        cluster.nodes[node].block_connections(cluster.worker_pid(node), cluster.nodes[other])
    since = time.time()
    if not is_large:
        settle(trainers_of(members), "launch", tag="x", n=1)
    results = ends(members, [], "x")
    words = (r"worker of node (node1 lost its link to node node2|node2 .* to node node1)\b",
             r"nothing moved for [0-9.]+ s \(op_timeout_s\), stream \d+: ",
             r"\d+ of \d+ bytes of a message (sent|received)|\d+ bytes not acknowledged")
    expect_told(results, since, words, 1, within_s=2 * limit_s + SLOW)
    teller = 1 if "worker of node node1" in results[0]["error"] else 2
    cluster.daemons[teller].log.wait_for(
        f"the data connection to node node{3 - teller} has moved nothing since")
    cluster.network.heal()
    settle(trainers_of(members), "shutdown_all")
    cluster.expect_nothing_left()
    cluster.join(members)
    allreduce_is_right(members, "after")


@pytest.mark.limit(90)
def test_a_slow_ring_is_not_given_up_while_it_moves(make_cluster: MakeCluster) -> None:
    op_timeout_s = 0.5 * SLOW
    cluster = make_cluster(3, op_timeout_s=op_timeout_s)
    members = cluster.job(LAYOUT)
    for node in cluster.nodes:
        node.cap(10 / SLOW)
    since = time.monotonic()
    allreduce_is_right(members, "slow", n=1, count=1 << 20)
    assert time.monotonic() - since > 2 * op_timeout_s  # else this test has shown nothing


# ------------------------------------------------------------------ strangers

STRANGE = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "noise": bytes(range(256)) * 64,
    "something_like_tls": b"\x16\x03\x01\x02\x00" + bytes(512),
    "half_a_greeting": b"\x16",
    "nothing": b"",
}


def test_strangers_at_the_port_do_not_disturb_a_job(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    members = cluster.job(LAYOUT)
    connections = []
    for what, octets in STRANGE.items():
        for node in cluster.nodes:
            connection = cluster.nodes[2].connect(node.address, PORT)
            connection.sendall(octets)
            connections.append(connection)
        allreduce_is_right(members, what)
    for connection in connections:
        connection.close()
    allreduce_is_right(members, "after")
    settle(trainers_of(members), "shutdown")
    assert cluster.join(members) == 2
    for daemon in cluster.daemons:
        assert "epoch failed" not in daemon.log.text(), daemon.log.text()[-2000:]


# ------------------------------------------------------------------ what is left


def test_another_size_after_a_loss(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    members = cluster.job((2, 1, 1))
    for lost in (3, 1):
        victim: Trainer = members[lost].trainer
        victim.kill()
        del members[lost]
        expect_told(settle(trainers_of(members), "barrier"), time.time(), [str(victim.pid)])
        settle(trainers_of(members), "shutdown")
        cluster.join(members)
        allreduce_is_right(members, "x")


def test_a_worker_ends_while_ranks_still_hold_their_failed_epoch(
        make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    members = cluster.job((1, 2))
    members[2].trainer.kill()
    survivors = members[:2]
    expect_told(settle(trainers_of(survivors), "barrier"), time.time())
    # By itself: the cluster's end finds none that had to be killed.
    for daemon in cluster.daemons:
        eventually(lambda: not daemon.worker_pids(), "the worker ends with its job")
    for result in settle(trainers_of(survivors), "barrier"):
        assert result["status"] == STATUS["RANK_LOST"], result


def test_ranks_that_leave_in_order_hurt_nobody(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    members = cluster.job((1, 1, 1))
    allreduce_is_right(members, "x")
    for member in members:
        member.trainer.call("shutdown")
    for daemon in cluster.daemons:
        assert "lost" not in daemon.log.text() and "aborted" not in daemon.log.text(), \
            daemon.log.text()[-2000:]
