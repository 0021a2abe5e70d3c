# SPDX-License-Identifier: Apache-2.0
"""Network namespaces as nodes: each has an interface on one bridge, whose cables a test cuts, caps
and moves.

The bridge lives in a namespace of its own, so that nothing of the machine's own network changes and
every network may use the same addresses. Names carry the pid of the test run: networks that a killed
run has left behind are removed by the next one. Needs root and iproute2; why_not() says what is
missing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from typing import Any, Iterator

PREFIX = "gradd-"
NAME = re.compile(r"^gradd-(\d+)-(\d+)-(hub|n\d+)$")
NETNS_DIR = "/run/netns"
RULE = "7000"  # of block_connections(): before the tables of routes
CLONE_NEWNET = 0x40000000
_numbers = itertools.count()
_reason: str | None = None
_is_probed = False


class NodesError(Exception):
    """A command of iproute2 failed."""


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise NodesError(f"{' '.join(command)}: exit {result.returncode}: {result.stderr.strip()}")
    return result.stdout


def _set_namespace(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _names() -> list[str]:
    try:
        return [name for name in os.listdir(NETNS_DIR) if NAME.match(name)]
    except FileNotFoundError:
        return []


def _pids_in(name: str) -> list[int]:
    """Processes whose network is this namespace."""
    try:
        inode = os.stat(os.path.join(NETNS_DIR, name)).st_ino
    except FileNotFoundError:
        return []
    pids = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.stat(f"/proc/{entry}/ns/net").st_ino == inode:
                pids.append(int(entry))
        except OSError:
            pass  # it has ended
    return pids


def tcp_ports(pid: int) -> list[tuple[int, int]]:
    """The ports, here and there, of the process's TCP connections."""
    sockets = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        match = re.match(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{fd}"))
        if match:
            sockets.add(match.group(1))
    rows = []
    for family in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{family}") as file:
            rows += [line.split() for line in file][1:]
    return [(int(row[1].split(":")[1], 16), int(row[2].split(":")[1], 16))
            for row in rows if row[9] in sockets]


def _remove(name: str) -> None:
    for _ in range(50):
        pids = _pids_in(name)
        if not pids:
            break
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)


def remove_leftovers() -> None:
    """Networks whose test run lives no more."""
    for name in _names():
        match = NAME.match(name)
        if match and not os.path.exists(f"/proc/{match.group(1)}"):
            _remove(name)


def _probe() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "bridge", "nsenter"):
        if not shutil.which(program):
            return f"{program} (iproute2, util-linux) is not installed"
    remove_leftovers()
    try:
        with Network(1) as network:
            network.nodes[0].cap(1000)
    except NodesError as error:
        return f"no network namespaces with a bridge and tbf here: {error}"
    return None


def why_not() -> str | None:
    """Why there can be no nodes here, or None."""
    global _reason, _is_probed
    if not _is_probed:
        _reason, _is_probed = _probe(), True
    return _reason


