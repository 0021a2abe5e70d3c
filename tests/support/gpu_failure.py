# SPDX-License-Identifier: Apache-2.0
"""Jobs on the fake GPUs in which something fails: what every rank is told, and that all is well
afterwards."""

from __future__ import annotations

import os
import re
import time
from typing import Any, Iterable

import pytest

import gradd_ctypes as api
from gpu import FAKES, Gpus
from harness import SLOW, Daemon, Trainer, World, client_environment, settle

needs_fakes = pytest.mark.skipif(
    not ((FAKES / "libcuda.so.1").exists() and (FAKES / "libnccl.so.2").exists()),
    reason=f"{FAKES}/libcuda.so.1 or libnccl.so.2 is not built")

N = 5000
SEED = int(os.environ.get("GRADD_TEST_SEED") or time.time_ns() % 1000000)
NODE = "gpunode"
ORDERS = ["event", "flag"]
GPU = r"GPU-fa4efa4e-0000-4000-8000-00000000000\d"
WHERE = (r"\bepoch 1\b", rf"\bnode {NODE}\b")
_FAKE_SPOKE = re.compile(r"^fake lib(cuda|nccl): .*$", re.MULTILINE)


class Node(Gpus):
    """Gpus whose end is looked at: no rule of the libraries was broken, nothing is left."""

    def __init__(self, world: World, nccl: dict[str, Any] | None = None, **cuda: Any) -> None:
        super().__init__(world, **cuda)
        self.environment |= {f"GRADD_FAKE_NCCL_{key}": str(v) for key, v in (nccl or {}).items()}

    def inject(self, items: str) -> None:
        """Errors of the driver from now on, in all processes."""
        with open(os.path.join(self.dir, "fail"), "r+b") as file:
            file.write(items.encode().ljust(1024, b"\0"))

    def node(self, **settings: Any) -> Daemon:
        return self.daemon(**{"node_name": NODE, "backend": "nccl", "job_linger_s": 0.5 * SLOW,
                              **settings})

    def _remove(self) -> list[str]:
        problems = []
        for source in [t.errors for t in self.world.trainers] + [d.log for d in self.world.daemons]:
            problems += [match.group() for match in _FAKE_SPOKE.finditer(source.text())]
        problems += self.left()
        return problems + super()._remove()

    def left(self) -> list[str]:
        """Files of memory, events and meetings of processes that are gone, after the next start."""
        sweeper = self.world.popen(
            ["/usr/bin/python3", "-c", "import ctypes; assert ctypes.CDLL('libcuda.so.1').cuInit(0)"
             " == 0"], env={**client_environment(), **self.environment})
        sweeper.wait(20)
        # A meeting of NCCL's ranks to which not all have come keeps its file.
        known = re.compile(r"counts\.\d+|lock|fail|exclusive\d+|gradd-fake-nccl\.\w+")
        return [f"left in {self.dir}: {name}" for name in os.listdir(self.dir)
                if not known.fullmatch(name)]


def join(world: World, node: Node, daemon: Daemon, devices: Iterable[int],
         job: str = "job", is_on: bool = True) -> list[Trainer]:
    trainers = [node.trainer(daemon, device) for device in devices]
    for answer in world.join(trainers, job):
        assert answer["status"] == 0, answer
    for trainer in trainers:
        path = trainer.call("device_path")
        assert path["is_on"] == is_on, path
        trainer.call("new_stream", key="s")
    expect_ok(settle(trainers, "tensor", key="a", count=N))
    return trainers


def renew(trainer: Trainer, **tensor: Any) -> None:
    """A stream and memory, for a trainer that is new or whose stream waits for ever."""
    trainer.call("new_stream", key="s")
    trainer.call("tensor", key="a", count=N, **tensor)


def expect_ok(answers: list[dict[str, Any]]) -> None:
    assert [a["status"] for a in answers] == [0] * len(answers), answers


def try_submit(trainers: list[Trainer], name: str = "x") -> list[dict[str, Any]]:
    """One all-reduce of each one's memory; what each was answered."""
    return settle(trainers, "submit_device", handle=name, stream="s", ops=[
        {"kind": api.ALLREDUCE, "name": name, "redop": api.SUM, "in": "a", "out": "a", "count": N}])


def submit(trainers: list[Trainer], name: str = "x") -> None:
    expect_ok(try_submit(trainers, name))


def write_all(trainers: list[Trainer], **more: Any) -> None:
    for rank, trainer in enumerate(trainers):
        trainer.call("write", key="a", rank=rank, stream="s", **more)


def sums_are_right(trainers: list[Trainer], n: int = 1) -> None:
    for rank, trainer in enumerate(trainers):
        trainer.send("device_steps", n=n, key="a", rank=rank, size=len(trainers), stream="s")
    for trainer in trainers:
        answer = trainer.reply()
        assert (answer["done"], answer.get("n_right")) == (n, n), answer


def failures(trainers: list[Trainer], name: str = "x", since: float = 0.0,
             within_s: float = 2.0) -> list[str]:
    """What every rank is told of the op, in time."""
    answers = settle(trainers, "wait", handle=name, timeout_s=20.0 * SLOW)
    for answer in answers:
        assert answer["status"] < 0, answer
        if since:
            assert answer["at"] - since < within_s * SLOW, answer
    return [answer["error"] for answer in answers]


def expect_told(texts: list[str], *words: str, job: str = "job") -> None:
    for text in texts:
        for word in (rf"\bjob {job}\b", *words):
            assert re.search(word, text), (word, text)


def again(world: World, trainers: list[Trainer], job: str = "job", n: int = 1,
          epoch: int = 2) -> None:
    """All leave and join the next epoch, whose sums on the device are right."""
    settle(trainers, "shutdown")
    answers = world.join(trainers, job)
    expect_ok(answers)
    assert {a["epoch"] for a in answers} == {epoch}, answers
    assert [p["is_on"] for p in settle(trainers, "device_path")] == [1] * len(trainers)
    sums_are_right(trainers, n)
