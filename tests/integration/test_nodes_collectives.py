# SPDX-License-Identifier: Apache-2.0
"""Collectives over several nodes against a float64 reference: the same bits everywhere, always."""

from __future__ import annotations

from typing import Any, Callable

import pytest

import gradd_ctypes as api
from cluster import Cluster, Member, allreduce_is_right, trainers_of
from gradd_ctypes import STATUS
from harness import SANITIZER, settle

LAYOUTS = [(1, 1), (2, 2), (3, 1), (1, 1, 1), (1, 3, 2), (1, 1, 1, 1), (2, 1, 3, 2)]
# Elements: nothing, one, odd, and around 64 KiB of float32 and what fits into one chunk.
SIZES = [0, 1, 3, 1023, 16383, 16384, 16385, 70001]
QUICK_SIZES = [0, 1, 4099]
MakeCluster = Callable[..., Cluster]


def name_of(layout: tuple[int, ...]) -> str:
    return "+".join(map(str, layout))


def check(members: list[Member], what: str, **arguments: Any) -> str:
    """Run a family on all ranks; all agree with the reference. @return the digest of rank 0."""
    trainers = trainers_of(members)
    for trainer in trainers:
        trainer.send("check", what=what, **arguments)
    reports = [trainer.reply(90.0) for trainer in trainers]
    for rank, report in enumerate(reports):
        assert report["bad"] == [], f"rank {rank}: {report['bad']}"
        assert report["n"] > 0
    return reports


def same_bits(reports: list[dict[str, Any]]) -> str:
    digests = {report["digest"] for report in reports}
    assert len(digests) == 1, "the ranks' results differ"
    return digests.pop()


def again(cluster: Cluster, members: list[Member]) -> None:
    """Everyone leaves and joins the next epoch."""
    settle(trainers_of(members), "shutdown")
    cluster.join(members)


@pytest.mark.limit(120)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_allreduce_matches_the_reference_and_itself(make_cluster: MakeCluster,
                                                    layout: tuple[int, ...]) -> None:
    cluster = make_cluster(len(layout))
    members = cluster.job(layout)
    sizes = QUICK_SIZES if SANITIZER else SIZES
    same_bits(check(members, "allreduce", seed=1, places=["reg", "unreg"], sizes=QUICK_SIZES))
    arguments = {"seed": 2, "dtypes": [api.F32, api.BF16], "redops": [api.SUM, api.AVG],
                 "places": ["reg", "unreg>reg"], "sizes": sizes}
    digest = same_bits(check(members, "allreduce", **arguments))
    again(cluster, members)
    assert same_bits(check(members, "allreduce", **arguments)) == digest, "runs differ"


@pytest.mark.limit(120)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_the_other_collectives_match(make_cluster: MakeCluster, layout: tuple[int, ...]) -> None:
    members = make_cluster(len(layout)).job(layout)
    check(members, "moves", seed=3)
    same_bits(check(members, "scaled", seed=4))
    check(members, "special_values")


@pytest.mark.limit(120)
@pytest.mark.parametrize("layout", [(2, 2), (1, 3, 2), (2, 1, 1, 2)], ids=name_of)
def test_any_order_of_submission_and_groups(make_cluster: MakeCluster,
                                            layout: tuple[int, ...]) -> None:
    cluster = make_cluster(len(layout))
    members = cluster.job(layout)
    digest = same_bits(check(members, "shuffled", seed=5))
    grouped = same_bits(check(members, "grouped", seed=6))
    # Fusion depends on timing; sums do not.
    again(cluster, members)
    assert same_bits(check(members, "shuffled", seed=5)) == digest
    assert same_bits(check(members, "grouped", seed=6)) == grouped


@pytest.mark.large
@pytest.mark.limit(120)
@pytest.mark.parametrize("layout", [(1, 1), (3, 1), (1, 1, 1), (1, 1, 1, 1)], ids=name_of)
@pytest.mark.parametrize("streams", [1, 3])
def test_eight_mebibytes(make_cluster: MakeCluster, layout: tuple[int, ...],
                         streams: int) -> None:
    members = make_cluster(len(layout), ring_streams=streams).job(layout)
    for count in (2 << 20, (2 << 20) + 1):
        same_bits(check(members, "large", count=count, place="reg"))
        same_bits(check(members, "large", count=count, place="unreg"))


def submit(member: Member, name: str, **fields: Any) -> None:
    result = member.trainer.call("submit", handle=name, ops=[{"name": name, **fields}])
    assert result["status"] == 0, result


SPEC = {"kind": api.ALLREDUCE, "dtype": api.F32, "redop": api.SUM, "in": "a", "out": "a",
        "count": 8}


