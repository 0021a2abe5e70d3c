# SPDX-License-Identifier: Apache-2.0
"""gradrun over several hosts: network namespaces, a real sshd in each, real agents.

Where launching is all that matters, the private daemons are a stand-in that keeps the contract
with gradrun (fake_gradd.py); the last tests train with the real one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Callable, Iterator

import numpy as np
import pytest

import netns
from cluster import Cluster
from harness import (
    DIGITS, GRADRUN, PYTHON, REPLY_S, ROOT, SLOW, LineReader, World, client_environment, eventually,
    no_randomisation,
)
from ssh_hosts import SshHosts, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "-")
FAKE = ROOT / "tests/unit/run/fake_gradd.py"


@pytest.fixture(scope="module")
def nodes() -> Iterator[SshHosts]:
    made = SshHosts(4)
    yield made
    made.close()


class Site:
    """Where one test runs gradrun; at the end nothing of it is left on any node."""

    def __init__(self, nodes: SshHosts, world: World, tmp_path: Path) -> None:
        self.nodes, self.world, self.tmp_path = nodes, world, tmp_path
        # A short path: a daemon's socket lies in it.
        self.runtime = Path(f"/tmp/gradd-hosts-{os.getpid()}")
        self.runtime.mkdir(mode=0o700)
        self.environment = {
            **client_environment(), "GRADD_DAEMON": str(FAKE), "GRADD_SOCKET": "",
            "PATH": f"{nodes.bin}:{os.environ['PATH']}",
        }

    def hosts(self, *slots: int) -> str:
        return ",".join(f"{a}:{n}" for a, n in zip(self.nodes.addresses, slots))

    def words(self, *options: str, identity: bool = True, program: str = str(GRADRUN)) -> list[str]:
        key = ["--ssh-identity-file", str(self.nodes.home / "user_key")] if identity else []
        return self.nodes.launcher.prefix + [
            *no_randomisation(), program, *key, "-x", f"XDG_RUNTIME_DIR={self.runtime}", *options]

    def run(self, *options: str, timeout: float = 60, cwd: Path | None = None, identity: bool = True,
            **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.words(*options, identity=identity), capture_output=True,
                              text=True, timeout=timeout * SLOW, cwd=cwd or self.tmp_path,
                              stdin=subprocess.DEVNULL, env={**self.environment, **extra})

    def script(self, body: str) -> list[str]:
        path = self.tmp_path / "script.py"
        path.write_text("import json, os, signal, sys, time\n" + textwrap.dedent(body))
        return [PYTHON, "-u", str(path)]

    def start(self, *options: str) -> "Running":
        return Running(self, self.words(*options))

    def is_empty(self) -> bool:
        return not any(self.nodes.processes(host) for host in self.nodes.hosts)

    def assert_nothing_is_left(self, timeout_s: float = REPLY_S) -> None:
        eventually(self.is_empty, "no process is left on a node", timeout_s)
        eventually(lambda: not list(self.runtime.iterdir()), "no directory is left", 5.0)

    def close(self) -> None:
        left = list(self.runtime.iterdir())
        subprocess.run(["rm", "-rf", str(self.runtime)], check=True)
        assert not left, f"left behind: {left}"


class Running:
    """A gradrun whose ranks have said "up"."""

    def __init__(self, site: Site, words: list[str], is_job: bool = False, **extra: str) -> None:
        self.site = site
        self.process = site.world.popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            text=True, env={**site.environment, **extra}, cwd=site.tmp_path,
            **({"preexec_fn": os.setpgrp} if is_job else {"start_new_session": True}))
        self.out = LineReader(self.process.stdout)
        self.err = LineReader(self.process.stderr)

    def wait_until_up(self, n: int) -> None:
        eventually(lambda: sum(line.endswith("up") for line in self.out.lines) >= n,
                   f"{n} ranks are up; stderr: {self.err.lines}")

    def pid(self) -> int:
        """Of gradrun: what entered the namespace has become it."""
        return self.process.pid

    def wait(self, timeout_s: float = 40 * SLOW) -> int:
        return self.process.wait(timeout_s)

    def errors(self) -> str:
        self.err.thread.join(10)
        return "\n".join(self.err.lines)


@pytest.fixture
def site(nodes: SshHosts, world: World, tmp_path: Path) -> Iterator[Site]:
    made = Site(nodes, world, tmp_path)
    yield made
    try:
        made.assert_nothing_is_left()
    finally:
        made.close()


WAIT = 'print("up"); signal.pause()'


def own_lines(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What gradrun itself said, without the daemons' logs."""
    return [line for line in result.stderr.splitlines() if line.startswith("gradrun: ")]


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


