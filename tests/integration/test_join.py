# SPDX-License-Identifier: Apache-2.0
"""Joining: who may, who meets whom, and what is said to those who may not."""

from __future__ import annotations

import os

import pytest

from gradd_ctypes import STATUS
from harness import Daemon, World, settle

NOBODY = 65534


def test_ranks_of_a_job_meet(world: World) -> None:
    daemon = world.daemon()
    trainers = [world.trainer(daemon) for _ in range(3)]
    results = world.join(trainers, "train7")
    for rank, result in enumerate(results):
        assert result["status"] == 0, result
        assert (result["rank"], result["size"]) == (rank, 3)
        assert (result["node_rank"], result["n_nodes"]) == (0, 1)
        assert (result["local_rank"], result["local_size"]) == (rank, 3)
        assert result["job"] == "train7"
        assert result["source"] == "arguments"
    assert len({result["epoch"] for result in results}) == 1
    assert results[0]["epoch"] >= 1


def test_join_waits_for_the_last_rank(world: World) -> None:
    daemon = world.daemon()
    first, last = world.trainer(daemon), world.trainer(daemon)
    first.send("init", **first.init_arguments(0, 2, "job"))
    daemon.wait_joined("job", 1)
    daemon.admin("status")
    assert not first.has_reply()
    assert last.call("init", **last.init_arguments(1, 2, "job"))["status"] == 0
    assert first.reply()["status"] == 0


def test_missing_ranks_are_named_at_the_timeout(world: World) -> None:
    daemon = world.daemon(join_timeout_s=60)
    trainer = world.trainer(daemon)
    result = trainer.call("init", **trainer.init_arguments(0, 3, "job", timeout_s=0.3))
    assert result["status"] == STATUS["TIMEOUT"], result
    assert "1" in result["error"] and "2" in result["error"], result["error"]
    assert result["seconds"] < 5
    # The rank is free again: the next attempt meets all.
    world.trainers.remove(trainer)
    trainer.destroy()
    world.job(daemon, 3)


def test_the_daemons_join_timeout_holds_without_one_of_the_trainer(world: World) -> None:
    daemon = world.daemon(join_timeout_s=0.3)
    trainer = world.trainer(daemon)
    result = trainer.call("init", **trainer.init_arguments(0, 2, "job"))
    assert result["status"] == STATUS["TIMEOUT"], result


@pytest.mark.parametrize("rank, size", [(2, 2), (7, 2), (-1, 2), (0, -1)])
def test_a_rank_outside_the_job_is_refused(world: World, rank: int, size: int) -> None:
    daemon = world.daemon()
    trainer = world.trainer(daemon)
    result = trainer.call("init", **trainer.init_arguments(rank, size, "job"))
    assert result["status"] == STATUS["INVALID"], result
    assert str(rank if size > 0 else size) in result["error"]


def test_the_daemon_refuses_a_rank_that_the_library_would_not_send(world: World) -> None:
    daemon = world.daemon()
    for rank, size in ((2, 2), (0, 0), (4000000000, 2), (0, 4000000000)):
        with daemon.connect() as liar:
            liar.hello()
            liar.send("join", job="job", rank=rank, size=size)
            error = liar.expect("error")
            assert -error["code"] == STATUS["INVALID"], (rank, size, error)
            assert error["text"]


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", "a/b", b"\xff\xfe"],
                         ids=["empty", "long", "newline", "slash", "not ascii"])
def test_the_daemon_refuses_a_bad_job_name(world: World, name: str | bytes) -> None:
    daemon = world.daemon()
    with daemon.connect() as liar:
        liar.hello()
        liar.send("join", job=name, rank=0, size=2)
        assert -liar.expect("error")["code"] == STATUS["INVALID"]
    assert daemon.jobs() == []


def test_a_duplicate_rank_is_refused_and_named(world: World) -> None:
    daemon = world.daemon()
    first, second, last = (world.trainer(daemon) for _ in range(3))
    first.send("init", **first.init_arguments(0, 2, "job"))
    daemon.wait_joined("job", 1)
    result = second.call("init", **second.init_arguments(0, 2, "job"))
    assert result["status"] == STATUS["DUPLICATE"], result
    assert "0" in result["error"] and str(first.pid) in result["error"], result["error"]
    # The holder of the rank is not disturbed.
    assert last.call("init", **last.init_arguments(1, 2, "job"))["status"] == 0
    assert first.reply()["status"] == 0


def test_another_size_is_refused_and_both_are_named(world: World) -> None:
    daemon = world.daemon()
    first, second, last = (world.trainer(daemon) for _ in range(3))
    first.send("init", **first.init_arguments(0, 2, "job"))
    daemon.wait_joined("job", 1)
    result = second.call("init", **second.init_arguments(1, 3, "job"))
    assert result["status"] == STATUS["DISAGREE"], result
    assert "3" in result["error"] and "2" in result["error"], result["error"]
    assert last.call("init", **last.init_arguments(1, 2, "job"))["status"] == 0
    assert first.reply()["status"] == 0


