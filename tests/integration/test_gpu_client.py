# SPDX-License-Identifier: Apache-2.0
"""Device memory in libgradd, on the fake driver: ways through memory, order of streams, failure."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import gradd_ctypes as api
from gpu import FAKES, Gpus
from gradd_ctypes import STATUS
from harness import Trainer, World, eventually, settle

pytestmark = pytest.mark.skipif(not (FAKES / "libcuda.so.1").exists(),
                                reason=f"{FAKES}/libcuda.so.1 is not built")

N = 5000
NO_HOST_WAIT = {"host_synchronisations": 0}


def all_reduce(key: str, out: str | None = None, name: str = "x", count: int = N,
               redop: int = api.SUM, **more: Any) -> dict[str, Any]:
    return {"kind": api.ALLREDUCE, "name": name, "redop": redop, "in": key, "out": out or key,
            "count": count, **more}


def submit(trainers: list[Trainer], op: dict[str, Any], **more: Any) -> None:
    for answer in settle(trainers, "submit_device", handle="h", ops=[op], **more):
        assert answer["status"] == 0, answer


def write_all(trainers: list[Trainer], key: str = "a", **more: Any) -> None:
    for rank, trainer in enumerate(trainers):
        trainer.call("write", key=key, rank=rank, **more)


def expect_ok(answers: list[dict[str, Any]]) -> None:
    assert [a["status"] for a in answers] == [0] * len(answers), answers


# ------------------------------------------------------------------ staged: backend = host


def staged(world: World, n: int = 2, **settings: Any) -> list[Trainer]:
    gpus = Gpus(world, **settings)
    trainers = gpus.job(gpus.daemon(backend="host"), n)
    for path in settle(trainers, "device_path"):
        assert path["is_on"] == 0 and path["text"], path
    return trainers


def sums_arrive_by_gradd_wait(trainers: list[Trainer], kind: str) -> None:
    for key in ("a", "b"):
        expect_ok(settle(trainers, "tensor", key=key, count=N, kind=kind, chunks=[2 << 20]))
    write_all(trainers)
    submit(trainers, all_reduce("a", "b"))
    expect_ok(settle(trainers, "wait", handle="h"))
    for rank, trainer in enumerate(trainers):
        assert trainer.call("check_tensor", key="b", what="sum", n_ranks=2)
        assert trainer.call("check_tensor", key="a", what=f"rank{rank}", n_ranks=2)
    if kind == "gradd":
        expect_ok(settle(trainers, "gradd_free_tensor", key="a"))


@pytest.mark.parametrize("kind", ["malloc", "managed", "chunks", "private", "gradd"])
def test_staged_sums_arrive_by_gradd_wait(world: World, kind: str) -> None:
    sums_arrive_by_gradd_wait(staged(world), kind)


def order_is_the_streams_own(trainers: list[Trainer], kind: str = "malloc") -> None:
    """Submitted before the input exists, waited for before the result does: no host waits."""
    settle(trainers, "new_stream", key="s")
    settle(trainers, "tensor", key="a", count=N, kind=kind)
    write_all(trainers, stream="s", gate="later")
    submit(trainers, all_reduce("a", redop=api.AVG), stream="s")
    expect_ok(settle(trainers, "wait_stream", handle="h", stream="s", timeout_s=5))
    settle(trainers, "check_in_stream", key="a", what="avg", n_ranks=2, stream="s", tag="t")
    assert settle(trainers, "test", handle="h")[0]["status"] == STATUS["PENDING"]
    settle(trainers, "open_gate", gate="later")
    assert all(settle(trainers, "await_stream", stream="s"))
    assert settle(trainers, "result", tag="t") == [True, True]
    expect_ok(settle(trainers, "wait", handle="h"))
    assert settle(trainers, "cuda_counts", names=list(NO_HOST_WAIT)) == [NO_HOST_WAIT] * 2


def test_staged_order_is_the_streams_own(world: World) -> None:
    order_is_the_streams_own(staged(world))


@pytest.mark.parametrize("without", ["", "cuStreamWaitValue64_v2"])
def test_staged_steps_in_a_loop(world: World, without: str) -> None:
    """With a driver that lacks stream memory operations, the host waits for the sums only."""
    trainers = staged(world, WITHOUT=without, DELAY_US=200, SEED=3)
    settle(trainers, "new_stream", key="s")
    settle(trainers, "tensor", key="a", count=N)
    for rank, trainer in enumerate(trainers):
        trainer.send("device_steps", n=40, key="a", rank=rank, size=2, stream="s")
    for trainer in trainers:
        answer = trainer.reply()
        assert (answer["done"], answer.get("n_right")) == (40, 40), answer
    assert settle(trainers, "cuda_counts", names=list(NO_HOST_WAIT)) == [NO_HOST_WAIT] * 2


def test_staged_results_for_another_stream(world: World) -> None:
    trainers = staged(world)
    for key in ("s", "t"):
        settle(trainers, "new_stream", key=key)
    settle(trainers, "tensor", key="a", count=N)
    write_all(trainers, stream="s", gate="later")
    submit(trainers, all_reduce("a"), stream="s")
    expect_ok(settle(trainers, "wait_stream", handle="h", stream="t"))
    expect_ok(settle(trainers, "wait_stream", handle="h", stream="s"))
    for stream in ("s", "t"):
        settle(trainers, "check_in_stream", key="a", what="sum", n_ranks=2, stream=stream,
               tag=stream)
    settle(trainers, "open_gate", gate="later")
    for stream in ("s", "t"):
        assert all(settle(trainers, "await_stream", stream=stream))
        assert settle(trainers, "result", tag=stream) == [True, True]


def check_kinds(trainers: list[Trainer]) -> None:
    for rank, trainer in enumerate(trainers):
        for key in ("bcast", "mine"):
            trainer.call("tensor", key=key, count=100)
            trainer.call("write", key=key, rank=rank)
        trainer.call("tensor", key="all", count=300)
        trainer.call("write", key="all", rank=9)
        trainer.call("part", key="all.0", of="all", first=0, count=100)
        trainer.call("part", key="all.1", of="all", first=100, count=100)
        trainer.call("part", key="all.rest", of="all", first=200, count=100)
        trainer.call("tensor", key="half", count=50)
    submit(trainers, {"kind": api.BROADCAST, "name": "b", "root": 1, "in": "bcast",
                      "out": "bcast", "count": 100})
    expect_ok(settle(trainers, "wait_stream", handle="h"))
    expect_ok(settle(trainers, "wait", handle="h"))
    # 300 elements would fit: what no rank has sent is left alone.
    submit(trainers, {"kind": api.ALLGATHER, "name": "g", "in": "mine", "out": "all",
                      "count": 100, "out_capacity": 300})
    before = [t.call("peek", key="all.rest") for t in trainers]
    expect_ok(settle(trainers, "wait_stream", handle="h"))
    expect_ok(settle(trainers, "wait", handle="h"))
    submit(trainers, {"kind": api.REDUCE_SCATTER, "name": "r", "redop": api.SUM, "in": "mine",
                      "out": "half", "count": 100})
    expect_ok(settle(trainers, "wait", handle="h"))
    for rank, trainer in enumerate(trainers):
        assert trainer.call("check_tensor", key="bcast", what="rank1", n_ranks=2)
        assert trainer.call("check_tensor", key="all.0", what="rank0", n_ranks=2)
        assert trainer.call("check_tensor", key="all.1", what="rank1", n_ranks=2)
        assert trainer.call("peek", key="all.rest") == before[rank]
        want = [((i * 7) % 11) + ((i * 7 + 3) % 11) for i in range(100)]
        assert trainer.call("peek", key="half", n=50) == want[50 * rank:50 * rank + 50]


def test_staged_kinds_beside_the_all_reduce(world: World) -> None:
    check_kinds(staged(world))


def test_a_group_of_device_tensors_is_one_op(world: World) -> None:
    trainers = staged(world)
    keys = [f"k{i}" for i in range(5)]
    for key in keys:
        settle(trainers, "tensor", key=key, count=N)
        write_all(trainers, key)
    ops = [all_reduce(key, name=key) for key in keys]
    expect_ok(settle(trainers, "submit_device", handle="h", ops=ops))
    expect_ok(settle(trainers, "wait_stream", handle="h"))
    expect_ok(settle(trainers, "wait", handle="h"))
    for key in keys:
        assert all(settle(trainers, "check_tensor", key=key, what="sum", n_ranks=2))


def test_a_released_op_delivers_all_the_same(world: World) -> None:
    trainers = staged(world)
    settle(trainers, "tensor", key="a", count=N)
    write_all(trainers)
    submit(trainers, all_reduce("a"))
    expect_ok(settle(trainers, "release", handle="h"))

    def is_delivered() -> bool:
        settle(trainers, "progress")
        return all(settle(trainers, "check_tensor", key="a", what="sum", n_ranks=2))

    eventually(is_delivered, "the sums of an op that nobody waits for")


def test_what_can_not_be_is_refused_in_words(world: World) -> None:
    gpus = Gpus(world)
    trainer = gpus.job(gpus.daemon(backend="host"), 1 + 1)[0]
    trainer.call("tensor", key="a", count=N)
    trainer.call("alloc", key="host", count=N)
    answer = trainer.call("submit_device", handle="h", ops=[
        {"kind": api.ALLREDUCE, "name": "x", "in": "a", "host_out": "host", "count": N}])
    assert answer["name"] == "GRADD_ERR_INVALID" and "device memory and out is host" in answer[
        "error"], answer
    trainer.call("new_stream", key="s")
    trainer.call("capture", stream="s", begin=True)
    answer = trainer.call("submit_device", handle="h", stream="s", ops=[all_reduce("a")])
    assert answer["name"] == "GRADD_ERR_UNSUPPORTED" and "capturing" in answer["error"], answer
    trainer.call("capture", stream="s", begin=False)
    answer = trainer.call("submit_device", handle="h", ops=[all_reduce("a", count=N * 1000)])
    assert answer["name"] == "GRADD_ERR_INVALID" and "beyond" in answer["error"], answer
    answer = trainer.call("submit_device", handle="h", ops=[
        all_reduce("a"), all_reduce("a", name="y", stream="s")])
    assert answer["name"] == "GRADD_ERR_INVALID" and "streams" in answer["error"], answer
    answer = trainer.call("register", key="a")
    assert answer["name"] == "GRADD_ERR_INVALID" and "can not be shared" in answer["error"], answer


def test_no_context_is_made_on_another_gpu(world: World) -> None:
    gpus = Gpus(world)
    trainers = gpus.job(gpus.daemon(backend="host"), 2, devices=[0, 1])
    for trainer in trainers:
        trainer.call("tensor", key="a", count=N)
    write_all(trainers)
    submit(trainers, all_reduce("a"))
    expect_ok(settle(trainers, "wait", handle="h"))
    assert all(settle(trainers, "check_tensor", key="a", what="sum", n_ranks=2))
    for rank, trainer in enumerate(trainers):
        assert trainer.call("cuda_is_active", device=rank)
        assert not trainer.call("cuda_is_active", device=1 - rank)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stream_goes_on_when_the_worker_is_killed(world: World, when: str) -> None:
    """The stream waits for a sum that never comes; before: the wait is not there yet."""
    gpus = Gpus(world)
    daemon = gpus.daemon(backend="host")
    trainers = gpus.job(daemon, 2)
    settle(trainers, "tensor", key="a", count=N)
    trainer = trainers[0]
    trainer.call("write", key="a", rank=0)
    submit(trainers[:1], all_reduce("a"))
    if when == "after":
        expect_ok([trainer.call("wait_stream", handle="h")])
        assert not trainer.call("stream_is_done")

    os.kill(daemon.worker_pid(), signal.SIGKILL)
    if when == "before":
        eventually(lambda: trainer.call("test", handle="h")["status"] < 0, "the op's failure")
        answer = trainer.call("wait_stream", handle="h")
        assert answer["name"] == "GRADD_ERR_RANK_LOST", answer
    assert trainer.call("await_stream")
    answer = trainer.call("wait", handle="h")
    assert answer["name"] == "GRADD_ERR_RANK_LOST" and answer["error"], answer


def test_shutdown_with_an_op_in_flight_leaves_nothing(world: World) -> None:
    gpus = Gpus(world)
    trainers = gpus.job(gpus.daemon(backend="host"), 2)
    settle(trainers, "tensor", key="a", count=N)
    submit(trainers[:1], all_reduce("a"))
    expect_ok([trainers[0].call("wait_stream", handle="h")])
    settle(trainers, "shutdown")
    assert trainers[0].call("await_stream")
    counts = trainers[0].call("cuda_counts", names=["cuMemHostRegister_v2", "cuMemHostUnregister",
                                                    "cuEventCreate", "cuEventDestroy_v2"])
    assert counts["cuMemHostRegister_v2"] == counts["cuMemHostUnregister"] > 0, counts
    assert counts["cuEventCreate"] == counts["cuEventDestroy_v2"] > 0, counts
    assert not trainers[0].call("facts")["memfds"]


def test_a_forked_child_leaves_the_driver_alone(world: World, tmp_path: Path) -> None:
    trainers = staged(world)
    settle(trainers, "tensor", key="a", count=N)
    write_all(trainers)
    submit(trainers, all_reduce("a"))
    expect_ok(settle(trainers, "wait_stream", handle="h"))
    hold = tmp_path / "hold"
    os.mkfifo(hold)
    trainers[0].send("fork_and_use", hold=str(hold))
    with open(hold, "wb"):
        forked = trainers[0].reply()
    assert forked["results"]["allreduce"]["name"] == "GRADD_ERR_FORKED", forked
    assert trainers[0].call("reap", child=forked["child"]) == 0
    expect_ok(settle(trainers, "wait", handle="h"))
    assert all(settle(trainers, "check_tensor", key="a", what="sum", n_ranks=2))


# ------------------------------------------------------------------ a world of one


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_world_of_one_runs_in_the_stream(world: World, factor: float) -> None:
    trainer = Gpus(world).alone()
    trainer.call("new_stream", key="s")
    for key in ("a", "b"):
        trainer.call("tensor", key=key, count=N)
    trainer.call("write", key="a", rank=4, stream="s", gate="later")
    submit([trainer], all_reduce("a", "b", prescale=factor), stream="s")
    expect_ok([trainer.call("wait_stream", handle="h", stream="s")])
    assert trainer.call("test", handle="h")["status"] == STATUS["PENDING"]
    trainer.call("open_gate", gate="later")
    expect_ok([trainer.call("wait", handle="h")])
    assert trainer.call("check_tensor", key="b", what="rank4", n_ranks=1, factor=factor)
    assert trainer.call("cuda_counts", names=list(NO_HOST_WAIT)) == NO_HOST_WAIT


# ------------------------------------------------------------------ the worker takes device memory

ORDERS = ["event", "flag"]


def shared(world: World, n: int = 2, order: str = "auto", **settings: Any) -> list[Trainer]:
    gpus = Gpus(world, **settings)
    trainers = gpus.job(gpus.daemon(backend="nccl", order=order), n)
    for path in settle(trainers, "device_path"):
        assert path["is_on"] == 1, path
    return trainers


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["malloc", "managed", "chunks", "private", "gradd"])
def test_shared_sums(world: World, kind: str, order: str) -> None:
    sums_arrive_by_gradd_wait(shared(world, order=order), kind)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["malloc", "private"])
def test_shared_order_is_the_streams_own(world: World, order: str, kind: str) -> None:
    order_is_the_streams_own(shared(world, order=order), kind)


@pytest.mark.parametrize("order", ORDERS)
def test_shared_steps_in_a_loop(world: World, order: str) -> None:
    """More steps than a ring has slots; after the first, nothing is made and nothing imported."""
    trainers = shared(world, order=order, DELAY_US=100, SEED=5)
    settle(trainers, "new_stream", key="s")
    settle(trainers, "tensor", key="a", count=N)
    made = ["host_synchronisations", "event_creations", "imports", "allocations"]
    for n in (1, 100):
        before = settle(trainers, "cuda_counts", names=made)
        for rank, trainer in enumerate(trainers):
            trainer.send("device_steps", n=n, key="a", rank=rank, size=2, stream="s")
        for trainer in trainers:
            answer = trainer.reply()
            assert (answer["done"], answer.get("n_right")) == (n, n), answer
    assert settle(trainers, "cuda_counts", names=made) == before


@pytest.mark.parametrize("order", ORDERS)
def test_memory_that_came_back_is_not_taken_for_the_old(world: World, order: str) -> None:
    trainers = shared(world, order=order)
    first = settle(trainers, "tensor", key="a", count=N)
    write_all(trainers)
    submit(trainers, all_reduce("a"))
    expect_ok(settle(trainers, "wait", handle="h"))
    expect_ok(settle(trainers, "forget", key="a"))
    settle(trainers, "free_tensor", key="a")
    again = settle(trainers, "tensor", key="a", count=N)
    assert [a["address"] for a in again] == [a["address"] for a in first]
    write_all(trainers, seed=5)
    submit(trainers, all_reduce("a"))
    expect_ok(settle(trainers, "wait", handle="h"))
    assert all(settle(trainers, "check_tensor", key="a", what="sum", n_ranks=2, seed=5))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_shared_stream_goes_on_when_the_worker_is_killed(
        world: World, order: str, when: str) -> None:
    """In event order a real driver's behaviour is not documented; the fake ends the wait."""
    gpus = Gpus(world, DEAD="complete")
    daemon = gpus.daemon(backend="nccl", order=order)
    trainers = gpus.job(daemon, 2)
    settle(trainers, "tensor", key="a", count=N)
    write_all(trainers[1:], gate="never")  # rank 1 holds the worker's stream back
    trainers[0].call("write", key="a", rank=0)
    if when == "after":
        trainers[1].call("write", key="a", rank=1, gate="never")
        submit(trainers, all_reduce("a"))
        expect_ok([trainers[0].call("wait_stream", handle="h", timeout_s=5)])
        assert not trainers[0].call("stream_is_done")
    else:
        submit(trainers[:1], all_reduce("a"))
    os.kill(daemon.worker_pid(), signal.SIGKILL)
    if when == "before":
        eventually(lambda: trainers[0].call("test", handle="h")["status"] < 0, "the failure")
        answer = trainers[0].call("wait_stream", handle="h")
        assert answer["name"] == "GRADD_ERR_RANK_LOST", answer
    assert trainers[0].call("await_stream")
    answer = trainers[0].call("wait", handle="h")
    assert answer["name"] == "GRADD_ERR_RANK_LOST" and answer["error"], answer
    trainers[1].call("open_gate", gate="never")