def expect_one_line(result: subprocess.CompletedProcess[str], host: str, *parts: str) -> None:
    assert result.returncode == 1, result
    lines = own_lines(result)
    assert len(lines) == 1 and lines[0].startswith(f"gradrun: host {host}: "), result.stderr
    for part in parts:
        assert part in lines[0], lines[0]


def own_ssh(site: Site, *lines: str) -> dict[str, str]:
    """An ssh before the others in PATH. The environment that has it."""
    folder = site.tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "ssh").write_text("\n".join(["#!/bin/sh", *lines, ""]))
    (folder / "ssh").chmod(0o755)
    return {"PATH": f"{folder}:{site.environment['PATH']}"}


SSH_TRAPS = ["RemoteCommand echo theirs", "RequestTTY force", "StdinNull yes", "SessionType none",
             "ForkAfterAuthentication yes", "LogLevel QUIET", "EscapeChar ~", "Tunnel yes",
             "PermitLocalCommand yes\n LocalCommand cat",
             "ControlMaster auto\n ControlPath {home}/master-%p-%h\n ControlPersist yes"]


@pytest.mark.parametrize("trap", ["all", *SSH_TRAPS], ids=lambda trap: trap.split()[0])
def test_whatever_ssh_config_says(site: Site, trap: str) -> None:
    """The way to an agent is a plain pipe, and no connection stays behind."""
    config = site.tmp_path / "ssh_config"
    lines = "\n ".join(SSH_TRAPS if trap == "all" else [trap]).format(home=site.nodes.home)
    config.write_text(f"Host *\n {lines}\n")
    result = site.run("-H", site.hosts(1, 1), *site.script('print("here")'),
                      **own_ssh(site, f'exec {site.nodes.bin}/ssh -F {config} "$@"'))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] here", "[1] here"]
    assert not site.nodes.processes(site.nodes.launcher)


def test_a_quiet_ssh_is_made_to_say_why(site: Site) -> None:
    result = site.run("-H", site.hosts(1), "--ssh-port", "23", "true", **own_ssh(
        site, f'exec {site.nodes.bin}/ssh "$@" -o LogLevel=QUIET'))
    expect_one_line(result, site.nodes.addresses[0], "nothing answers at its ssh port")


@pytest.mark.parametrize("unknown", ["-oSessionType=*|-oStdinNull=*", "-oRemoteCommand=*|-G"],
                         ids=["before 8.7", "before 7.6"])
def test_an_ssh_that_does_not_know_newer_options(site: Site, unknown: str) -> None:
    environment = own_ssh(
        site, f'for i; do case "$i" in {unknown}) echo "Bad configuration option" >&2; exit 255;; '
        f'esac; done; exec {site.nodes.bin}/ssh "$@"')
    result = site.run("-H", site.hosts(1, 1), *site.script('print("here")'), **environment)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] here", "[1] here"]


def test_an_unknown_host_key(site: Site) -> None:
    known = site.nodes.known_hosts
    before = known.read_text()
    try:
        known.write_text("".join(before.splitlines(True)[:1]))
        result = site.run("-H", site.hosts(1, 1), "true")
    finally:
        known.write_text(before)
    expect_one_line(result, site.nodes.addresses[1], "does not know its host key", "known_hosts")


