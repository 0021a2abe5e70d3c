# SPDX-License-Identifier: Apache-2.0
"""What may happen to one node of a cluster, and what an operator does about it afterwards."""

from __future__ import annotations

import os
import signal

from cluster import Cluster, Member, cont, stop
from harness import wait_for_exit


class Fault:
    """Something that happens to a node. Its methods come in this order."""

    kills_trainers = False  # all of the node
    stops_trainers = False  # all of the node, until heal()
    words: tuple[str, ...] = ()  # what the others are told, besides the node's name

    def __init__(self, cluster: Cluster, node: int, members: list[Member]) -> None:
        self.cluster, self.node, self.members = cluster, node, members

    def inject(self) -> None:
        raise NotImplementedError

    def heal(self) -> None:
        """What an operator would do: the node is as before."""

    @property
    def here(self) -> list[Member]:
        return [m for m in self.members if m.node == self.node]


class TrainerKilled(Fault):
    words = (r"\bkilled\b",)

    def inject(self) -> None:
        self.victim = self.here[-1]
        rank = self.members.index(self.victim)
        self.words = (rf"\brank {rank}\b", rf"\b{self.victim.trainer.pid}\b")
        self.victim.trainer.kill()


class WorkerKilled(Fault):
    words = (r"\bworker\b",)

    def inject(self) -> None:
        os.kill(self.cluster.worker_pid(self.node), signal.SIGKILL)


class WorkerStopped(Fault):
    def inject(self) -> None:
        self.pid = self.cluster.worker_pid(self.node)
        stop(self.pid)

    def heal(self) -> None:
        cont(self.pid)


class DaemonKilled(Fault):
    def inject(self) -> None:
        self.cluster.daemons[self.node].process.kill()

    def heal(self) -> None:
        self.cluster.restart_daemon(self.node)


class DaemonStopped(Fault):
    def inject(self) -> None:
        stop(self.cluster.daemons[self.node].pid)

    def heal(self) -> None:
        cont(self.cluster.daemons[self.node].pid)


class NodeKilled(Fault):
    """As by a power failure: nothing says goodbye, then all of it is gone."""

    kills_trainers = True

    def inject(self) -> None:
        node = self.cluster.nodes[self.node]
        node.link_down()
        for pid in node.signal(signal.SIGKILL):
            wait_for_exit(pid)

    def heal(self) -> None:
        self.cluster.network.heal()
        self.cluster.restart_daemon(self.node)


class NodeStopped(Fault):
    stops_trainers = True

    def inject(self) -> None:
        self.cluster.nodes[self.node].signal(signal.SIGSTOP)

    def heal(self) -> None:
        self.cluster.nodes[self.node].signal(signal.SIGCONT)


class Cut(Fault):
    def heal(self) -> None:
        self.cluster.network.heal()


class SendsNothing(Cut):
    def inject(self) -> None:
        self.cluster.nodes[self.node].drop_sent()


class ReceivesNothing(Cut):
    def inject(self) -> None:
        self.cluster.nodes[self.node].drop_received()


class CablePulled(Cut):
    def inject(self) -> None:
        self.cluster.nodes[self.node].link_down()


FAULTS = [TrainerKilled, WorkerKilled, WorkerStopped, DaemonKilled, DaemonStopped, NodeKilled,
          NodeStopped, SendsNothing, ReceivesNothing, CablePulled]
