# SPDX-License-Identifier: Apache-2.0
"""Hosts that ssh can reach: nodes of netns.py with an sshd in each, and a place for the launcher.

Keys and known_hosts are made for the occasion; neither the user's nor the machine's are touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import netns
from harness import World

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin") or ""


def why_not() -> str | None:
    """Why there can be no such hosts here, or None."""
    if not SSHD or not shutil.which("ssh"):
        return "openssh-server and openssh-client are not installed"
    return netns.why_not()


class SshHosts:
    """n hosts, and the node from which a test launches. close() when done."""

    def __init__(self, n: int) -> None:
        self.network = netns.Network(n + 1)
        *self.hosts, self.launcher = self.network.nodes
        self.addresses = [host.address for host in self.hosts]
        self.world = World()  # the sshds serve several tests
        self.home = Path(tempfile.mkdtemp(prefix="ssh-hosts-"))
        try:
            self._make_keys()
            for host in self.hosts:
                self._start_sshd(host)
        except BaseException:
            self.close()
            raise

    def _make_keys(self) -> None:
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f",
                            str(self.home / name)], check=True)
        shutil.copy(self.home / "user_key.pub", self.home / "authorized_keys")
        self.known_hosts = self.home / "known_hosts"
        words = (self.home / "host_key.pub").read_text().split()[:2]
        self.known_hosts.write_text("".join(f"{a} {' '.join(words)}\n" for a in self.addresses))
        # First in PATH: an ssh that sees these files and none of the user's.
        self.bin = self.home / "bin"
        self.bin.mkdir()
        ssh = self.bin / "ssh"
        ssh.write_text(f"#!/bin/sh\nexec {shutil.which('ssh')} -F none -o IdentitiesOnly=yes "
                       f"-o UserKnownHostsFile={self.known_hosts} "
                       "-o GlobalKnownHostsFile=/dev/null \"$@\"\n")
        ssh.chmod(0o755)

    def _start_sshd(self, host: netns.Node) -> None:
        config = self.home / f"{host.name}.conf"
        config.write_text(
            f"ListenAddress {host.address}\nPort 22\nHostKey {self.home}/host_key\n"
            f"AuthorizedKeysFile {self.home}/authorized_keys\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            "PermitRootLogin prohibit-password\nPidFile none\nUseDNS no\nMaxStartups 100\n")
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it
        read, write = os.pipe()
        self.world.popen(host.prefix + [SSHD, "-D", "-e", "-f", str(config)],
                         stdin=subprocess.DEVNULL, stdout=write, stderr=write)
        os.close(write)
        with os.fdopen(read) as log:
            line = log.readline()
        assert "listening" in line, f"sshd: {line}"

    @staticmethod
    def processes(node: netns.Node) -> list[int]:
        """What runs on a node, but for sshd and its sessions."""
        pids = []
        for pid in node.pids():
            try:
                if Path(f"/proc/{pid}/comm").read_text() != "sshd\n":
                    pids.append(pid)
            except OSError:
                pass  # it has ended
        return pids

    def close(self) -> None:
        self.network.close()
        self.world.close(is_failed=True)
        shutil.rmtree(self.home, ignore_errors=True)
