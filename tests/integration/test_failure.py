# SPDX-License-Identifier: Apache-2.0
"""Trainers and workers that die, ranks that disagree or never come: what the others are told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import gradd_ctypes as api
from gradd_ctypes import STATUS
from harness import Daemon, Trainer, World, eventually, settle, shut_down_socket, state_of, \
    wait_for_exit

SPEC = {"kind": api.ALLREDUCE, "dtype": api.F32, "redop": api.SUM, "in": "a", "out": "a",
        "count": 1000}


def prepared_job(world: World, daemon: Daemon, n: int, job: str = "job") -> list[Trainer]:
    trainers = world.job(daemon, n, job)
    settle(trainers, "alloc", key="a", count=1000)
    settle(trainers, "fill", key="a", value=1)
    return trainers


def submit(trainer: Trainer, name: str, **fields: Any) -> None:
    result = trainer.call("submit", handle=name, ops=[{"name": name, **SPEC, **fields}])
    assert result["status"] == 0, result


def other_job_lives(trainers: list[Trainer]) -> None:
    name = f"alive.{time.monotonic_ns()}"
    for trainer in trainers:
        trainer.call("fill", key="a", value=1)
    assert [r["status"] for r in settle(trainers, "allreduce", name=name, key="a")] == [0, 0]
    assert trainers[0].call("values", key="a", n=1) == [2.0]


def rejoin(trainers: list[Trainer], job: str = "job") -> list[int]:
    """All leave the failed epoch and join again; the epochs that they are in now."""
    settle(trainers, "shutdown")
    results = World.join(trainers, job)
    assert [r["status"] for r in results] == [0] * len(trainers), results
    settle(trainers, "alloc", key="a", count=1000)
    settle(trainers, "fill", key="a", value=1)
    assert [r["status"] for r in settle(trainers, "allreduce", name="again", key="a")] == \
        [0] * len(trainers)
    return [r["epoch"] for r in results]


def expect_rank_lost(results: list[dict[str, Any]], rank: int, pid: int, since: float,
                     cause: str) -> None:
    for result in results:
        assert result["status"] == STATUS["RANK_LOST"], result
        assert f"rank {rank}" in result["error"], result["error"]
        assert str(pid) in result["error"], result["error"]
        assert cause in result["error"], result["error"]
        assert result["at"] - since < 1.0, f"told only after {result['at'] - since:.2f} s"


@pytest.mark.parametrize("victim, told", [(0, 1), (1, 0), (2, 0), (0, 2)])
def test_who_was_ended_because_of_another_is_not_the_cause(world: World, victim: int,
                                                           told: int) -> None:
    """Launchers end the other ranks when one is lost; the daemon may see both ends at once."""
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 3)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        for rank, number in ((told, signal.SIGTERM), (victim, signal.SIGKILL)):
            os.kill(trainers[rank].pid, number)
            eventually(lambda: state_of(trainers[rank].pid) in "Z", f"rank {rank} has ended")
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    line = daemon.log.wait_for(r"epoch failed")
    assert f"rank {victim} " in line and "signal 9" in line, line


def waits_in_poll(pid: int) -> bool:
    """Asleep in poll(), not in the read that a trainer awaits its next order with."""
    return "poll" in Path(f"/proc/{pid}/wchan").read_text()


def test_who_left_in_its_last_moment_is_not_the_cause(world: World) -> None:
    """Its Leave lies unread in the daemon's socket when both ends are seen."""
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 3)
    assert not waits_in_poll(trainers[0].pid)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        trainers[0].send("shutdown")
        eventually(lambda: waits_in_poll(trainers[0].pid), "rank 0 waits for the daemon's answer")
        os.kill(trainers[0].pid, signal.SIGKILL)
        os.kill(trainers[1].pid, signal.SIGTERM)
        for trainer in trainers[:2]:
            eventually(lambda: state_of(trainer.pid) in "Z", "it has ended")
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    line = daemon.log.wait_for(r"epoch failed")
    assert "rank 1 " in line and "signal 15" in line, line