def test_a_changed_host_key(site: Site) -> None:
    known = site.nodes.known_hosts
    before = known.read_text()
    other = (site.nodes.home / "user_key.pub").read_text().split()[1]
    key = before.split()[2]
    try:
        known.write_text(before.splitlines(True)[0] +
                         before.splitlines(True)[1].replace(key, other))
        result = site.run("-H", site.hosts(1, 1), "true")
    finally:
        known.write_text(before)
    expect_one_line(result, site.nodes.addresses[1], "is not the one that ssh knows", "ssh-keygen")


def test_no_key_of_ours(site: Site) -> None:
    result = site.run("-H", site.hosts(1), "true", identity=False)
    expect_one_line(result, site.nodes.addresses[0], "--ssh-identity-file")


def test_no_sshd_there(site: Site) -> None:
    result = site.run("-H", site.hosts(1, 1), "--ssh-port", "23", "true")
    assert result.returncode == 1 and len(own_lines(result)) == 1, result
    assert "nothing answers at its ssh port" in result.stderr


def test_an_unreachable_host(site: Site) -> None:
    nobody = "10.77.0.77"
    result = site.run("-H", f"{site.hosts(1)},{nobody}:1", "true")
    expect_one_line(result, nobody, "cannot be reached")


@pytest.fixture
def dead_name_server(site: Site) -> Iterator[Callable[..., list[str]]]:
    """Words before those of gradrun, for a name server that takes questions and never answers."""
    launcher = site.nodes.launcher
    server = site.world.popen(
        [*launcher.prefix, PYTHON, "-u", "-c", "import socket, signal; s = socket.socket("
         f"type=socket.SOCK_DGRAM); s.bind(('{launcher.address}', 53)); print(); signal.pause()"],
        stdout=subprocess.PIPE)
    server.stdout.readline()

    def words(timeout_s: int) -> list[str]:
        config = site.tmp_path / "resolv.conf"
        config.write_text(f"nameserver {launcher.address}\n"
                          f"options timeout:{timeout_s} attempts:1\n")
        return ["unshare", "-m", "sh", "-c",
                f'mount --bind {config} /etc/resolv.conf && exec "$@"', "sh"]

    yield words
    server.kill()
    server.wait()


def test_ctrl_c_while_no_name_server_answers(
        site: Site, dead_name_server: Callable[..., list[str]]) -> None:
    running = Running(site, dead_name_server(30) + site.words(
        "-H", f"one.example:1,{site.hosts(1)},two.example:1", "true"))
    expected = ("gradrun: host one.example, and 1 more: their names cannot be looked up yet: does "
                "the name server (/etc/resolv.conf) answer?")
    eventually(lambda: expected in running.err.lines, "it says what it waits for", 15 * SLOW)
    os.kill(running.pid(), signal.SIGINT)
    assert running.wait(10 * SLOW) in (-signal.SIGINT, 130)
    eventually(lambda: not site.nodes.processes(site.nodes.launcher)[1:], "only the server runs")


def test_a_name_that_no_server_knows(site: Site,
                                     dead_name_server: Callable[..., list[str]]) -> None:
    result = subprocess.run(
        dead_name_server(1) + site.words("-H", f"{site.hosts(1)},one.example:1", "true"),
        capture_output=True, text=True, timeout=60 * SLOW, stdin=subprocess.DEVNULL,
        env=site.environment)
    assert own_lines(result)[-1].startswith(
        "gradrun: host one.example: its name cannot be looked up: no name server answers"), result
    assert result.returncode == 1


def test_hosts_that_have_names_here(site: Site) -> None:
    names = site.tmp_path / "names"
    names.write_text("127.0.0.1 localhost\n" + "".join(
        f"{address} node{i}\n" for i, address in enumerate(site.nodes.addresses)))
    namespaces = f"{netns.NETNS_DIR}/{site.nodes.network.tag}"
    shell = rsh(site, f'exec nsenter --net={namespaces}-n${{1#node}} sh -c "$2"')
    words = site.words("--rsh", shell, "-H", "node0:1,localhost:1,node1:1", *site.script(
        'print(os.environ["GRADD_COORDINATOR"].split(":")[0])'), identity=False)
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'mount --bind {names} /etc/hosts && exec "$@"', "sh", *words],
        capture_output=True, text=True, timeout=60 * SLOW, stdin=subprocess.DEVNULL,
        env=site.environment)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"[{i}] {site.nodes.addresses[0]}" for i in range(3)]
    assert f"[gradd@localhost] peers at {site.nodes.launcher.address}:" in result.stderr