@pytest.mark.parametrize("ranks", [[1, 2], [0, 3], [2, 3]], ids=str)
def test_a_set_reduces_among_its_ranks(make_cluster: MakeCluster, ranks: list[int]) -> None:
    """A set over two nodes of three, one with the coordinator, and one within a node."""
    members = make_cluster(3).job((1, 1, 2))
    trainers = trainers_of(members)
    results = settle(trainers, "add_set", name="pair", ranks=ranks)
    assert [r["status"] for r in results] == [0] * 4, results
    ids = {r["set"] for r in results}
    assert len(ids) == 1 and 0 not in ids
    pair = ids.pop()
    settle(trainers, "alloc", key="a", count=8)
    for rank, trainer in enumerate(trainers):
        trainer.call("fill", key="a", value=10.0**rank)
    for rank in ranks:
        submit(members[rank], "in set", **SPEC, set=pair)
    inside = [trainers[rank] for rank in ranks]
    assert [r["status"] for r in settle(inside, "wait", handle="in set")] == [0, 0]
    total = sum(10.0**rank for rank in ranks)
    assert [t.call("values", key="a", n=8) for t in trainers] == [
        [total if rank in ranks else 10.0**rank] * 8 for rank in range(4)]
    assert [r["status"] for r in settle(inside, "barrier", set=pair)] == [0, 0]
    assert [r["status"] for r in settle(trainers, "barrier")] == [0] * 4
    assert [r["status"] for r in settle(trainers, "remove_set", set=pair)] == [0] * 4


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_rank_out_of_data_counts_as_zeros(make_cluster: MakeCluster, done: int) -> None:
    members = make_cluster(3).job((1, 2, 1))
    trainers = trainers_of(members)
    settle(trainers, "alloc", key="a", count=8)
    settle(trainers, "fill", key="a", value=2)
    submit(members[done], "join", kind=api.JOIN)
    rest = [m for m in members if m is not members[done]]
    for member in rest:
        submit(member, "short", **SPEC)
    assert [r["status"] for r in settle(trainers_of(rest), "wait", handle="short")] == [0] * 3
    values = [t.call("values", key="a", n=1)[0] for t in trainers]
    assert values == [2.0 if rank == done else 6.0 for rank in range(4)]
    for member in rest:
        submit(member, "join", kind=api.JOIN)
    results = settle(trainers, "wait_counts", handle="join")
    assert [r["status"] for r in results] == [0] * 4, results
    last = {r["counts"][0] for r in results}
    assert len(last) == 1 and done not in last, results


def test_a_barrier_waits_for_the_last_rank_of_another_node(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    members = cluster.job((2, 1))
    for member in members[:2]:
        member.trainer.send("barrier")
    cluster.daemons[0].admin("job", name="job")
    assert not any(member.trainer.has_reply() for member in members[:2])
    members[2].trainer.send("barrier")
    assert [member.trainer.reply()["status"] for member in members] == [0, 0, 0]


DISAGREEMENTS = {
    "count": ({"count": 7}, ("8", "7")),
    "dtype": ({"dtype": api.I32}, ("float32", "int32")),
    "op": ({"redop": api.MAX}, ("sum", "max")),
    "kind": ({"kind": api.BROADCAST, "root": 0}, ("reduce", "broadcast")),
}


@pytest.mark.parametrize("which", list(DISAGREEMENTS))
def test_a_disagreement_between_nodes_names_both_sides(make_cluster: MakeCluster,
                                                       which: str) -> None:
    change, words = DISAGREEMENTS[which]
    members = make_cluster(2).job((1, 2))
    trainers = trainers_of(members)
    settle(trainers, "alloc", key="a", count=8)
    for member in members[:2]:
        submit(member, "w", **SPEC)
    submit(members[2], "w", **{**SPEC, **change})
    for result in settle(trainers, "wait", handle="w"):
        assert result["status"] == STATUS["DISAGREE"], result
        text = result["error"].lower()
        assert '"w"' in text and "rank 2" in text and "node1" in text, text
        assert all(word in text for word in words), text
    # In the same epoch the job goes on, and the name is free.
    allreduce_is_right(members, "w")


@pytest.mark.parametrize("wire, epsilon", [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1, 1), (1, 1, 1, 1)], ids=name_of)
def test_a_narrow_wire_rounds_and_no_more(make_cluster: MakeCluster, layout: tuple[int, ...],
                                          wire: str, epsilon: float) -> None:
    cluster = make_cluster(len(layout), wire=wire)
    members = cluster.job(layout)
    arguments = {"seed": 7, "epsilon": epsilon, "n_nodes": len(layout),
                 "sizes": [1, 5, 4099, 300001]}
    digest = same_bits(check(members, "narrowed", **arguments))
    again(cluster, members)
    assert same_bits(check(members, "narrowed", **arguments)) == digest


@pytest.mark.parametrize("encrypted", ["no", "yes"])
def test_encrypted_data_gives_the_same_sums(make_cluster: MakeCluster, encrypted: str) -> None:
    members = make_cluster(3, data_encryption=encrypted).job((1, 1, 1))
    same_bits(check(members, "large", count=300001, place="reg"))
    check(members, "allreduce", seed=8, dtypes=[api.F32], redops=[api.SUM],
          places=["reg"], sizes=[1, 4099])


def test_several_jobs_at_once(make_cluster: MakeCluster) -> None:
    """Three jobs on the same nodes, each with its coordinator on another node."""
    cluster = make_cluster(3)
    jobs = [cluster.members((1, 1, 1)) for _ in range(3)]
    for number, members in enumerate(jobs):
        jobs[number] = members[number:] + members[:number]
        cluster.send_join(jobs[number], f"job{number}")
    for members in jobs:
        assert [m.trainer.reply()["status"] for m in members] == [0, 0, 0]
    trainers = [m.trainer for members in jobs for m in members]
    settle(trainers, "launch", tag="x", n=20, count=30000)
    for result in settle(trainers, "collect", tag="x"):
        assert (result["n_right"], result["n_wrong"], result["n_failed"]) == (20, 0, 0), result


def test_leaving_and_joining_again_is_the_next_epoch(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    members = cluster.members((1, 1, 1))
    for epoch in (1, 2, 3):
        assert cluster.join(members) == epoch
        allreduce_is_right(members, "x")
        settle(trainers_of(members), "shutdown")
    # Fewer and other nodes, another coordinator: the epochs go on.
    assert cluster.join(members[1:]) > 3
    allreduce_is_right(members[1:], "x")