def test_versions_without_overlap_are_both_named(world: World) -> None:
    daemon = world.daemon()
    with daemon.connect() as liar:
        liar.send("hello", protocol_min=98, protocol_max=99, program="future", version="9.9.9")
        messages = liar.expect_closed()
    assert [body for body, _ in messages] == ["error"]
    error = messages[0][1]
    assert -error["code"] == STATUS["PROTOCOL"], error
    assert "98" in error["text"] and "99" in error["text"] and "1" in error["text"], error


def test_a_newer_client_that_still_speaks_the_version_is_welcome(world: World) -> None:
    daemon = world.daemon()
    with daemon.connect() as client:
        reply = client.hello(protocol_min=1, protocol_max=50, features=["future"])
        assert reply["protocol"] == 1


def test_a_message_before_hello_ends_the_connection(world: World) -> None:
    daemon = world.daemon()
    with daemon.connect() as liar:
        liar.send("join", job="job", rank=0, size=2)
        liar.expect_closed()
    assert daemon.jobs() == []


def test_a_silent_connection_is_closed(world: World) -> None:
    daemon = world.daemon(hello_timeout_s=0.2)
    with daemon.connect() as liar:
        liar.expect_closed()


def test_hello_twice_or_garbage_in_it_hurts_only_the_sender(world: World) -> None:
    daemon = world.daemon()
    world.job(daemon, 2)
    for fields in ({"protocol_min": 5, "protocol_max": 2}, {"role": 77}, {},
                   {"program": "x" * 10000, "protocol_min": 1, "protocol_max": 1},
                   {"features": ["f"] * 5000, "protocol_min": 1, "protocol_max": 1}):
        with daemon.connect() as liar:
            liar.send("hello", **fields)
            liar.receive()
    with daemon.connect() as liar:
        liar.hello()
        liar.send("hello", protocol_min=1, protocol_max=1)
        assert liar.expect("error")["text"]
    assert [r["status"] for r in settle(world.trainers, "barrier")] == [0, 0]


@pytest.mark.root
def test_two_users_with_the_same_job_name_do_not_meet(world: World) -> None:
    daemon = shared_daemon(world)
    ours = [world.trainer(daemon) for _ in range(2)]
    theirs = [world.trainer(daemon, uid=NOBODY) for _ in range(2)]
    ours[0].send("init", **ours[0].init_arguments(0, 2, "same"))
    daemon.wait_joined("same", 1)
    # The same rank of another user is no duplicate, and no partner.
    theirs[0].send("init", **theirs[0].init_arguments(0, 2, "same"))
    theirs[1].send("init", **theirs[1].init_arguments(1, 2, "same"))
    assert [t.reply()["status"] for t in theirs] == [0, 0]
    assert not ours[0].has_reply()
    assert ours[1].call("init", **ours[1].init_arguments(1, 2, "same"))["status"] == 0
    assert ours[0].reply()["status"] == 0
    assert [r["status"] for r in settle(ours + theirs, "barrier")] == [0] * 4
    owners = {os.stat(f"/proc/{pid}").st_uid for pid in daemon.worker_pids()}
    assert owners == {os.getuid(), NOBODY}


def shared_daemon(world: World, **settings: object) -> Daemon:
    """A daemon whose socket other users may reach."""
    daemon = world.daemon(socket_mode="0666", **settings)
    os.chmod(daemon.dir, 0o755)
    return daemon


@pytest.mark.root
def test_another_users_rank_does_not_enter_the_job(world: World) -> None:
    daemon = shared_daemon(world)
    ours, theirs = world.trainer(daemon), world.trainer(daemon, uid=NOBODY)
    ours.send("init", **ours.init_arguments(0, 2, "job", timeout_s=1.0))
    daemon.wait_joined("job", 1)
    result = theirs.call("init", **theirs.init_arguments(1, 2, "job", timeout_s=0.3))
    assert result["status"] == STATUS["TIMEOUT"], result
    assert ours.reply()["status"] == STATUS["TIMEOUT"]


def test_without_a_daemon_the_socket_is_named(world: World) -> None:
    trainer = world.trainer(None)
    result = trainer.call("init", rank=0, size=2, job="job", socket="/nonexistent/gradd.sock")
    assert result["status"] == STATUS["UNAVAILABLE"], result
    assert "/nonexistent/gradd.sock" in result["error"]


def test_a_world_of_one_needs_no_daemon(world: World) -> None:
    trainer = world.trainer(None)
    result = trainer.call("init", rank=0, size=1, job="job", socket="/nonexistent/gradd.sock")
    assert result["status"] == 0, result
    for what, arguments in (("allreduce", {"seed": 1}), ("moves", {"seed": 2}),
                            ("scaled", {"seed": 3}), ("grouped", {"seed": 4})):
        report = trainer.call("check", what=what, **arguments)
        assert report["bad"] == []
        assert report["n"] > 0