def rsh(site: Site, body: str) -> str:
    path = site.tmp_path / "rsh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_another_remote_shell(site: Site) -> None:
    namespaces = f"{netns.NETNS_DIR}/{site.nodes.network.tag}"
    shell = rsh(site, f"exec nsenter --net={namespaces}-n$((${{1##*.}} - 1)) sh -c \"$2\"")
    result = site.run("--rsh", shell, "-H", site.hosts(1, 1), *site.script('print("here")'),
                      identity=False)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] here", "[1] here"]


def test_a_remote_shell_that_is_not_there(site: Site) -> None:
    result = site.run("--rsh", "no-such-shell -x", "-H", site.hosts(1), "true", identity=False)
    expect_one_line(result, site.nodes.addresses[0], 'cannot run --rsh "no-such-shell -x": there is '
                    'no such program in PATH')


def test_a_loopback_address_towards_a_host_known_to_ssh_only(site: Site) -> None:
    """An alias of ssh's configuration has no address here: then nor has this host one towards it."""
    namespaces = f"{netns.NETNS_DIR}/{site.nodes.network.tag}"
    shell = rsh(site, f"export SSH_CONNECTION='0.0.0.0 1 {site.nodes.addresses[0]} 22'\n"
                      f"exec nsenter --net={namespaces}-n0 sh -c \"$2\"")
    for mode in ((), ("--check",)):
        result = site.run("--rsh", shell, *mode, "-H", "localhost:1,alias.invalid:1", "true",
                          identity=False)
        expect_one_line(result, "localhost", "127.0.0.1", "name it by an address")


def test_gradrun_is_not_on_the_host(site: Site) -> None:
    shell = rsh(site, "exec sh -c \"exec '/elsewhere/gradrun' --agent\"")
    result = site.run("--rsh", shell, "-H", site.hosts(1), "true", identity=False)
    expect_one_line(result, site.nodes.addresses[0], str(GRADRUN), "is not there",
                    "at the same path on all hosts")


def test_another_version_is_on_the_host(site: Site) -> None:
    shell = rsh(site, 'echo "welcome"; echo "gradrun-agent 0.0.9"; exec cat')
    result = site.run("--rsh", shell, "-H", site.hosts(1), "true", identity=False)
    expect_one_line(result, site.nodes.addresses[0], "0.0.9", "install the same")


def test_a_host_that_speaks_nonsense(site: Site) -> None:
    version = subprocess.run([str(GRADRUN), "--version"], capture_output=True, text=True,
                             check=True).stdout.split()[1]
    shell = rsh(site, f'echo "gradrun-agent {version}"; exec cat /dev/urandom')
    result = site.run("--rsh", shell, "-H", site.hosts(1), "true", identity=False)
    expect_one_line(result, site.nodes.addresses[0], "nonsense")


def test_a_login_script_that_talks(site: Site) -> None:
    shell = rsh(site, 'printf "welcome to this host"; exec sh -c "$2"')
    # Towards an address that is not this host's, although the agent runs here.
    result = site.run("--rsh", shell, "-H", f"{site.nodes.addresses[0]}:1",
                      *site.script('print("here")'), identity=False)
    assert result.returncode == 0 and result.stdout == "[0] here\n", result


def test_a_directory_that_only_the_launcher_has(site: Site) -> None:
    top = site.tmp_path / "only-here"
    top.mkdir()
    words = site.words("-H", site.hosts(1, 1), "true")
    quoted = " ".join(f"'{word}'" for word in words)
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c",
         f"mount -t tmpfs none {top} && mkdir {top}/sub && cd {top}/sub && exec {quoted}"],
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, env=site.environment)
    assert result.returncode == 1, result
    assert len(own_lines(result)) == 1 and f"working directory {top}/sub" in result.stderr, result


