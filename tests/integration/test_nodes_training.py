# SPDX-License-Identifier: Apache-2.0
"""Training over nodes that loses a rank, a worker and a whole node, and ends with the weights that
an undisturbed run has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Callable

import pytest

from cluster import Cluster, expect_told, replace_dead, trainers_of
from faults import NodeKilled, TrainerKilled, WorkerKilled
from harness import eventually

STEPS = 1 << 30  # more than there is time for, until the last kill is over
LAYOUT = (2, 1, 1)


def step_of(path: Path) -> int:
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0


@pytest.mark.limit(120)
def test_three_kills_do_not_change_the_weights(make_cluster: Callable[..., Cluster],
                                               tmp_path: Path) -> None:
    cluster = make_cluster(3)
    members = cluster.job(LAYOUT)
    progress = [tmp_path / f"rank{rank}" for rank in range(len(members))]

    def train(steps: int) -> None:
        for rank, member in enumerate(members):
            member.trainer.send("train", steps=steps, count=1000, progress=str(progress[rank]))

    done = 0
    for kill, node in ((TrainerKilled, 1), (WorkerKilled, 0), (NodeKilled, 2)):
        train(STEPS)
        eventually(lambda: step_of(progress[0]) >= done + 20, "20 steps more")
        since = time.time()
        fault = kill(cluster, node, members)
        fault.inject()
        results = [m.trainer.reply() for m in members if m.trainer.process.poll() is None]
        expect_told(results, since, fault.words)
        assert all(r["is_right"] for r in results), results
        # The op that the kill struck may have come through on some.
        assert max(r["step"] for r in results) - min(r["step"] for r in results) <= 1, results
        done = max(r["step"] for r in results)
        fault.heal()
        replace_dead(cluster, members)
        cluster.join(members)
    train(done + 20)
    results = [m.trainer.reply() for m in members]
    assert [(r["status"], r["step"], r["is_right"]) for r in results] == \
        [(0, done + 20, True)] * len(members), results