@pytest.mark.tsan
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_trainer_is_named_to_the_others_within_a_second(world: World,
                                                                 victim: int) -> None:
    daemon = world.daemon()
    bystanders = prepared_job(world, daemon, 2, "bystander")
    trainers = prepared_job(world, daemon, 3)
    dead = trainers[victim]
    rest = [t for t in trainers if t is not dead]
    for trainer in rest:
        submit(trainer, "x")
        trainer.send("wait", handle="x")
    since = time.time()
    dead.kill()
    expect_rank_lost([t.reply() for t in rest], victim, dead.pid, since, "killed")
    # Later ops say the same, at once.
    late = rest[0].call("allreduce", name="later", key="a")
    assert late["status"] == STATUS["RANK_LOST"] and str(dead.pid) in late["error"], late
    other_job_lives(bystanders)
    replacement = world.trainer(daemon)
    trainers[victim] = replacement
    settle(rest, "shutdown")
    results = world.join(trainers)
    assert [r["status"] for r in results] == [0, 0, 0], results
    assert {r["epoch"] for r in results} == {2}


def test_a_trainer_killed_between_ops_is_noticed_without_any_op(world: World) -> None:
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 2)
    trainers[1].send("poll_fd", timeout_s=10)
    since = time.monotonic()
    trainers[0].kill()
    # The fd becomes readable by itself and progress says what happened.
    result = trainers[1].reply()
    assert time.monotonic() - since < 1.0
    if result["status"] == 0:
        result = trainers[1].call("poll_fd", timeout_s=10)
    assert result["status"] == STATUS["RANK_LOST"], result
    assert "rank 0" in result["error"]


@pytest.mark.parametrize("code", [0, 3])
def test_a_trainer_that_exits_without_leaving_is_lost(world: World, code: int) -> None:
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 2)
    submit(trainers[0], "x")
    trainers[0].send("wait", handle="x")
    since = time.time()
    trainers[1].send("leave_abruptly", code=code)
    result = trainers[0].reply()
    assert trainers[1].process.wait(20) == code
    trainers[1].is_done = True
    expect_rank_lost([result], 1, trainers[1].pid, since, "")
    assert "killed" not in result["error"], result["error"]


def test_a_trainer_that_dies_while_others_join_frees_its_rank(world: World) -> None:
    daemon = world.daemon()
    first, second, third = (world.trainer(daemon) for _ in range(3))
    first.send("init", **first.init_arguments(0, 2, "job"))
    daemon.wait_joined("job", 1)
    first.kill()
    eventually(lambda: not daemon.jobs(), "the dead rank is gone")
    second.send("init", **second.init_arguments(1, 2, "job"))
    daemon.wait_joined("job", 1)
    assert daemon.admin("job", name="job")["missing"] == [0]
    assert third.call("init", **third.init_arguments(0, 2, "job"))["status"] == 0
    assert second.reply()["status"] == 0


def test_leaving_in_order_fails_only_ops_that_need_the_rank(world: World) -> None:
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 2)
    submit(trainers[0], "x")
    trainers[0].send("wait", handle="x")
    trainers[1].call("shutdown")
    result = trainers[0].reply()
    assert result["status"] == STATUS["RANK_LOST"], result
    assert "rank 1" in result["error"] and "left" in result["error"], result["error"]


def test_ops_that_all_ranks_had_submitted_still_finish(world: World) -> None:
    daemon = world.daemon(worker_threads=1)
    trainers = world.job(daemon, 2)
    n = 8 << 20
    settle(trainers, "alloc", key="a", count=n)
    settle(trainers, "fill", key="a", value=2)
    spec = {"count": n}
    # The worker is stopped, so that the op is submitted by all and not yet begun.
    worker = daemon.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    eventually(lambda: state_of(worker) == "T", "the worker has stopped")
    for trainer in trainers:
        submit(trainer, "x", **spec)
    dead = trainers[1]
    dead.kill()
    os.kill(worker, signal.SIGCONT)
    result = trainers[0].call("wait", handle="x")
    assert result["status"] == 0, result
    assert trainers[0].call("values", key="a", n=2) == [4.0, 4.0]
    after = trainers[0].call("allreduce", name="y", key="a")
    assert after["status"] == STATUS["RANK_LOST"], after
    assert str(dead.pid) in after["error"]