def test_a_daemon_that_cannot_start(site: Site) -> None:
    result = site.run("-H", site.hosts(1, 1), "true", FAKE_GRADD="x", GRADD_DAEMON="/nonexistent")
    assert result.returncode == 1 and len(own_lines(result)) == 1, result
    assert "/nonexistent" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_to_the_launcher_leaves_nothing(site: Site, number: int) -> None:
    running = site.start("-H", site.hosts(1, 2), *site.script(WAIT))
    running.wait_until_up(3)
    os.kill(running.pid(), number)
    code = running.wait()
    assert code in (-number, 128 + number), code
    site.assert_nothing_is_left()


def test_a_terminal_that_goes_away_leaves_nothing(site: Site) -> None:
    words = site.words("-H", site.hosts(1, 1), *site.script(WAIT))
    master, slave = os.openpty()
    # script(1)'s part: the terminal becomes the session's own.
    process = site.world.popen(["setsid", "--ctty", "--wait", *words], stdin=slave, stdout=slave,
                               stderr=slave, env=site.environment, cwd=site.tmp_path)
    os.close(slave)
    seen = b""
    while seen.count(b"up") < 2:
        seen += os.read(master, 4096)
    os.close(master)
    process.wait(40 * SLOW)
    site.assert_nothing_is_left()


def test_a_second_ctrl_c_kills_at_once(site: Site) -> None:
    running = site.start("-H", site.hosts(1, 1), *site.script(
        'signal.signal(signal.SIGTERM, signal.SIG_IGN); print("up")\nwhile True: signal.pause()'))
    running.wait_until_up(2)
    started = time.monotonic()
    os.kill(running.pid(), signal.SIGINT)
    eventually(lambda: any("again: kill" in line for line in running.err.lines), "it heard that")
    time.sleep(0.3)  # signals closer than 0.2 s count as one
    os.kill(running.pid(), signal.SIGINT)
    assert running.wait() in (-2, 130)
    assert time.monotonic() - started < 4.5 * SLOW


def state(pid: int) -> str:
    """As ps(1) shows it: T is stopped; nothing when it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Script:
    """gradrun in a script: in the process group of the shell that runs it, a job of our session."""

    def __init__(self, site: Site, *options: str) -> None:
        self.site = site
        self.running = Running(site, ["sh", "-c", '"$@"; exit $?', "sh", *site.words(*options)],
                               is_job=True)
        self.group = self.running.process.pid

    def front(self) -> int:
        children = Path(f"/proc/{self.group}/task/{self.group}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def stop(self, *ranks: int) -> None:
        """As Ctrl-Z does."""
        os.killpg(self.group, signal.SIGTSTP)
        for pid in (self.front(), *ranks):
            eventually(lambda: state(pid) == "T", f"{pid} is stopped", REPLY_S)


def rank_pids(running: Running) -> list[int]:
    """Of ranks that print "up" and their pid: the namespaces of nodes are those of the network."""
    return [int(line.split()[2]) for line in running.out.lines if " up " in line]


COUNT = """
    print("up", os.getpid(), flush=True)
    for i in range(10**9):
        print("turn", i, flush=True)
        time.sleep(0.01)
