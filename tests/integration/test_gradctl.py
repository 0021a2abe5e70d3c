# SPDX-License-Identifier: Apache-2.0
"""gradctl: every command as text and as JSON, and the exit codes 0 to 5."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

import gradd_ctypes as api
from harness import (
    GRADCTL, World, daemon_environment, eventually, no_randomisation, settle,
)

NOBODY = 65534


def running_job(world: World, **settings: object):
    daemon = world.daemon(**settings)
    trainers = world.job(daemon, 2, "train7")
    settle(trainers, "alloc", key="a", count=1000)
    settle(trainers, "fill", key="a", value=1)
    for i in range(3):
        assert [r["status"] for r in settle(trainers, "allreduce", name=f"w{i}", key="a")] == [0, 0]
    return daemon, trainers


def test_status_in_text_and_json(world: World) -> None:
    daemon, _ = running_job(world)
    text = daemon.gradctl("status")
    assert text.returncode == 0, text.stderr
    assert "running" in text.stdout and str(daemon.pid) in text.stdout
    status = daemon.gradctl_json("status")
    assert status["schema"] == 1
    flat = json.dumps(status)
    assert '"running"' in flat
    body = status.get("status", status)
    assert body["pid"] == daemon.pid and body["jobs"] == 1 and body["stalled"] == 0
    assert body["degraded"] is False and body["problems"] == []
    assert body["socket"] == daemon.socket


def test_jobs_in_text_and_json(world: World) -> None:
    daemon, _ = running_job(world)
    text = daemon.gradctl("jobs")
    assert text.returncode == 0 and "train7" in text.stdout
    jobs = daemon.gradctl_json("jobs")
    assert jobs["schema"] == 1
    row = jobs["jobs"][0]
    assert row["name"] == "train7" and row["state"] == "running" and row["uid"] == os.getuid()


def test_job_shows_each_rank(world: World) -> None:
    daemon, trainers = running_job(world)
    job = daemon.gradctl_json("job", "train7")
    assert job["schema"] == 1
    ranks = job["ranks"]
    assert [r["rank"] for r in ranks] == [0, 1]
    for rank, trainer in zip(ranks, trainers):
        assert rank["pid"] == trainer.pid and rank["uid"] == os.getuid()
        assert rank["node"]
        assert rank["ops_done"] == 3 and rank["bytes"] == 3 * 4000
        assert rank["in_flight"] == 0 and rank["last_tensor"] == "w2"
        assert rank["late_mean_us"] >= 0 and rank["late_max_us"] >= rank["late_mean_us"]
        assert rank["source"] == "arguments" and rank["state"] == "active"
    text = daemon.gradctl("job", "train7")
    assert text.returncode == 0
    for trainer in trainers:
        assert str(trainer.pid) in text.stdout
    assert "w2" in text.stdout


def test_the_straggler_is_seen(world: World) -> None:
    daemon, trainers = running_job(world)
    for i in range(5):
        trainers[0].send("allreduce", name=f"slow{i}", key="a")
        eventually(lambda: daemon.gradctl_json("job", "train7")["ranks"][0]["in_flight"] == 1,
                   "rank 0 waits")
        trainers[1].send("allreduce", name=f"slow{i}", key="a")
        assert [t.reply()["status"] for t in trainers] == [0, 0]
    ranks = daemon.gradctl_json("job", "train7")["ranks"]
    assert ranks[1]["late_max_us"] > 1000 > ranks[0]["late_mean_us"], ranks
    assert ranks[1]["late_mean_us"] > ranks[0]["late_mean_us"]


def test_config_and_version(world: World) -> None:
    daemon = world.daemon(stall_warn_s=7)
    config = daemon.gradctl_json("config")
    assert config["schema"] == 1
    rows = config.get("options", config.get("config"))
    by_key = {row["key"]: row for row in rows}
    assert float(by_key["stall_warn_s"]["value"]) == 7
    assert by_key["op_timeout_s"]["source"] == "default"
    assert by_key["stall_warn_s"]["source"] != "default"
    assert "stall_warn_s" in daemon.gradctl("config").stdout
    version = daemon.gradctl_json("version")
    assert version["schema"] == 1
    assert "0.1.0" in daemon.gradctl("version").stdout


@pytest.mark.parametrize("arguments", [
    [], ["nonsense"], ["job"], ["status", "extra"], ["--nonsense", "status"],
    ["--timeout", "x", "status"], ["--uid", "-1", "job", "x"],
], ids=str)
def test_usage_errors_are_2(world: World, arguments: list[str]) -> None:
    result = subprocess.run(no_randomisation() + [str(GRADCTL), *arguments], capture_output=True,
                            text=True, timeout=20)
    assert result.returncode == 2
    assert result.stderr and not result.stdout


def test_an_unknown_job_is_1_and_says_which_there_are(world: World) -> None:
    daemon, _ = running_job(world)
    result = daemon.gradctl("job", "nope")
    assert result.returncode == 1
    assert "nope" in result.stderr and "train7" in result.stderr
    as_json = daemon.gradctl("--json", "job", "nope")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["schema"] == 1


def test_no_daemon_is_3(world: World) -> None:
    daemon = world.daemon()
    for command in (["status"], ["jobs"], ["job", "x"], ["config"], ["version"]):
        result = daemon.gradctl(*command, socket="/nonexistent/gradd.sock")
        assert result.returncode == 3, (command, result)
        assert "/nonexistent/gradd.sock" in result.stderr


def test_a_listener_that_says_nothing_is_3(world: World, tmp_path) -> None:
    import socket
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(path)
        mute.listen()
        result = subprocess.run(
            no_randomisation() + [str(GRADCTL), "--timeout", "0.2", "status"], timeout=20,
            capture_output=True, text=True, env=daemon_environment(GRADD_SOCKET=path))
    assert result.returncode == 3, result
    assert path in result.stderr


@pytest.mark.root
def test_a_socket_that_may_not_be_opened_is_4(world: World) -> None:
    daemon = world.daemon(socket_mode="0600")
    os.chmod(daemon.dir, 0o755)
    result = daemon.gradctl("status", uid=NOBODY)
    assert result.returncode == 4, result
    assert daemon.socket in result.stderr


@pytest.mark.root
def test_users_see_their_own_jobs_and_root_sees_all(world: World) -> None:
    daemon = world.daemon(socket_mode="0666")
    os.chmod(daemon.dir, 0o755)
    world.job(daemon, 2, "roots")
    theirs = [world.trainer(daemon, uid=NOBODY) for _ in range(2)]
    assert [r["status"] for r in world.join(theirs, "nobodys")] == [0, 0]
    names = {row["name"] for row in daemon.gradctl_json("jobs")["jobs"]}
    assert names == {"roots", "nobodys"}
    result = daemon.gradctl("--json", "jobs", uid=NOBODY)
    assert {row["name"] for row in json.loads(result.stdout)["jobs"]} == {"nobodys"}
    refused = daemon.gradctl("job", "roots", "--uid", "0", uid=NOBODY)
    assert refused.returncode in (1, 4), refused
    assert daemon.gradctl("job", "nobodys", "--uid", str(NOBODY)).returncode == 0


def test_a_stall_is_5(world: World) -> None:
    daemon, trainers = running_job(world, stall_warn_s=0.1)
    trainers[0].call("submit", handle="x", ops=[{
        "name": "late.tensor", "kind": api.ALLREDUCE, "dtype": api.F32, "redop": api.SUM,
        "in": "a", "out": "a", "count": 1000}])
    daemon.log.wait_for("late.tensor")
    eventually(lambda: daemon.gradctl("status").returncode == 5, "status is degraded")
    result = daemon.gradctl("job", "train7")
    assert result.returncode == 5
    assert "late.tensor" in result.stdout
    trainers[1].call("submit", handle="x", ops=[{
        "name": "late.tensor", "kind": api.ALLREDUCE, "dtype": api.F32, "redop": api.SUM,
        "in": "a", "out": "a", "count": 1000}])
    assert [r["status"] for r in settle(trainers, "wait", handle="x")] == [0, 0]
    eventually(lambda: daemon.gradctl("status").returncode == 0, "no longer degraded")


def test_status_says_how_many_problems_it_does_not_tell(world: World) -> None:
    daemon = world.daemon(job_linger_s=30)
    n_jobs, n_told = 19, 16
    lost = []
    for i in range(n_jobs):
        lost.append(daemon.connect())
        lost[-1].hello()
        lost[-1].send("join", job=f"job{i}", rank=0, size=1)
        lost[-1].expect("joined")
        lost[-1].close()
    eventually(lambda: daemon.admin("status").get("n_failed", 0) == n_jobs,
               f"{n_jobs} jobs have failed")
    problems = daemon.gradctl_json("status")["problems"]
    assert len(problems) == n_told + 1 and problems[-1] == f"and {n_jobs - n_told} more", problems
    for pid in daemon.worker_pids():
        os.kill(pid, 15)


def test_a_failed_job_is_5_and_says_why(world: World) -> None:
    daemon, trainers = running_job(world, job_linger_s=30)
    dead = trainers[1]
    dead.kill()
    assert trainers[0].call("barrier")["status"] < 0
    trainers[0].call("shutdown")
    eventually(lambda: daemon.gradctl("status").returncode == 5, "status is degraded")
    job = daemon.gradctl_json("job", "train7")
    assert str(dead.pid) in json.dumps(job) and "killed" in json.dumps(job)
    os.kill(daemon.worker_pid(), 15)


def test_watch_repeats_until_it_is_stopped(world: World) -> None:
    daemon, _ = running_job(world)
    process = world.popen(
        no_randomisation() + [str(GRADCTL), "--json", "--watch=0.05", "status"],
        stdout=subprocess.PIPE, text=True, env=daemon_environment(GRADD_SOCKET=daemon.socket))
    documents = [json.loads(process.stdout.readline()) for _ in range(3)]
    assert all(d["schema"] == 1 for d in documents)
    process.terminate()
    process.wait(20)


def test_output_to_a_full_disk_is_an_error(world: World) -> None:
    daemon, _ = running_job(world)
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            no_randomisation() + [str(GRADCTL), "status"], stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=20, env=daemon_environment(GRADD_SOCKET=daemon.socket))
    assert result.returncode == 1
    assert "No space" in result.stderr
