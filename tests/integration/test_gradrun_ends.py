# SPDX-License-Identifier: Apache-2.0
"""How a gradrun over several hosts ends, or is stopped: whatever dies, nothing is left on any host."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

import ssh_hosts
from gradrun_site import WAIT, Running, Site
from harness import REPLY_S, SLOW, World, eventually
from ssh_hosts import SshHosts

REASON = ssh_hosts.why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "-")


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