def test_a_killed_worker_fails_the_epoch_and_the_job_joins_again_at_once(world: World) -> None:
    daemon = world.daemon()
    bystanders = prepared_job(world, daemon, 2, "bystander")
    other_workers = set(daemon.worker_pids())
    trainers = prepared_job(world, daemon, 2)
    worker = (set(daemon.worker_pids()) - other_workers).pop()
    submit(trainers[0], "x")
    for trainer in trainers:
        trainer.send("wait" if trainer is trainers[0] else "barrier",
                     **({"handle": "x"} if trainer is trainers[0] else {}))
    since = time.time()
    os.kill(worker, signal.SIGKILL)
    for result in [t.reply() for t in trainers]:
        assert result["status"] == STATUS["RANK_LOST"], result
        assert "worker" in result["error"] and str(worker) in result["error"], result["error"]
        assert result["at"] - since < 1.0
    other_job_lives(bystanders)
    assert rejoin(trainers) == [2, 2]


def test_a_rank_lost_while_the_worker_is_deaf_is_told_to_the_others(world: World) -> None:
    """The worker's channel has ended and the worker not yet: nobody else can tell the ranks."""
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 2)
    worker = daemon.worker_pid()
    submit(trainers[0], "x")
    trainers[0].send("wait", handle="x")
    os.kill(worker, signal.SIGSTOP)
    shut_down_socket(worker, 3)  # its channel to the daemon
    since = time.time()
    trainers[1].kill()
    expect_rank_lost([trainers[0].reply()], 1, trainers[1].pid, since, "killed")
    trainers[1] = world.trainer(daemon)
    trainers[0].call("shutdown")
    results = world.join(trainers)
    assert [(r["status"], r["epoch"]) for r in results] == [(0, 2)] * 2, results


def test_a_worker_that_dies_again_and_again_hurts_only_its_job(world: World) -> None:
    daemon = world.daemon()
    bystanders = prepared_job(world, daemon, 2, "bystander")
    keep = set(daemon.worker_pids())
    trainers = prepared_job(world, daemon, 2)
    for epoch in range(2, 6):
        worker = (set(daemon.worker_pids()) - keep).pop()
        os.kill(worker, signal.SIGKILL)
        assert all(r["status"] == STATUS["RANK_LOST"]
                   for r in settle(trainers, "barrier"))
        assert rejoin(trainers) == [epoch, epoch]
    other_job_lives(bystanders)


DISAGREEMENTS = {
    "count": ({"count": 1000}, {"count": 999}, ("1000", "999")),
    "dtype": ({"dtype": api.F32}, {"dtype": api.F64, "count": 500}, ("float32", "float64")),
    "dtype same bytes": ({"dtype": api.F32}, {"dtype": api.I32}, ("float32", "int32")),
    "op": ({"redop": api.SUM}, {"redop": api.MAX}, ("sum", "max")),
    "kind": ({}, {"kind": api.BROADCAST, "root": 0}, ("reduce", "broadcast")),
    "root": ({"kind": api.BROADCAST, "root": 0}, {"kind": api.BROADCAST, "root": 1},
             ("root 0", "root 1")),
    "prescale": ({"prescale": 0.5}, {"prescale": 2.0}, ("0.5", "2")),
}


@pytest.mark.parametrize("which", list(DISAGREEMENTS))
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_disagreement_names_both_sides_to_all_and_the_job_goes_on(
        world: World, which: str, n_ranks: int) -> None:
    one, other, words = DISAGREEMENTS[which]
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, n_ranks)
    for rank, trainer in enumerate(trainers):
        submit(trainer, "w", **(other if rank == n_ranks - 1 else one))
    results = settle(trainers, "wait", handle="w")
    for result in results:
        assert result["status"] == STATUS["DISAGREE"], result
        text = result["error"].lower()
        assert "job" in text and '"w"' in text, text
        # The others are alike: whichever of them the worker met first is the other side.
        assert f"rank {n_ranks - 1}" in text, text
        assert any(f"rank {rank}" in text for rank in range(n_ranks - 1)), text
        for word in words:
            assert word in text, (word, text)
    # The name is free, the job goes on, in the same epoch.
    settle(trainers, "fill", key="a", value=1)
    assert [r["status"] for r in settle(trainers, "allreduce", name="w", key="a")] == [0] * n_ranks
    assert trainers[0].call("values", key="a", n=1) == [float(n_ranks)]


