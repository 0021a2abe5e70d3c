# SPDX-License-Identifier: Apache-2.0
"""Several jobs on the same GPUs: at once, and while anything happens to them."""

from __future__ import annotations

import os
import re
import signal
import time
from random import Random

import pytest

from gpu_failure import Node, ORDERS, SEED, join, needs_fakes, renew
from harness import SLOW, Daemon, Trainer, World

pytestmark = needs_fakes


def test_two_jobs_on_the_same_gpus_at_once(world: World) -> None:
    node = Node(world, DELAY_US=200, SEED=9)
    daemon = node.node()
    jobs = [join(world, node, daemon, devices, f"job{i}")
            for i, devices in enumerate(([0, 1], [1, 0], [0, 0]))]
    for trainers in jobs:
        for rank, trainer in enumerate(trainers):
            trainer.send("device_steps", n=30, key="a", rank=rank, size=2, stream="s")
    answers = [trainer.reply() for trainers in jobs for trainer in trainers]
    assert [(a["done"], a.get("n_right")) for a in answers] == [(30, 30)] * 6, answers


CHAOS_S = float(os.environ.get("GRADD_TEST_CHAOS_S") or 15.0)
INJECTED = ["cuEventQuery:1+:700", "cuLaunchKernel:1+:719", "cuStreamWaitEvent:1+:700",
            "cuIpcOpenMemHandle:*:201", "cuMemAlloc:*:2", "cuEventRecord:1+:999",
            "cuStreamWriteValue64:1+:1", "cuMemcpyDtoDAsync:1+:719",
            "cuDevicePrimaryCtxRetain:*:2", "cuMemImportFromShareableHandle:*:1"]


class Chaos:
    """One job that takes steps for ever; whatever happens to it, it joins again."""

    def __init__(self, world: World, node: Node, daemon: Daemon, job: str,
                 devices: list[int]) -> None:
        self.world, self.node, self.daemon, self.job = world, node, daemon, job
        self.devices = devices
        self.trainers = [self.spawn(rank) for rank in range(len(devices))]
        self.n_epochs = self.n_steps = self.n_told = 0

    def spawn(self, rank: int) -> Trainer:
        trainer = self.node.trainer(self.daemon, self.devices[rank])
        renew(trainer)
        return trainer

    def begin(self) -> None:
        for rank, trainer in enumerate(self.trainers):
            if trainer.process.poll() is not None:
                self.trainers[rank] = self.spawn(rank)
        for trainer in self.trainers:
            trainer.call("shutdown_all")
            renew(trainer)  # what its old stream waits for stays behind
        for rank, trainer in enumerate(self.trainers):
            trainer.send("init", **trainer.init_arguments(rank, len(self.trainers), self.job))
        expect_told_or_ok = [trainer.reply(30 * SLOW) for trainer in self.trainers]
        for answer in expect_told_or_ok:
            assert answer["status"] == 0 or answer["error"], answer
        self.n_epochs += all(a["status"] == 0 for a in expect_told_or_ok)

    def steps(self, n: int) -> None:
        for rank, trainer in enumerate(self.trainers):
            trainer.send("device_steps", n=n, key="a", rank=rank, size=len(self.trainers),
                         stream="s")

    def collect(self, n: int) -> None:
        """Sums are right, or the step failed in words; nothing else."""
        for trainer in self.trainers:
            try:
                answer = trainer.reply(30 * SLOW)
            except AssertionError:
                assert trainer.process.poll() is not None, "a trainer hangs"
                trainer.is_done = True
                continue
            if answer["status"] == 0:
                assert answer["n_right"] == n, answer
                self.n_steps += n
            else:
                assert answer["error"] and re.search(r"\bjob\b|GPU|CUDA", answer["error"]), answer
                self.n_told += 1


def strike(random: Random, node: Node, daemon: Daemon, jobs: list[Chaos]) -> str:
    victim = random.choice(random.choice(jobs).trainers)
    what = random.choice(["trainer", "worker", "stop trainer", "stop worker", "inject", "nothing"])
    workers = daemon.worker_pids()
    if what == "trainer":
        victim.process.kill()
        victim.process.wait(20)
    elif what == "worker" and workers:
        os.kill(random.choice(workers), signal.SIGKILL)
    elif what.startswith("stop"):
        pid = victim.pid if what == "stop trainer" else random.choice(workers or [victim.pid])
        os.kill(pid, signal.SIGSTOP)
        time.sleep(random.random() * 0.2)
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass
    elif what == "inject":
        what = "gradd-worker/" + random.choice(INJECTED)
        node.inject(what)
        time.sleep(random.random() * 0.1)
        node.inject("")
    return what


@pytest.mark.limit(120)
@pytest.mark.parametrize("order", ORDERS)
def test_chaos(world: World, order: str) -> None:
    """Random kills, stops and errors on two jobs that share GPUs: never a wrong sum, never a rank
    that is told nothing, and at the end all is well. GRADD_TEST_SEED repeats the choices."""
    print(f"GRADD_TEST_SEED={SEED}")
    random = Random(SEED)
    node = Node(world, DELAY_US=300, SEED=SEED, DEAD="complete")
    daemon = node.node(order=order, op_timeout_s=3)
    jobs = [Chaos(world, node, daemon, "one", [0, 0]), Chaos(world, node, daemon, "two", [0, 1, 0])]
    until = time.monotonic() + CHAOS_S / len(ORDERS)
    while time.monotonic() < until:
        for job in jobs:
            job.begin()
        for job in jobs:
            job.steps(12)
        time.sleep(random.random() * 0.03)
        print(strike(random, node, daemon, jobs))
        for job in jobs:
            job.collect(12)
    node.inject("")
    for job in jobs:
        job.begin()
        job.steps(5)
        before = job.n_steps
        job.collect(5)
        assert job.n_steps - before == 5 * len(job.trainers), "the last steps"
        print(job.job, job.n_epochs, "epochs", job.n_steps, "right steps", job.n_told, "told")
        assert job.n_epochs > 1 and job.n_steps > 0