@pytest.mark.parametrize("variables, source, rank", [
    ({"GRADD_RANK": "1", "GRADD_WORLD_SIZE": "2", "GRADD_LOCAL_RANK": "1"}, "GRADD", 1),
    ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "torchrun", 1),
    ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"}, "HOROVOD", 1),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
      "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "OMPI", 1),
    ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, "PMI", 1),
])
def test_the_launchers_variables_give_the_rank_and_are_shown(
        world: World, variables: dict[str, str], source: str, rank: int) -> None:
    daemon = world.daemon()
    launched, other = world.trainer(daemon, environment=variables), world.trainer(daemon)
    launched.send("init", socket=daemon.socket, job="job")
    other.send("init", **other.init_arguments(0, 2, "job"))
    result = launched.reply()
    assert result["status"] == 0, result
    assert result["rank"] == rank
    assert source in result["source"]
    assert other.reply()["status"] == 0
    job = daemon.admin("job", name="job")
    by_rank = {r.get("rank", 0): r for r in job["stats"]["ranks"]}
    assert source in by_rank[1]["source"], by_rank


def test_a_node_level_rank_is_refused(world: World) -> None:
    daemon = world.daemon()
    trainer = world.trainer(daemon, environment={"RANK": "0", "WORLD_SIZE": "2"})
    result = trainer.call("init", socket=daemon.socket, job="job")
    assert result["status"] == STATUS["INVALID"], result
    assert "LOCAL_RANK" in result["error"]


@pytest.mark.timing
def test_a_hundred_cycles_take_less_than_two_seconds(world: World) -> None:
    daemon = world.daemon(job_linger_s=5)
    trainers = [world.trainer(daemon) for _ in range(2)]
    for rank, trainer in enumerate(trainers):
        trainer.send("cycles", n=100, **trainer.init_arguments(rank, 2, "job"))
    results = [trainer.reply() for trainer in trainers]
    assert [r["done"] for r in results] == [100, 100], results
    print(f"100 cycles of init, barrier and shutdown: {max(r['seconds'] for r in results):.3f} s")
    assert max(r["seconds"] for r in results) < 2.0
    # One worker served them all.
    assert len(daemon.worker_pids()) == 1


def test_the_worker_lingers_and_then_goes(world: World) -> None:
    daemon = world.daemon(job_linger_s=0.3)
    first = world.job(daemon, 2)
    worker = daemon.worker_pid()
    settle(first, "shutdown")
    second = world.join(first)
    assert daemon.worker_pid() == worker
    assert [r["epoch"] for r in second] == [2, 2]
    settle(first, "shutdown")
    daemon.assert_idle()
    assert daemon.jobs() == []


@pytest.mark.tsan
def test_several_jobs_run_side_by_side(world: World) -> None:
    daemon = world.daemon()
    jobs = [world.job(daemon, 2, f"job{i}") for i in range(3)]
    for trainers in jobs:
        for trainer in trainers:
            trainer.send("many", n=50, count=1000)
    for trainers in jobs:
        assert [t.reply()["status"] for t in trainers] == [0, 0]
    assert len(daemon.worker_pids()) == 3


def test_leaving_gives_back_all_memory(world: World) -> None:
    daemon = world.daemon(job_linger_s=30)
    trainers = world.job(daemon, 2)
    settle(trainers, "alloc", key="a", count=1 << 20)
    settle(trainers, "fill", key="a", value=1)
    assert [r["status"] for r in settle(trainers, "allreduce", name="x", key="a")] == [0, 0]
    worker = daemon.worker_pid()
    from harness import fds_of, memfd_mappings
    assert len(memfd_mappings(worker)) >= 2
    settle(trainers, "shutdown")
    daemon.admin("status")
    from harness import eventually
    eventually(lambda: not memfd_mappings(worker), "the worker has unmapped everything")
    assert not [link for link in fds_of(worker).values() if "memfd:" in link]
    for trainer in trainers:
        facts = trainer.call("facts")
        assert facts["memfds"] == []
        assert not [link for link in facts["fds"] if "memfd:" in link]
    # The lingering worker must not outlast this test.
    os.kill(worker, 15)


def test_a_bad_region_size_is_no_harm_to_the_trainer(world: World) -> None:
    daemon = world.daemon(job_memory_bytes="8M")
    trainers = world.job(daemon, 2)
    result = trainers[0].call("alloc", key="big", count=16 << 20)
    assert result["status"] == STATUS["NO_MEMORY"], result
    assert settle(trainers, "alloc", key="small", count=1000)[0]["status"] == 0
    settle(trainers, "fill", key="small", value=2)
    assert [r["status"] for r in settle(trainers, "allreduce", name="x", key="small")] == [0, 0]
    assert trainers[1].call("values", key="small", n=1) == [4.0]