def test_a_disagreement_does_not_wait_for_the_third_rank(world: World) -> None:
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 3)
    submit(trainers[0], "w")
    submit(trainers[1], "w", count=7)
    for trainer in trainers[:2]:
        assert trainer.call("wait", handle="w")["status"] == STATUS["DISAGREE"]
    # The rank that comes too late gets the same error and no hang.
    submit(trainers[2], "w")
    assert trainers[2].call("wait", handle="w")["status"] == STATUS["DISAGREE"]
    assert [r["status"] for r in settle(trainers, "barrier")] == [0] * 3


def test_groups_that_differ_fail_on_all(world: World) -> None:
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 2)
    settle(trainers, "alloc", key="b", count=1000)
    ops = [{"name": "g1", **SPEC}, {"name": "g2", **SPEC, "in": "b", "out": "b"}]
    trainers[0].call("submit", handle="g", ops=ops)
    trainers[1].call("submit", handle="g", ops=ops[:1])
    results = settle(trainers, "wait", handle="g")
    assert all(r["status"] == STATUS["DISAGREE"] for r in results), results
    assert [r["status"] for r in settle(trainers, "barrier")] == [0, 0]


def test_a_rank_that_never_submits_is_named_in_log_and_gradctl(world: World) -> None:
    daemon = world.daemon(stall_warn_s=0.2, op_timeout_s=30)
    trainers = prepared_job(world, daemon, 3)
    for rank in (0, 2):
        submit(trainers[rank], "layer.w")
    line = daemon.log.wait_for(r"layer\.w")
    assert "rank 1" in line or "ranks 1" in line, line
    job = daemon.gradctl_json("job", "job")
    assert job["schema"] == 1
    text = str(job)
    stalls = find(job, "stalls")
    assert stalls and stalls[0]["missing"] == [1] and stalls[0]["tensor"] == "layer.w", text
    assert daemon.gradctl("status").returncode == 5
    submit(trainers[1], "layer.w")
    assert [r["status"] for r in settle(trainers, "wait", handle="layer.w")] == [0] * 3
    eventually(lambda: daemon.gradctl("status").returncode == 0, "the stall is over")
    assert find(daemon.gradctl_json("job", "job"), "stalls") == []


def find(value: Any, key: str) -> Any:
    """The first member of this name, at any depth."""
    if isinstance(value, dict):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            found = find(item, key)
            if found is not None:
                return found
    return None


def test_an_op_that_nobody_completes_fails_at_op_timeout(world: World) -> None:
    daemon = world.daemon(stall_warn_s=0.1, op_timeout_s=0.5)
    trainers = prepared_job(world, daemon, 3)
    for rank in (0, 1):
        submit(trainers[rank], "x")
        trainers[rank].send("wait", handle="x")
    for result in [trainers[0].reply(), trainers[1].reply()]:
        assert result["status"] == STATUS["TIMEOUT"], result
        assert '"x"' in result["error"] and "rank 2" in result["error"], result["error"]
        assert 0.4 < result["seconds"] < 3.0, result
    # The late rank gets the error as well, and the job goes on.
    submit(trainers[2], "x")
    assert trainers[2].call("wait", handle="x")["status"] == STATUS["TIMEOUT"]
    assert [r["status"] for r in settle(trainers, "barrier")] == [0] * 3


def hold_fifo(world: World, daemon: Daemon) -> tuple[str, int]:
    path = os.path.join(daemon.home, "hold")
    os.mkfifo(path)
    return path, os.open(path, os.O_RDWR | os.O_CLOEXEC)