"""


def start_script(site: Site) -> tuple[Script, list[int]]:
    script = Script(site, "-H", site.hosts(1, 2), *site.script(COUNT))
    eventually(lambda: len(rank_pids(script.running)) == 3,
               f"3 ranks are up; stderr: {script.running.err.lines}")
    return script, rank_pids(script.running)


def test_ctrl_z_stops_the_ranks_and_fg_goes_on(site: Site) -> None:
    script, ranks = start_script(site)
    script.stop(*ranks)
    os.killpg(script.group, signal.SIGCONT)
    for rank in range(3):
        n = sum(line.startswith(f"[{rank}] turn") for line in script.running.out.lines)
        eventually(lambda: sum(line.startswith(f"[{rank}] turn")
                               for line in script.running.out.lines) > n + 50, f"{rank} goes on")
    os.killpg(script.group, signal.SIGTERM)
    script.running.wait()


@pytest.mark.parametrize("which", ["front", "all"])
def test_killed_while_stopped_leaves_nothing(site: Site, which: str) -> None:
    script, ranks = start_script(site)
    script.stop(*ranks)
    if which == "front":
        os.kill(script.front(), signal.SIGKILL)
        site.assert_nothing_is_left()
    os.killpg(script.group, signal.SIGKILL)
    script.running.wait()


def test_a_launcher_stopped_by_force_goes_on(site: Site) -> None:
    """Its pipes fill, and nothing is lost."""
    running = site.start("-H", site.hosts(1, 1), *site.script("""
        print("up", flush=True)
        for i in range(50000): print(os.environ["RANK"], i)
        print("end")
    """))
    running.wait_until_up(2)
    os.killpg(running.pid(), signal.SIGSTOP)
    eventually(lambda: state(running.pid()) == "T", "it is stopped")
    os.killpg(running.pid(), signal.SIGCONT)
    assert running.wait() == 0, running.errors()
    running.out.thread.join(10)
    for rank in range(2):
        lines = [line for line in running.out.lines if line.startswith(f"[{rank}] ")]
        assert lines == [f"[{rank}] up", *(f"[{rank}] {rank} {i}" for i in range(50000)),
                         f"[{rank}] end"]


def agents(site: Site, i: int) -> list[int]:
    """gradrun --agent on node i, the front process first."""
    return sorted(pid for pid in site.nodes.processes(site.nodes.hosts[i])
                  if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"gradrun\0--agent\0"))


@pytest.mark.parametrize("which", ["front", "both"])
def test_a_killed_agent_ends_everything(site: Site, which: str) -> None:
    running = site.start("-H", site.hosts(1, 2), *site.script(WAIT))
    running.wait_until_up(3)
    pids = agents(site, 1)
    assert len(pids) == 2
    for pid in pids[:1] if which == "front" else pids:
        os.kill(pid, signal.SIGKILL)
    assert running.wait() != 0
    assert site.nodes.addresses[1] in running.errors(), running.errors()


def test_a_killed_ssh_ends_everything(site: Site) -> None:
    running = site.start("-H", site.hosts(1, 2), *site.script(WAIT))
    running.wait_until_up(3)
    target = f"\0{site.nodes.addresses[1]}\0".encode()
    for pid in site.nodes.processes(site.nodes.launcher):
        if target in Path(f"/proc/{pid}/cmdline").read_bytes() and \
                Path(f"/proc/{pid}/comm").read_text() == "ssh\n":
            os.kill(pid, signal.SIGKILL)
    assert running.wait() == 1
    text = running.errors()
    assert f"host {site.nodes.addresses[1]}: the connection to its agent ended" in text
    assert "ranks 1 to 2 are lost" in text, text


def test_the_key_is_seen_nowhere(site: Site) -> None:
    running = site.start("-H", site.hosts(1, 1), *site.script(WAIT))
    running.wait_until_up(2)
    digests = {m.group(1) for line in running.err.lines
               if (m := re.search(r"key ([0-9a-f]{64})$", line))}
    assert len(digests) == 1, running.err.lines
    for node in site.nodes.network.nodes:
        for pid in site.nodes.processes(node):
            for name in ("cmdline", "environ"):
                words = Path(f"/proc/{pid}/{name}").read_bytes()
                for found in re.findall(rb"[0-9a-fA-F]{64,}", words):
                    assert hashlib.sha256(found).hexdigest() not in digests, (pid, name)
    running.process.terminate()
    running.wait()


@pytest.mark.timing
@pytest.mark.limit(120)
def test_a_pulled_cable(world: World, tmp_path: Path) -> None:
    """A network of its own, since it does not heal."""
    nodes = SshHosts(2)
    try:
        site = Site(nodes, world, tmp_path)
        running = site.start("-H", site.hosts(1, 1), *site.script(WAIT))
        running.wait_until_up(2)
        nodes.hosts[1].link_down()
        assert running.wait(40) == 1
        assert f"host {nodes.addresses[1]}: " in running.errors()
        # The cut-off node hears nothing, and ends by itself.
        site.assert_nothing_is_left(60.0)
        site.close()
    finally:
        nodes.close()


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
