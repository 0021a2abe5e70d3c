# SPDX-License-Identifier: Apache-2.0
"""Every collective, type and size against a float64 reference, on 1 to 8 ranks."""

from __future__ import annotations

from typing import Any

import pytest

import gradd_ctypes as api
from gradd_ctypes import STATUS
from harness import Trainer, World, settle

RANKS = [2, 3, 4, 8]


def check(trainers: list[Trainer], what: str, timeout_s: float = 60.0, **arguments: Any) -> str:
    """Run a family on all ranks; all agree with the reference. Returns the common digest."""
    for trainer in trainers:
        trainer.send("check", what=what, **arguments)
    reports = [trainer.reply(timeout_s * (3 if len(trainers) > 4 else 1)) for trainer in trainers]
    for rank, report in enumerate(reports):
        assert report["bad"] == [], f"rank {rank}: {report['bad']}"
        assert report["n"] > 0
    return reports


def assert_same_bits(reports: list[dict[str, Any]]) -> str:
    digests = {report["digest"] for report in reports}
    assert len(digests) == 1, "the ranks' results differ"
    return digests.pop()


@pytest.mark.limit(120)
@pytest.mark.parametrize("redop", [api.SUM, api.PROD, api.MAX, api.MIN, api.AVG],
                         ids=["sum", "prod", "max", "min", "avg"])
@pytest.mark.parametrize("n_ranks", RANKS)
def test_allreduce_matches_the_reference(world: World, n_ranks: int, redop: int) -> None:
    trainers = world.job(world.daemon(), n_ranks)
    assert_same_bits(check(trainers, "allreduce", seed=n_ranks, redops=[redop]))


@pytest.mark.limit(120)
@pytest.mark.parametrize("n_ranks", RANKS)
def test_broadcast_allgather_reduce_scatter_alltoall(world: World, n_ranks: int) -> None:
    trainers = world.job(world.daemon(), n_ranks)
    check(trainers, "moves", seed=10 + n_ranks)


@pytest.mark.parametrize("n_ranks", RANKS)
def test_scales_apply_before_and_after(world: World, n_ranks: int) -> None:
    trainers = world.job(world.daemon(), n_ranks)
    assert_same_bits(check(trainers, "scaled", seed=20 + n_ranks))


@pytest.mark.tsan
@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_sums_are_taken_in_rank_order(world: World, n_ranks: int) -> None:
    trainers = world.job(world.daemon(worker_threads=3), n_ranks)
    assert_same_bits(check(trainers, "rank_order", seed=30 + n_ranks))


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_nan_and_infinity_follow_the_manual(world: World, n_ranks: int) -> None:
    check(world.job(world.daemon(), n_ranks), "special_values")


@pytest.mark.tsan
@pytest.mark.parametrize("n_ranks", RANKS)
def test_ranks_may_submit_in_any_order(world: World, n_ranks: int) -> None:
    trainers = world.job(world.daemon(), n_ranks)
    assert_same_bits(check(trainers, "shuffled", seed=40 + n_ranks))


@pytest.mark.tsan
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_groups_complete_together(world: World, n_ranks: int) -> None:
    trainers = world.job(world.daemon(), n_ranks)
    assert_same_bits(check(trainers, "grouped", seed=50 + n_ranks))


@pytest.mark.parametrize("threads", [1, 4])
def test_runs_and_thread_counts_give_the_same_bits(world: World, threads: int) -> None:
    digests = set()
    for run_threads in (2, threads):
        daemon = world.daemon(worker_threads=run_threads)
        trainers = world.job(daemon, 3)
        digests.add(assert_same_bits(check(
            trainers, "allreduce", seed=60, dtypes=[api.F32, api.F16, api.BF16],
            redops=[api.SUM, api.AVG], sizes=[1, 4097, 300001])))
        settle(trainers, "shutdown")
    assert len(digests) == 1


@pytest.mark.large
@pytest.mark.limit(120)
@pytest.mark.parametrize("n_ranks, place", [
    (2, "reg"), (2, "unreg"), (2, "unreg>reg"), (2, "reg>unreg"), (4, "reg")])
def test_sixty_four_mebibytes(world: World, n_ranks: int, place: str) -> None:
    trainers = world.job(world.daemon(), n_ranks)
    assert_same_bits(check(trainers, "large", count=16 << 20, place=place))


@pytest.mark.tsan
@pytest.mark.parametrize("place", ["reg", "unreg"])
def test_several_pieces_and_an_odd_end(world: World, place: str) -> None:
    trainers = world.job(world.daemon(worker_threads=4), 2)
    for dtype in (api.F32, api.BF16):
        check(trainers, "allreduce", seed=70, dtypes=[dtype], redops=[api.SUM],
              sizes=[300001], places=[place])


def submit(trainer: Trainer, name: str, **fields: Any) -> dict[str, Any]:
    return trainer.call("submit", handle=name, ops=[{"name": name, **fields}])


