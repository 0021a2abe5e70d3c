# SPDX-License-Identifier: Apache-2.0
"""How gradrun reaches its hosts: what ssh_config says, keys, names, other remote shells; and what it
says when a host can not be reached, or has not what it needs.
"""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Callable, Iterator

import pytest

import netns
import ssh_hosts
from gradrun_site import Running, Site, expect_one_line, own_lines, own_ssh, rsh
from harness import GRADRUN, PYTHON, SLOW, eventually

REASON = ssh_hosts.why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "-")


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
