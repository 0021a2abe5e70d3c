# SPDX-License-Identifier: Apache-2.0
"""Where gradrun runs over several hosts: SshHosts, a directory for what it leaves, a stand-in daemon.

Site and Running are for the fixtures `ssh_nodes` and `site`. fake_gradd.py keeps the contract between
gradrun and a private daemon; launching is all that matters there.
"""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

from harness import (
    GRADRUN, PYTHON, REPLY_S, ROOT, SLOW, LineReader, World, client_environment, eventually,
    no_randomisation,
)
from ssh_hosts import SshHosts

FAKE = ROOT / "tests/unit/run/fake_gradd.py"
WAIT = 'print("up"); signal.pause()'


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


def own_lines(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What gradrun itself said, without the daemons' logs."""
    return [line for line in result.stderr.splitlines() if line.startswith("gradrun: ")]


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


def rsh(site: Site, body: str) -> str:
    path = site.tmp_path / "rsh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)