@pytest.mark.parametrize("order", ORDERS)
def test_shared_kinds_beside_the_all_reduce(world: World, order: str) -> None:
    check_kinds(shared(world, order=order))


@pytest.mark.parametrize("order", ORDERS)
def test_more_ops_in_flight_than_a_ring_has_slots(world: World, order: str) -> None:
    """Ranks submit them in opposite orders, so that none can wait for a slot of the other's."""
    n = 200
    trainers = shared(world, order=order)
    settle(trainers, "tensor", key="all", count=n * 10)
    for i in range(n):
        settle(trainers, "part", key=f"p{i}", of="all", first=10 * i, count=10)
    write_all(trainers, key="all")
    for k in range(n):
        for rank, trainer in enumerate(trainers):
            i = k if rank == 0 else n - 1 - k
            trainer.send("submit_device", handle=f"h{i}",
                         ops=[all_reduce(f"p{i}", name=f"x{i}", count=10)])
        expect_ok([trainer.reply() for trainer in trainers])
    for i in range(n):
        expect_ok(settle(trainers, "wait_stream", handle=f"h{i}"))
        expect_ok(settle(trainers, "wait", handle=f"h{i}"))
    assert all(settle(trainers, "check_tensor", key="all", what="sum", n_ranks=2))
    assert settle(trainers, "cuda_counts", names=list(NO_HOST_WAIT)) == [NO_HOST_WAIT] * 2


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_on_two_gpus(world: World, order: str) -> None:
    gpus = Gpus(world)
    trainers = gpus.job(gpus.daemon(backend="nccl", order=order), 3, devices=[0, 1, 1])
    settle(trainers, "tensor", key="a", count=N)
    write_all(trainers)
    submit(trainers, all_reduce("a"))
    expect_ok(settle(trainers, "wait_stream", handle="h"))
    assert all(settle(trainers, "await_stream"))
    assert all(settle(trainers, "check_tensor", key="a", what="sum", n_ranks=3))
    expect_ok(settle(trainers, "wait", handle="h"))
    for trainer, device in zip(trainers, [0, 1, 1]):
        assert not trainer.call("cuda_is_active", device=1 - device)


def test_the_next_epoch_works_after_a_lost_rank(world: World) -> None:
    """The killed trainer's memory is imported; the survivor joins again with another one."""
    gpus = Gpus(world)
    daemon = gpus.daemon(backend="nccl")
    trainers = gpus.job(daemon, 2)
    settle(trainers, "tensor", key="a", count=N)
    write_all(trainers)
    submit(trainers, all_reduce("a"))
    expect_ok(settle(trainers, "wait", handle="h"))
    write_all(trainers)
    submit(trainers[:1], all_reduce("a"))
    trainers[1].kill()
    answer = trainers[0].call("wait", handle="h")
    assert answer["name"] == "GRADD_ERR_RANK_LOST", answer
    trainers[0].call("shutdown")
    again = [trainers[0], gpus.trainer(daemon)]
    expect_ok(world.join(again))
    again[1].call("tensor", key="a", count=N)
    write_all(again, seed=4)
    submit(again, all_reduce("a"))
    expect_ok(settle(again, "wait", handle="h"))
    assert all(settle(again, "check_tensor", key="a", what="sum", n_ranks=2, seed=4))
