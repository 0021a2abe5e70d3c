# SPDX-License-Identifier: Apache-2.0
"""Random faults on the nodes of a running job, one after the other: every rank has right sums or an
error, all agree on whether the epoch has failed, the next epoch comes about, and nothing is left.

Everything that is chosen comes from the seed; when exactly a fault strikes is the machine's choice.
"""

from __future__ import annotations

import random
import signal
import time
from typing import Any, Iterable

from cluster import DEAD_S, JOB, Cluster, Member, replace_dead, trainers_of
from faults import FAULTS, Fault
from gradd_ctypes import STATUS
from harness import REPLY_S, SLOW, settle

LAYOUT = (2, 1, 1)
LOSSES = (STATUS["RANK_LOST"], STATUS["UNAVAILABLE"])
JOINS_MAX = 5  # attempts, once all is well again


class TrainersStopped(Fault):
    """The node's daemon and worker go on: its ranks are late, not lost."""

    stops_trainers = True

    def inject(self) -> None:
        for member in self.here:
            if member.trainer.process.poll() is None:
                member.trainer.process.send_signal(signal.SIGSTOP)

    def heal(self) -> None:
        for member in self.here:
            if member.trainer.process.poll() is None:
                member.trainer.process.send_signal(signal.SIGCONT)


class Partitioned(Fault):
    """The node alone on a bridge of its own."""

    def inject(self) -> None:
        self.cluster.network.partition(self.cluster.nodes[self.node])

    def heal(self) -> None:
        self.cluster.network.heal()


KINDS = [*FAULTS, TrainersStopped, Partitioned]