class Node:
    """One namespace. Its cable is a veth pair: eth0 here, `port` on the hub."""

    def __init__(self, network: "Network", index: int) -> None:
        self.network = network
        self.index = index
        self.name = f"node{index}"
        self.namespace = f"{network.tag}-n{index}"
        self.address = f"10.77.0.{index + 1}"
        self.port = f"p{index}"
        self.n_rules = 0  # of block_connections()

    @property
    def prefix(self) -> list[str]:
        """Put before a command: it then runs on this node, under the same pid."""
        return ["nsenter", f"--net={NETNS_DIR}/{self.namespace}", "--"]

    def popen(self, command: list[str], **how: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(self.prefix + command, **how)

    def run(self, *command: str) -> str:
        return _run(*self.prefix, *command)

    def pids(self) -> list[int]:
        return _pids_in(self.namespace)

    def signal(self, number: int) -> list[int]:
        """To every process of the node; their pids."""
        pids = self.pids()
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        return pids

    # ------------------------------------------------------------ the cable

    def cap(self, mbit: float) -> None:
        """So many Mbit/s each way, as a port of that speed would have."""
        self._cap(mbit, self._ends())

    @staticmethod
    def _cap(mbit: float, ends: list[tuple[str, str]]) -> None:
        # A burst holds what the kernel's timer lets pass between two ticks, and one large packet.
        burst = max(65536, int(mbit * 1e6 / 8 / 250))
        for namespace, device in ends:
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf",
                 "rate", f"{int(mbit * 1000)}kbit", "burst", str(burst), "latency", "50ms")

    def cap_sent(self, mbit: float) -> None:
        """Only what the node sends."""
        self._cap(mbit, self._ends()[:1])

    def drop_sent(self) -> None:
        """What the node sends is lost; what others send to it arrives."""
        self._drop(*self._ends()[0])

    def drop_received(self) -> None:
        """What others send to the node is lost."""
        self._drop(*self._ends()[1])

    def uncap(self) -> None:
        """Ends cap() and drop_...()."""
        for namespace, device in self._ends():
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"],
                           capture_output=True)

    def link_down(self) -> None:
        """The cable is pulled at the hub: no carrier, both ways dead."""
        _run("ip", "-n", self.network.hub, "link", "set", self.port, "down")

    def link_up(self) -> None:
        _run("ip", "-n", self.network.hub, "link", "set", self.port, "up")

    def move_to(self, bridge: int) -> None:
        """Nodes on different bridges (0, 1) cannot reach each other: a partition."""
        _run("ip", "-n", self.network.hub, "link", "set", self.port, "master", f"br{bridge}")

    def block(self, other: "Node") -> None:
        """These two do not hear each other; all others hear both."""
        for one, two in ((self, other), (other, self)):
            _run("ip", "-n", one.namespace, "route", "replace", "blackhole", two.address + "/32")

    def unblock(self, other: "Node") -> None:
        for one, two in ((self, other), (other, self)):
            _run("ip", "-n", one.namespace, "route", "del", "blackhole", two.address + "/32")

    def block_connections(self, pid: int, other: "Node") -> None:
        """As a firewall may: what the process, which is on this node, sends to the other node over
        the connections that it has now is lost. Other processes' pass."""
        for port, peer_port in tcp_ports(pid):
            self.run("ip", "rule", "add", "pref", RULE, "ipproto", "tcp", "sport", str(port),
                     "dport", str(peer_port), "to", other.address, "blackhole")
            self.n_rules += 1

    def unblock_connections(self) -> None:
        for _ in range(self.n_rules):
            self.run("ip", "rule", "del", "pref", RULE)
        self.n_rules = 0

    def connect(self, address: str, port: int, timeout_s: float = 20.0) -> socket.socket:
        """A TCP connection of this process that comes from the node."""
        with self._entered():
            return socket.create_connection((address, port), timeout_s)

    def sniffer(self) -> socket.socket:
        """Every packet of eth0, from its Ethernet header on."""
        with self._entered():
            sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            sniffer.bind(("eth0", 0))
            return sniffer

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """This thread is on the node; its sockets stay there."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(f"{NETNS_DIR}/{self.namespace}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _set_namespace(there)
            yield
        finally:
            _set_namespace(home)
            os.close(there)
            os.close(home)

    def _ends(self) -> list[tuple[str, str]]:
        return [(self.namespace, "eth0"), (self.network.hub, self.port)]

    @staticmethod
    def _drop(namespace: str, device: str) -> None:
        # No packet fits into a bucket of ten bytes.
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf",
             "rate", "8bit", "burst", "10b", "limit", "10b")

    def sent_bytes(self, pid: int) -> int:
        """Sent over eth0 so far; pid is any process of the node."""
        with open(f"/proc/{pid}/net/dev") as file:
            for line in file:
                name, _, numbers = line.partition(":")
                if name.strip() == "eth0":
                    return int(numbers.split()[8])
        return 0


class Network:
    """n nodes on a bridge. A context manager; also removed at the end of the interpreter."""

    def __init__(self, n: int) -> None:
        self.tag = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        self.hub = self.tag + "-hub"
        self.nodes = [Node(self, i) for i in range(n)]
        atexit.register(self.close)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _run("ip", "netns", "add", self.hub)
        for bridge in ("br0", "br1"):
            _run("ip", "-n", self.hub, "link", "add", bridge, "type", "bridge")
            _run("ip", "-n", self.hub, "link", "set", bridge, "up")
        for node in self.nodes:
            _run("ip", "netns", "add", node.namespace)
            _run("ip", "-n", node.namespace, "link", "set", "lo", "up")
            _run("ip", "-n", self.hub, "link", "add", node.port, "type", "veth", "peer", "name",
                 "eth0", "netns", node.namespace)
            _run("ip", "-n", self.hub, "link", "set", node.port, "master", "br0", "up")
            _run("ip", "-n", node.namespace, "addr", "add", node.address + "/24", "dev", "eth0")
            _run("ip", "-n", node.namespace, "link", "set", "eth0", "up")

    def heal(self) -> None:
        """All cables whole, at full speed, on one bridge."""
        for node in self.nodes:
            node.uncap()
            node.unblock_connections()
            node.link_up()
            node.move_to(0)

    def partition(self, *others: Node) -> None:
        """These nodes on one side, the rest on the other."""
        for node in others:
            node.move_to(1)

    def close(self) -> None:
        atexit.unregister(self.close)
        for name in [node.namespace for node in self.nodes] + [self.hub]:
            if os.path.exists(os.path.join(NETNS_DIR, name)):
                _remove(name)

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