def wait_all(trainers: list[Trainer], handle: str) -> list[dict[str, Any]]:
    return settle(trainers, "wait", handle=handle)


def test_wait_with_a_timeout_is_pending_and_the_handle_stays(world: World) -> None:
    trainers = world.job(world.daemon(), 2)
    settle(trainers, "alloc", key="a", count=10)
    settle(trainers, "fill", key="a", value=3)
    spec = {"kind": api.ALLREDUCE, "dtype": api.F32, "redop": api.SUM, "in": "a", "out": "a",
            "count": 10}
    assert submit(trainers[0], "x", **spec)["status"] == 0
    assert trainers[0].call("test", handle="x")["status"] == STATUS["PENDING"]
    assert trainers[0].call("wait", handle="x", timeout_s=0.05)["status"] == STATUS["PENDING"]
    assert submit(trainers[1], "x", **spec)["status"] == 0
    assert [r["status"] for r in wait_all(trainers, "x")] == [0, 0]
    assert trainers[0].call("values", key="a", n=1) == [6.0]
    # The handle went with the wait.
    assert trainers[0].call("test", handle="x")["status"] == STATUS["INVALID"]


@pytest.mark.parametrize("registered", [True, False])
def test_the_fd_becomes_readable_when_an_op_ends(world: World, registered: bool) -> None:
    trainers = world.job(world.daemon(), 2)
    settle(trainers, "alloc", key="a", count=300000, registered=registered)
    settle(trainers, "fill", key="a", value=1)
    spec = {"kind": api.ALLREDUCE, "dtype": api.F32, "redop": api.SUM, "in": "a", "out": "a",
            "count": 300000}
    submit(trainers[0], "x", **spec)
    submit(trainers[1], "x", **spec)
    unfinished = set(range(2))
    for _ in range(10000):
        for rank in sorted(unfinished):
            assert trainers[rank].call("poll_fd", timeout_s=10)["status"] == 0
            if trainers[rank].call("test", handle="x")["status"] == 0:
                unfinished.discard(rank)
        if not unfinished:
            break
    assert not unfinished
    assert [r["status"] for r in wait_all(trainers, "x")] == [0, 0]
    assert trainers[0].call("values", key="a", n=1) == [2.0]


def test_a_released_op_still_runs(world: World) -> None:
    trainers = world.job(world.daemon(), 2)
    settle(trainers, "alloc", key="a", count=10)
    settle(trainers, "fill", key="a", value=3)
    spec = {"kind": api.ALLREDUCE, "dtype": api.F32, "redop": api.SUM, "in": "a", "out": "a",
            "count": 10}
    submit(trainers[0], "x", **spec)
    assert trainers[0].call("release", handle="x")["status"] == 0
    submit(trainers[1], "x", **spec)
    assert trainers[1].call("wait", handle="x")["status"] == 0
    assert [r["status"] for r in settle(trainers, "barrier")] == [0, 0]
    assert trainers[1].call("values", key="a", n=1) == [6.0]


def test_a_barrier_waits_for_all(world: World) -> None:
    daemon = world.daemon()
    trainers = world.job(daemon, 3)
    for trainer in trainers[:2]:
        trainer.send("barrier")
    daemon.admin("job", name="job")
    assert not any(trainer.has_reply() for trainer in trainers[:2])
    trainers[2].send("barrier")
    assert [trainer.reply()["status"] for trainer in trainers] == [0, 0, 0]


def test_a_name_in_flight_may_not_be_submitted_again(world: World) -> None:
    trainers = world.job(world.daemon(), 2)
    settle(trainers, "alloc", key="a", count=4)
    spec = {"kind": api.ALLREDUCE, "dtype": api.F32, "redop": api.SUM, "in": "a", "out": "a",
            "count": 4}
    assert submit(trainers[0], "x", **spec)["status"] == 0
    again = trainers[0].call("submit", handle="again", ops=[{"name": "x", **spec}])
    if again["status"] == 0:
        again = trainers[0].call("wait", handle="again")
    assert again["status"] == STATUS["DUPLICATE"], again
    assert "x" in again["error"]
    submit(trainers[1], "x", **spec)
    assert [r["status"] for r in wait_all(trainers, "x")] == [0, 0]