class Chaos:
    """One job under random faults. Call round() as often as there is time for."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.members = cluster.members(LAYOUT)
        self.n_rounds = self.n_right = self.n_failed_epochs = self.n_refused_joins = 0
        self.epoch = self.join([])

    # ------------------------------------------------------------ a round

    def round(self) -> str:
        """Ops, faults meanwhile, and what comes of it; @return a line about it."""
        self.n_rounds += 1
        faults = self.choose_faults()
        submitted = self.launch(self.random.random() < 0.3)
        pause(self.random.uniform(0, 0.05))
        struck = self.strike(faults)
        pause(self.random.choice((0.05, 0.3, 1.5)) * DEAD_S)
        self.heal(faults)
        has_failed = self.finish(submitted)
        before = self.epoch
        if has_failed:
            self.n_failed_epochs += 1
            replace_dead(self.cluster, self.members)
            self.cluster.expect_nothing_left()
            self.epoch = self.join(self.choose_faults() if self.random.random() < 0.3 else [])
        return (f"round {self.n_rounds}, epoch {before}: {', '.join(struck) or 'nothing'}: "
                f"{'failed' if has_failed else 'goes on'}")

    def choose_faults(self) -> list[Fault]:
        """One node, or two different ones."""
        nodes = self.random.sample(range(len(LAYOUT)), self.random.choice((1, 1, 1, 2)))
        return [self.random.choice(KINDS)(self.cluster, node, self.members) for node in nodes]

    def strike(self, faults: Iterable[Fault]) -> list[str]:
        """@return what happened, where."""
        struck = []
        for fault in faults:
            try:
                fault.inject()
                fault.is_injected = True
                struck.append(f"{type(fault).__name__} on node{fault.node}")
            except (AssertionError, ProcessLookupError, IndexError):
                fault.is_injected = False  # there is no worker just now
        return struck

    def heal(self, faults: Iterable[Fault]) -> None:
        self.cluster.network.heal()
        for fault in faults:
            if fault.is_injected:
                fault.heal()

    # ------------------------------------------------------------ ops

    def launch(self, is_partly: bool) -> list[Member]:
        """All ranks submit the same ops, or some do not yet. @return those that have."""
        self.tag = f"round{self.n_rounds}"
        self.work = {"tag": self.tag, "n": self.random.choice((1, 3, 40)),
                     "count": self.random.choice((1, 5000, 1 << 20)),
                     "registered": self.random.random() < 0.5}
        if self.work["count"] > 5000:
            self.work["n"] = 3
        if self.random.random() < 0.3:
            for node in self.cluster.nodes:
                node.cap(200)
        absent = self.random.choice(self.members) if is_partly else None
        submitted = [m for m in self.members if m is not absent]
        for result in settle(trainers_of(submitted), "launch", **self.work):
            expect_right_or_lost(result)  # the round before may have had a late effect
        return submitted

    def alive(self) -> list[Member]:
        return [m for m in self.members if m.trainer.process.poll() is None]

    def finish(self, submitted: list[Member]) -> bool:
        """Every rank hears how its ops ended. @return the epoch has failed."""
        alive = self.alive()
        late = [m for m in alive if m not in submitted]
        for result in settle(trainers_of(late), "launch", **self.work):
            expect_right_or_lost(result)
        for result in self.collect(alive):
            expect_right_or_lost(result)
            self.n_right += result["n_right"]
        # Of a barrier that the failure struck, a rank may have the good end: not of the next one.
        for _ in range(2):
            results = settle(trainers_of(alive), "barrier")
            for result in results:
                expect_right_or_lost(result)
            n_lost = sum(r["status"] != 0 for r in results)
            if n_lost in (0, len(results)):
                break
        assert n_lost in (0, len(results)), results
        assert n_lost or len(alive) == len(self.members), "a dead rank took part in a barrier"
        return n_lost > 0

    def collect(self, members: list[Member]) -> list[dict[str, Any]]:
        for member in members:
            member.trainer.send("collect", tag=self.tag)
        deadline = time.monotonic() + DEAD_S + REPLY_S
        return [m.trainer.reply(max(1.0, deadline - time.monotonic())) for m in members]

    # ------------------------------------------------------------ the next epoch

    def join(self, faults: list[Fault]) -> int:
        """Until all are in one epoch; the faults strike the first attempt. @return its number."""
        for attempt in range(JOINS_MAX):
            self.cluster.send_join(self.members, timeout_s=10.0 * SLOW)
            if attempt == 0 and faults:
                pause(self.random.uniform(0, 0.05))
                self.strike(faults)
                pause(self.random.choice((0.05, 0.3, 1.5)) * DEAD_S)
                self.heal(faults)
            results = [m.trainer.reply() for m in self.alive()]
            for result in results:
                assert result["status"] in (0, *LOSSES, STATUS["TIMEOUT"]), result
                assert result["status"] == 0 or JOB in result["error"], result
            epochs = {r["epoch"] for r in results if r["status"] == 0}
            if len(results) == len(self.members) and all(r["status"] == 0 for r in results) and \
                    len(epochs) == 1:
                return epochs.pop()
            self.n_refused_joins += 1
            replace_dead(self.cluster, self.members)
        raise AssertionError(f"no epoch came about in {JOINS_MAX} attempts: {results}")


def expect_right_or_lost(result: dict[str, Any]) -> None:
    assert result.get("n_wrong", 0) == 0, result
    if result["status"] != 0:
        assert result["status"] in LOSSES, result
        assert JOB in result["error"], result


def pause(seconds: float) -> None:
    """The faults last; nothing is waited for."""
    time.sleep(seconds)


def is_enough(chaos: Chaos, passed_s: float, seconds: float) -> bool:
    """Where everything is slow a round takes a minute: some must end in each way all the same."""
    has_both = chaos.n_failed_epochs > 0 and chaos.n_right > 0
    return passed_s > (seconds if has_both else 4 * seconds)


def run(cluster: Cluster, seed: int, seconds: float) -> Chaos:
    """Rounds for so long, said as they come; then all leave and nothing is left."""
    print(f"GRADD_TEST_SEED={seed}", flush=True)
    begin = time.monotonic()
    chaos = Chaos(cluster, seed)
    while not is_enough(chaos, time.monotonic() - begin, seconds):
        print(chaos.round(), flush=True)
    settle(trainers_of(chaos.members), "shutdown_all")
    cluster.expect_nothing_left()
    print(f"{chaos.n_rounds} rounds, {chaos.n_failed_epochs} failed epochs, "
          f"{chaos.n_refused_joins} refused joins, {chaos.n_right} right sums", flush=True)
    return chaos
