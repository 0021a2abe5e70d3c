# SPDX-License-Identifier: Apache-2.0
"""gradrun over several hosts: network namespaces, a real sshd in each, real agents.

Where launching is all that matters, the private daemons are a stand-in (gradrun_site.py); the last
tests train with the real one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import netns
import ssh_hosts
from cluster import Cluster
from gradrun_site import WAIT, Running, Site, own_lines
from harness import DIGITS, GRADRUN, ROOT, SLOW, World, client_environment, eventually

REASON = ssh_hosts.why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "-")


def test_every_rank_knows_its_place(site: Site) -> None:
    result = site.run("-H", site.hosts(2, 1, 2), *site.script(
        'print(json.dumps(dict(os.environ)))'))
    assert result.returncode == 0, result.stderr
    ranks = {}
    for line in result.stdout.splitlines():
        prefix, _, text = line.partition(" ")
        ranks[prefix] = json.loads(text)
    assert sorted(ranks) == [f"[{i}]" for i in range(5)]
    # rank: host, local rank, local size, cross rank, cross size
    expected = [(0, 0, 2, 0, 3), (0, 1, 2, 0, 2), (1, 0, 1, 1, 3), (2, 0, 2, 2, 3), (2, 1, 2, 1, 2)]
    for rank, (host, local_rank, local_size, cross_rank, cross_size) in enumerate(expected):
        e = ranks[f"[{rank}]"]
        for name, value in {
            "GRADD_RANK": rank, "RANK": rank, "HOROVOD_RANK": rank, "GRADD_WORLD_SIZE": 5,
            "WORLD_SIZE": 5, "HOROVOD_SIZE": 5, "GRADD_LOCAL_RANK": local_rank,
            "LOCAL_RANK": local_rank, "HOROVOD_LOCAL_RANK": local_rank,
            "GRADD_LOCAL_SIZE": local_size, "LOCAL_WORLD_SIZE": local_size, "GROUP_RANK": host,
            "GROUP_WORLD_SIZE": 3, "HOROVOD_CROSS_RANK": cross_rank,
            "HOROVOD_CROSS_SIZE": cross_size, "MASTER_ADDR": site.nodes.addresses[0],
        }.items():
            assert e[name] == str(value), (rank, name, e[name])
        assert e["SSH_CONNECTION"].split()[2] == site.nodes.addresses[host]
        assert e["GRADD_COORDINATOR"] == ranks["[0]"]["GRADD_COORDINATOR"]
        assert e["MASTER_PORT"] == ranks["[0]"]["MASTER_PORT"] != "0"
        assert e["GRADD_JOB"] == ranks["[0]"]["GRADD_JOB"]
        assert e["GRADD_SOCKET"].startswith(str(site.runtime))
    port = ranks["[0]"]["GRADD_COORDINATOR"].removeprefix(site.nodes.addresses[0] + ":")
    assert f"[gradd@{site.nodes.addresses[0]}] peers at {site.nodes.addresses[0]}:{port}\n" \
        in result.stderr
    # One daemon for a host, not for a rank.
    assert len({e["GRADD_SOCKET"] for e in ranks.values()}) == 3


def test_this_host_and_another(site: Site) -> None:
    """No ssh to this host, and the other one still finds the coordinator here."""
    here = site.nodes.launcher.address
    for name in ("localhost", here):
        result = site.run("-H", f"{name}:1,{site.nodes.addresses[0]}:1", *site.script(
            'e = os.environ; print(e["GRADD_COORDINATOR"], e["MASTER_ADDR"], "SSH_CONNECTION" in e)'))
        assert result.returncode == 0, result.stderr
        assert re.search(rf"^\[0\] {here}:\d+ {here} False$", result.stdout, re.M), result.stdout
        assert re.search(rf"^\[1\] {here}:\d+ {here} True$", result.stdout, re.M), result.stdout
        assert f"[gradd@{name}] peers at {here}:" in result.stderr, result.stderr


def test_the_coordinators_address_can_be_given(site: Site) -> None:
    result = site.run("-H", site.hosts(1, 1), "--coordinator-address", "node0.example",
                      *site.script('print(os.environ["GRADD_COORDINATOR"])'))
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"\] node0.example:\d+\n", result.stdout)) == 2, result.stdout


def test_a_host_file_and_fewer_ranks_than_slots(site: Site) -> None:
    a = site.nodes.addresses
    (site.tmp_path / "hosts").write_text(
        f"# nodes\n{a[0]} slots=1\n{a[1]}:2 # two\n\n{a[2]} slots=4 max_slots=8\n")
    result = site.run("-np", "2", "--hostfile", "hosts", "-v", *site.script('print("here")'))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[0@{a[0]}] here", f"[1@{a[1]}] here"]
    assert a[2] not in result.stderr


def test_environment_and_directory_are_the_launchers(site: Site) -> None:
    result = site.run(
        "-H", site.hosts(1, 1), "-x", "GIVEN=a b'c", "-x", "MINE", *site.script(
            'print(os.getcwd(), os.environ["GIVEN"], os.environ["MINE"],'
            ' os.environ["PYTHONPATH"], os.environ["GRADD_ANY"], "NOT_SENT" in os.environ)'),
        MINE="m", PYTHONPATH="/p/p", GRADD_ANY="g", NOT_SENT="1")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"[{i}] {site.tmp_path} a b'c m /p/p g False" for i in range(2)]


def test_output_is_collected_here(site: Site) -> None:
    result = site.run("-H", site.hosts(1, 2), "--output", "logs", "-q", *site.script(
        'print("out", os.environ["RANK"]); print("err", file=sys.stderr)'))
    assert result.returncode == 0 and "out" not in result.stdout, result
    for rank in range(3):
        text = (site.tmp_path / f"logs/rank.{rank}.log").read_text()
        assert sorted(text.splitlines()) == ["err", f"out {rank}"]


def test_much_output_arrives_whole(site: Site) -> None:
    result = site.run("-H", site.hosts(2, 2), *site.script(
        'r = os.environ["RANK"]\nfor i in range(20000): print(r * 40, i)'))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 80000
    for line in lines:
        assert re.fullmatch(r"\[(\d)\] \1{40} \d+", line), line


def test_rank_zero_reads_what_is_piped_in(site: Site) -> None:
    text = "".join(f"line {i}\n" for i in range(50000))
    words = site.words("-H", site.hosts(2, 1), "sh", "-c", "cat | cksum")
    result = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60 * SLOW,
                            cwd=site.tmp_path, env=site.environment)
    assert result.returncode == 0, result.stderr
    expected = subprocess.run(["cksum"], input=text, capture_output=True, text=True).stdout
    assert sorted(result.stdout.splitlines()) == [
        f"[0] {expected.strip()}", "[1] 4294967295 0", "[2] 4294967295 0"]


def test_a_rank_zero_that_does_not_read_ends_all_the_same(site: Site) -> None:
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        words = site.words("-H", site.hosts(1, 1), *site.script('print("done")'))
        result = subprocess.run(words, stdin=endless.stdout, capture_output=True, text=True,
                                timeout=60 * SLOW, cwd=site.tmp_path, env=site.environment)
        endless.kill()
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] done", "[1] done"]


def test_nobody_reads_the_output_any_more(site: Site) -> None:
    words = site.words("-H", site.hosts(1, 1), "yes")
    process = site.world.popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               stdin=subprocess.DEVNULL, env=site.environment, cwd=site.tmp_path)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(30 * SLOW) == 128 + signal.SIGPIPE


def test_the_first_failure_ends_all_hosts(site: Site) -> None:
    result = site.run("-H", site.hosts(2, 1), *site.script(
        'sys.exit(7) if os.environ["RANK"] == "2" else signal.pause()'))
    assert result.returncode == 7, result
    assert len(own_lines(result)) == 1, result.stderr
    assert re.search(rf"gradrun: rank 2 \(pid \d+ on {site.nodes.addresses[1]}\) exited with code "
                     "7; ending the other ranks", result.stderr)


def test_a_killed_rank_is_to_blame_and_not_those_that_notice(site: Site) -> None:
    # Rank 0 gives up because of rank 1's death, and its news may come first.
    result = site.run("-H", site.hosts(1, 1), *site.script("""
        flag = os.path.join(os.getcwd(), "dead")
        if os.environ["RANK"] == "1":
            os.mkfifo(flag)
            os.open(flag, os.O_RDWR)
            while os.stat(flag).st_size == 0 and not os.path.exists(flag + ".seen"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        while not os.path.exists(flag):
            time.sleep(0.01)
        fd = os.open(flag, os.O_RDONLY)
        open(flag + ".seen", "w").close()
        os.read(fd, 1)
        sys.exit(1)
    """))
    assert result.returncode == 128 + 9, result
    assert "rank 1 (pid" in result.stderr and "SIGKILL" in result.stderr


def test_a_program_that_is_not_there(site: Site) -> None:
    result = site.run("-H", site.hosts(1, 1), "/nonexistent/program")
    assert result.returncode == 127, result
    assert len(own_lines(result)) == 1 and "/nonexistent/program" in result.stderr


def test_too_few_open_files_for_the_hosts(site: Site) -> None:
    words = ["prlimit", "--nofile=32:36", *site.words("-H", site.hosts(1, 1, 1, 1), "true")]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60 * SLOW,
                            stdin=subprocess.DEVNULL, env=site.environment)
    assert result.returncode == 1, result
    assert re.fullmatch(r"gradrun: 4 hosts need \d+ open files, and at most 36 are allowed here: "
                        r"raise the limit \(.*\)\n", result.stderr), result.stderr


def test_the_time_limit(site: Site) -> None:
    result = site.run("-H", site.hosts(1, 1), "--timeout", "0.5", *site.script(WAIT))
    assert result.returncode == 124 and "0.5 s" in result.stderr, result


def test_check_says_what_would_run_where(site: Site) -> None:
    result = site.run("--check", "-H", site.hosts(2, 1), "python3", "train.py")
    assert result.returncode == 0, result
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"{site.nodes.addresses[0]}: ranks 0 to 1, through ssh")
    assert lines[1].startswith(f"{site.nodes.addresses[1]}: rank 2, through ssh")
    assert "[gradd@" not in result.stderr, "something was started"


def test_check_finds_a_blocked_port(site: Site) -> None:
    a, host = site.nodes.addresses, site.nodes.hosts[1]
    host.run("ip", "route", "add", "prohibit", f"{a[0]}/32")
    try:
        result = site.run("--check", "-H", site.hosts(1, 1), "true")
    finally:
        host.run("ip", "route", "delete", "prohibit", f"{a[0]}/32")
    assert result.returncode == 1, result
    assert f"host {a[1]}: cannot connect to {a[0]}:" in result.stderr


def test_check_finds_a_missing_program_and_daemon(site: Site) -> None:
    result = site.run("--check", "-H", site.hosts(1, 1), "no-such-program",
                      GRADD_DAEMON="/nonexist")
    assert result.returncode == 1, result
    assert 'there is no program "no-such-program"' in result.stderr
    assert "gradd /nonexist:" in result.stderr


DIGITS_ON_DATA = [str(DIGITS), "--data", str(ROOT / "client/examples/data/digits.csv")]


def train(site: Site, *options: str, **extra: str) -> np.ndarray:
    """digits with the real daemon; the weights that it saves."""
    path = site.tmp_path / "weights"
    result = site.run(*options, *DIGITS_ON_DATA, "--save", str(path), "--epochs", "10",
                      GRADD_DAEMON="", **extra)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    weights = np.fromfile(path, np.float32)
    path.unlink()
    assert weights.size > 1000 and np.isfinite(weights).all()
    return weights


@pytest.mark.limit(180)
@pytest.mark.parametrize("slots", [(1, 1), (3, 1), (1, 1, 1, 1)], ids=str)
def test_digits_learns_the_same_over_nodes(site: Site, slots: tuple[int, ...]) -> None:
    alone = train(site, "-H", "localhost:1")
    together = train(site, "-H", site.hosts(*slots))
    assert np.abs(together - alone).max() / np.abs(alone).max() <= 1e-5


def test_a_rank_killed_in_training_is_named(site: Site) -> None:
    running = Running(site, site.words("-H", site.hosts(2, 1), *DIGITS_ON_DATA, "--epochs",
                                       "1000000"), GRADD_DAEMON="")
    eventually(lambda: any("epoch 3 " in line for line in running.out.lines), "it trains",
               30 * SLOW)
    host = site.nodes.hosts[1]
    ranks = [pid for pid in site.nodes.processes(host)
             if Path(f"/proc/{pid}/comm").read_text() == "digits\n"]
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGKILL)
    assert running.wait() == 128 + signal.SIGKILL, running.errors()
    assert f"rank 2 (pid {ranks[0]} on {host.address}) was killed by signal 9" in running.errors()


@pytest.mark.limit(120)
def test_the_hosts_own_daemons_are_used(world: World, tmp_path: Path) -> None:
    """--socket names one path, which on each host is that host's daemon."""
    nodes = Cluster(world, 2)
    common = tmp_path / "common"
    common.mkdir()
    homes = [os.path.dirname(daemon.socket) for daemon in nodes.daemons]
    name = os.path.basename(nodes.daemons[0].socket)
    shell = tmp_path / "rsh"
    shell.write_text(
        f"#!/bin/sh\nexec nsenter --net={netns.NETNS_DIR}/{nodes.nodes[1].namespace} "
        f"unshare -m sh -c \"mount --bind {homes[1]} {common} && $2\"\n")
    shell.chmod(0o755)
    words = " ".join([str(GRADRUN), "--rsh", str(shell), "--socket", f"{common}/{name}", "-H",
                      f"{nodes.nodes[0].address}:1,{nodes.nodes[1].address}:2", "--job", "ours",
                      *DIGITS_ON_DATA, "--epochs", "10"])
    result = subprocess.run(
        nodes.nodes[0].prefix + ["unshare", "-m", "sh", "-c",
                                 f"mount --bind {homes[0]} {common} && exec {words}"],
        capture_output=True, text=True, timeout=60 * SLOW, stdin=subprocess.DEVNULL,
        cwd=tmp_path, env=client_environment())
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 ranks" in result.stdout
    for daemon in nodes.daemons:
        daemon.log.wait_for(r"job=ours")


@pytest.mark.parametrize("arguments, words", [
    (["-H", "a:0", "true"], "HOST[:SLOTS]"),
    (["-H", "-oProxyCommand=x", "true"], "HOST[:SLOTS]"),
    (["-np", "3", "-H", "localhost:2", "true"], "3 ranks do not fit into the 2 slots"),
    (["--hostfile", "/nonexistent", "true"], "cannot read the host file /nonexistent"),
    (["-np", "1", "--ssh-port", "5", "true"], "--ssh-port needs hosts"),
    (["-H", "a", "--ssh-identity-file", "/nonexistent", "true"],
     "--ssh-identity-file /nonexistent: No such file"),
], ids=str)
def test_usage_errors(site: Site, arguments: list[str], words: str) -> None:
    result = subprocess.run([str(GRADRUN), *arguments], capture_output=True, text=True, timeout=30,
                            env=site.environment)
    assert result.returncode == 2 and words in result.stderr, result
