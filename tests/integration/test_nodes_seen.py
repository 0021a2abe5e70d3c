# SPDX-License-Identifier: Apache-2.0
"""A job on several nodes as gradctl shows it on any of them, and NaN that any rank has."""

from __future__ import annotations

import os
import signal
from typing import Any, Callable

import pytest

import gradd_ctypes as api
from cluster import JOB, Cluster, Member, allreduce_is_right, trainers_of
from harness import Daemon, eventually, settle

MakeCluster = Callable[..., Cluster]
BIG = 4 << 20  # float32: more than sockets hold


def seen_anywhere(cluster: Cluster, job: str = JOB) -> list[dict[str, Any]]:
    return [daemon.gradctl_json("job", job) for daemon in cluster.daemons]


def facts_of(job: dict[str, Any]) -> tuple[Any, ...]:
    """What does not change between two looks at a job that rests."""
    ranks = [(r["rank"], r["node"], r["pid"], r["ops_done"], r["bytes"], r["memory_bytes"],
              r["late_max_us"], r["source"], r["last_tensor"]) for r in job["ranks"]]
    links = [(l["from_node"], l["to_node"], l["streams"]) for l in job["links"]]
    return ranks, sorted(links), job["nodes"], job["ops"], job["silent_nodes"]


def test_every_node_shows_all_ranks_and_links(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    members = cluster.job((1, 2, 1))
    allreduce_is_right(members, "a", count=50_000)
    jobs = seen_anywhere(cluster)
    assert [facts_of(job) for job in jobs[1:]] == [facts_of(jobs[0])] * 2
    names = [node.name for node in cluster.nodes]
    for job in jobs:
        assert (job["stats_stale"], job["silent_nodes"]) == (False, []), job
        assert [r["node"] for r in job["ranks"]] == [names[0], names[1], names[1], names[2]]
        assert all(r["memory_bytes"] > 0 and r["ops_done"] == 3 for r in job["ranks"]), job["ranks"]
        assert {(l["from_node"], l["to_node"]) for l in job["links"]} == \
            {(a, b) for a in names for b in names if a != b}
        sent = {(l["from_node"], l["to_node"]): l["sent_bytes"] for l in job["links"]}
        received = {(l["to_node"], l["from_node"]): l["received_bytes"] for l in job["links"]}
        assert sent == received and any(sent.values())


@pytest.mark.limit(90)
def test_the_slow_cable_is_named_on_every_node(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    members = cluster.job((1, 1, 1))
    cluster.nodes[1].cap_sent(200)
    allreduce_is_right(members, "big", n=2, count=BIG)
    for job in seen_anywhere(cluster):
        assert job["slowest_link"].startswith("node1 -> node2: "), (job["slowest_link"],
                                                                    job["links"])
    result = cluster.daemons[2].gradctl("job", JOB)
    assert "slowest link" in result.stdout and "node1 -> node2" in result.stdout, result.stdout


def test_the_late_rank_of_another_node_is_named_on_every_node(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3, stall_warn_s=0.2)
    members = cluster.job((1, 1, 1))
    late, others = members[2], [members[0], members[1]]
    for member in members:
        assert member.trainer.call("alloc", key="a", count=1000)["status"] == 0
    for i in range(3):
        for member in others:
            member.trainer.send("allreduce", name=f"t{i}", key="a")
        # All nodes see for whom the others wait; then it comes.
        for daemon in cluster.daemons:
            eventually(lambda: [(s["missing"], s["present"]) for s in
                                daemon.gradctl_json("job", JOB)["stalls"]] == [([2], [0, 1])],
                       "the stall names rank 2")
        late.trainer.send("allreduce", name=f"t{i}", key="a")
        assert [m.trainer.reply()["status"] for m in members] == [0, 0, 0]
    for job in seen_anywhere(cluster):
        assert job["latest_rank"].startswith("rank 2 (node node2): "), job


def test_a_node_that_does_not_answer_is_named(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3, peer_dead_s=30)
    cluster.job((1, 1, 1))

    def become(daemon: Daemon, silent: list[str]) -> None:
        def is_so() -> bool:
            job = daemon.gradctl_json("job", JOB)
            return (job["silent_nodes"], job["stats_stale"]) == (silent, False)

        eventually(is_so, f"silent are {silent}")

    # A worker that has not reached the coordinator's yet can not answer.
    become(cluster.daemons[0], [])
    pid = cluster.worker_pid(2)
    os.kill(pid, signal.SIGSTOP)
    try:
        for daemon in cluster.daemons[:2]:
            become(daemon, ["node2"])
    finally:
        os.kill(pid, signal.SIGCONT)
    become(cluster.daemons[0], [])


# ---------------------------------------------------------------- NaN


def checked(members: list[Member], name: str, kind: int, asking: set[int],
            bad: dict[int, dict[str, str]], ranks: list[int] | None = None, set: int = 0) \
        -> list[tuple[int, int, int]]:
    """Run one op; @return what each of its ranks hears: (found, rank, elements)."""
    ranks = ranks if ranks is not None else list(range(len(members)))
    trainers = [members[rank].trainer for rank in ranks]
    for rank, trainer in zip(ranks, trainers):
        assert trainer.call("alloc", key="in", count=600)["status"] == 0
        assert trainer.call("alloc", key="out", count=600)["status"] == 0
        trainer.call("fill", key="in", value=1.0)
        trainer.call("put", key="in", places=bad.get(rank, {}))
        result = trainer.call("submit", handle=name, ops=[{
            "name": name, "kind": kind, "dtype": api.F32, "redop": api.SUM, "in": "in",
            "out": "out", "count": 600, "set": set, "check_finite": rank in asking}])
        assert result["status"] == 0, result
    results = settle(trainers, "wait_nonfinite", handle=name)
    assert all(r["status"] == 0 for r in results), results
    return [(r["found"], r["rank"], r["count"]) for r in results]


@pytest.mark.parametrize("kind", [api.ALLREDUCE, api.REDUCE_SCATTER], ids=["all", "scatter"])
def test_all_nodes_hear_of_the_lowest_rank_with_a_nan(make_cluster: MakeCluster,
                                                      kind: int) -> None:
    cluster = make_cluster(3)
    members = cluster.job((1, 2, 1))
    n, everyone = len(members), {0, 1, 2, 3}
    bad = {2: {"5": "nan", "599": "inf"}, 3: {"0": "nan"}}
    assert checked(members, "both", kind, everyone, bad) == [(1, 2, 2)] * n
    assert checked(members, "none", kind, everyone, {}) == [(0, -1, 0)] * n
    assert checked(members, "first", kind, everyone, {0: {"7": "-inf"}}) == [(1, 0, 1)] * n
    # Whoever asks, everybody hears; where nobody does, nobody.
    assert checked(members, "one asks", kind, {3}, bad) == [(1, 2, 2)] * n
    assert checked(members, "nobody", kind, set(), bad) == [(0, -1, 0)] * n


def test_a_set_of_other_nodes_hears_of_its_nan(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    members = cluster.job((1, 2, 1))
    # One over two nodes without the coordinator's, one within a node.
    for ranks, hears in (([2, 3], (1, 3, 1)), ([1, 2], (1, 1, 2))):
        results = settle(trainers_of(members), "add_set", name=f"set {ranks}", ranks=ranks)
        assert len({r["set"] for r in results}) == 1, results
        bad = {3: {"9": "nan"}, 1: {"1": "nan", "2": "nan"}}
        assert checked(members, f"in {ranks}", api.ALLREDUCE, {ranks[0]}, bad, ranks,
                       results[0]["set"]) == [hears] * 2