def test_a_forked_child_is_inert(world: World) -> None:
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 2)
    path, hold = hold_fifo(world, daemon)
    forked = trainers[0].call("fork_and_use", hold=path)
    for what in ("allreduce", "barrier", "progress", "fd", "alloc"):
        assert forked["results"][what]["status"] == STATUS["FORKED"], (what, forked)
    assert forked["results"]["sockets"] == [], forked
    # The parent is unharmed, before and after the child's end.
    assert [r["status"] for r in settle(trainers, "allreduce", name="x", key="a")] == [0, 0]
    os.close(hold)
    assert trainers[0].call("reap", child=forked["child"]) == 0
    assert [r["status"] for r in settle(trainers, "allreduce", name="x", key="a")] == [0, 0]


def test_a_parents_death_is_noticed_though_its_child_lives(world: World) -> None:
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 2)
    path, hold = hold_fifo(world, daemon)
    child = trainers[0].call("fork_and_use", hold=path)["child"]
    submit(trainers[1], "x")
    trainers[1].send("wait", handle="x")
    since = time.time()
    trainers[0].kill()
    result = trainers[1].reply()
    assert state_of(child) not in ("", "Z")
    expect_rank_lost([result], 0, trainers[0].pid, since, "")
    os.close(hold)
    assert wait_for_exit(child)


def test_a_stopped_trainer_delays_but_does_not_break_the_job(world: World) -> None:
    daemon = world.daemon()
    bystanders = prepared_job(world, daemon, 2, "bystander")
    trainers = prepared_job(world, daemon, 2)
    os.kill(trainers[1].pid, signal.SIGSTOP)
    submit(trainers[0], "x")
    assert trainers[0].call("wait", handle="x", timeout_s=0.05)["status"] == STATUS["PENDING"]
    other_job_lives(bystanders)
    os.kill(trainers[1].pid, signal.SIGCONT)
    submit(trainers[1], "x")
    assert [r["status"] for r in settle(trainers, "wait", handle="x")] == [0, 0]


def test_killing_all_trainers_leaves_nothing(world: World) -> None:
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 4)
    for trainer in trainers[:3]:
        submit(trainer, "x")
    for trainer in trainers:
        trainer.process.send_signal(signal.SIGKILL)
    for trainer in trainers:
        trainer.process.wait(20)
    daemon.assert_idle()


def test_training_goes_on_without_the_daemon_and_the_worker_ends_with_it(world: World) -> None:
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 2)
    worker = daemon.worker_pid()
    daemon.process.kill()
    daemon.process.wait(20)
    assert [r["status"] for r in settle(trainers, "allreduce", name="x", key="a")] == [0, 0]
    assert state_of(worker) not in ("", "Z")
    settle(trainers, "shutdown")
    assert wait_for_exit(worker)


def test_a_worker_without_daemon_ends_when_its_trainers_die(world: World) -> None:
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 2)
    worker = daemon.worker_pid()
    daemon.process.kill()
    daemon.process.wait(20)
    submit(trainers[1], "x")
    trainers[1].send("wait", handle="x")
    trainers[0].kill()
    result = trainers[1].reply()
    assert result["status"] == STATUS["RANK_LOST"] and "rank 0" in result["error"], result
    trainers[1].kill()
    assert wait_for_exit(worker)


def test_sigterm_drains_running_jobs(world: World) -> None:
    daemon = world.daemon()
    trainers = prepared_job(world, daemon, 2)
    daemon.process.send_signal(signal.SIGTERM)
    late = world.trainer(daemon)
    daemon.log.wait_for(r"drain|stop")
    result = late.call("init", **late.init_arguments(0, 2, "new"))
    assert result["status"] == STATUS["UNAVAILABLE"], result
    # The job that runs is not disturbed, and ends the drain when it leaves.
    assert [r["status"] for r in settle(trainers, "allreduce", name="x", key="a")] == [0, 0]
    assert daemon.process.poll() is None
    settle(trainers, "shutdown")
    assert daemon.process.wait(20) == 0
    assert not os.path.exists(daemon.socket)


def test_the_drain_ends_at_its_timeout(world: World) -> None:
    daemon = world.daemon(drain_timeout_s=0.3)
    trainers = prepared_job(world, daemon, 2)
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(20) == 0
    for result in settle(trainers, "barrier"):
        assert result["status"] < 0 and result["error"], result