@pytest.mark.parametrize("change", [
    {"dtype": 3}, {"dtype": 77}, {"redop": 9}, {"kind": 55}, {"name": ""}, {"name": "n" * 256},
    {"set": 12345}, {"count": 1 << 62}, {"kind": api.BROADCAST, "root": 2},
    {"kind": api.BROADCAST, "root": -1}, {"kind": api.REDUCE_SCATTER, "counts": [1, 1]},
    {"kind": api.ALLTOALL, "counts": [1 << 63, 1 << 63], "out_capacity": 4},
], ids=str)
def test_a_bad_argument_is_refused_and_the_job_goes_on(world: World,
                                                       change: dict[str, Any]) -> None:
    trainers = world.job(world.daemon(), 2)
    settle(trainers, "alloc", key="a", count=4)
    spec = {"kind": api.ALLREDUCE, "dtype": api.F32, "redop": api.SUM, "in": "a", "out": "a",
            "count": 4, "name": "bad", **change}
    result = trainers[0].call("submit", handle="bad", ops=[spec])
    assert result["status"] == STATUS["INVALID"], result
    assert result["error"]
    assert [r["status"] for r in settle(trainers, "allreduce", name="ok", key="a")] == [0, 0]


def test_partial_overlap_is_refused(world: World) -> None:
    trainers = world.job(world.daemon(), 2)
    result = trainers[0].call("overlap")
    assert result["status"] == STATUS["INVALID"], result
    assert [r["status"] for r in settle(trainers, "barrier")] == [0, 0]


def test_a_set_reduces_among_its_ranks(world: World) -> None:
    trainers = world.job(world.daemon(), 4)
    for trainer in trainers:
        trainer.send("add_set", name="odd", ranks=[1, 3])
    results = [trainer.reply() for trainer in trainers]
    assert [r["status"] for r in results] == [0] * 4, results
    ids = {r["set"] for r in results}
    assert len(ids) == 1 and 0 not in ids
    odd = ids.pop()
    settle(trainers, "alloc", key="a", count=5)
    for rank, trainer in enumerate(trainers):
        trainer.call("fill", key="a", value=rank + 1)
    # The set's op runs while the others do nothing.
    spec = {"kind": api.ALLREDUCE, "dtype": api.F32, "redop": api.SUM, "in": "a", "out": "a",
            "count": 5, "set": odd}
    for rank in (1, 3):
        assert submit(trainers[rank], "in set", **spec)["status"] == 0
    assert [r["status"] for r in wait_all([trainers[1], trainers[3]], "in set")] == [0, 0]
    assert [t.call("values", key="a", n=1)[0] for t in trainers] == [1.0, 6.0, 3.0, 6.0]
    outsider = submit(trainers[0], "in set", **spec)
    if outsider["status"] == 0:
        outsider = trainers[0].call("wait", handle="in set")
    assert outsider["status"] == STATUS["INVALID"], outsider
    assert [r["status"] for r in settle([trainers[1], trainers[3]], "barrier", set=odd)] == [0, 0]
    assert [r["status"] for r in settle(trainers, "barrier")] == [0] * 4
    for trainer in trainers:
        trainer.send("remove_set", set=odd)
    assert [t.reply()["status"] for t in trainers] == [0] * 4
    gone = submit(trainers[1], "after", **spec)
    if gone["status"] == 0:
        gone = trainers[1].call("wait", handle="after")
    assert gone["status"] == STATUS["INVALID"], gone


def test_a_rank_out_of_data_counts_as_zeros(world: World) -> None:
    trainers = world.job(world.daemon(), 3)
    settle(trainers, "alloc", key="a", count=8)
    settle(trainers, "fill", key="a", value=2)
    assert submit(trainers[2], "join", kind=api.JOIN)["status"] == 0
    spec = {"kind": api.ALLREDUCE, "dtype": api.F32, "redop": api.SUM, "in": "a", "out": "a",
            "count": 8}
    for trainer in trainers[:2]:
        assert submit(trainer, "short", **spec)["status"] == 0
    assert [r["status"] for r in wait_all(trainers[:2], "short")] == [0, 0]
    assert [t.call("values", key="a", n=1)[0] for t in trainers] == [4.0, 4.0, 2.0]
    for trainer in trainers[:2]:
        assert submit(trainer, "join", kind=api.JOIN)["status"] == 0
    for trainer in trainers:
        # counts() needs the handle, so look before the wait that releases it.
        trainer.send("wait_counts", handle="join")
    results = [trainer.reply() for trainer in trainers]
    assert [r["status"] for r in results] == [0, 0, 0], results
    lasts = {r["counts"][0] for r in results}
    assert len(lasts) == 1 and lasts <= {0, 1}, results


def test_an_allgather_that_does_not_fit_fails_everywhere(world: World) -> None:
    trainers = world.job(world.daemon(), 2)
    settle(trainers, "alloc", key="in", count=8)
    settle(trainers, "alloc", key="out", count=16)
    for rank, trainer in enumerate(trainers):
        submit(trainer, "gather", kind=api.ALLGATHER, dtype=api.F32, count=8,
               out_capacity=16 if rank == 0 else 15, **{"in": "in", "out": "out"})
    results = wait_all(trainers, "gather")
    assert all(r["status"] < 0 for r in results), results
    assert all("16" in r["error"] and "15" in r["error"] for r in results), results
    assert [r["status"] for r in settle(trainers, "barrier")] == [0, 0]
