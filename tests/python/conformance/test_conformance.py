# SPDX-License-Identifier: Apache-2.0
"""Horovod's published torch suite, run through the shim, judges gradd.torch.

HOROVOD_SRC names a checkout of github.com/horovod/horovod (Apache-2.0; commit 2626dc8 was used);
nothing of it is part of this repository. Every test must pass on every rank, but for the ten that
need a GPU, MPI or an answer to Horovod's own issue 2496.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BUILD = Path(os.environ.get("GRADD_BUILD", ROOT / "build")).resolve()
PYTHON = os.environ.get("GRADD_TESTS_PYTHON", "/usr/bin/python3")
SOURCE = os.environ.get("HOROVOD_SRC", "")

SKIPPED = {
    "test_broadcast_state_gpu": "",
    "test_delta_optimizer": "Adasum requires MPI",
    "test_gpu_required": "No GPUs available",
    "test_horovod_allreduce_cpu_gpu_error": "No GPUs available",
    "test_horovod_allreduce_multi_gpu": "No GPUs available",
    "test_horovod_alltoall_splits_on_gpu": "No GPUs available",
    "test_horovod_grouped_allreduce_cpu_gpu_error": "No GPUs available",
    "test_horovod_sync_batch_norm": "No GPUs available",
    "test_model_parallelism": "No GPUs available",
    "test_timeline_api": "issues/2496",
}

pytestmark = pytest.mark.skipif(
    not SOURCE, reason="HOROVOD_SRC does not name a checkout of Horovod, whose suite is the judge")


def judge(n: int, suite: str, directory: Path) -> list[dict]:
    """Each rank's {outcomes, reasons} of one of Horovod's test files."""
    file = Path(SOURCE) / suite
    assert file.is_file(), f"HOROVOD_SRC={SOURCE}: there is no {suite} in it"
    env = {key: value for key, value in os.environ.items()
           if not key.startswith(("GRADD_", "HOROVOD_"))}
    env.update(GRADD_LIBRARY=str(BUILD / "client/lib/libgradd.so.0"), OMP_NUM_THREADS="1")
    ended = subprocess.run(
        [BUILD / "client/run/gradrun", "-np", str(n), "--private", "--timeout", "600", PYTHON,
         HERE / "suite.py", directory / "result", file], env=env, text=True, cwd=directory,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=630)
    results = []
    for rank in range(n):
        result = directory / f"result.{rank}"
        assert result.exists(), f"rank {rank} has no result:\n{ended.stdout[-4000:]}"
        results.append(json.loads(result.read_text()))
    return results


@pytest.mark.parametrize("n", [2, 4])
def test_horovods_suite(n: int, tmp_path: Path) -> None:
    for rank, result in enumerate(judge(n, "test/parallel/test_torch.py", tmp_path)):
        outcomes, reasons = result["outcomes"], result["reasons"]
        failed = {name: reasons.get(name) for name, how in outcomes.items() if how == "failed"}
        skipped = {name for name, how in outcomes.items() if how == "skipped"}
        assert not failed, f"rank {rank}: {failed}"
        assert skipped <= set(SKIPPED), f"rank {rank}: {skipped - set(SKIPPED)}: {reasons}"
        for name in skipped:
            assert SKIPPED[name] in reasons.get(name, ""), (name, reasons.get(name))
        assert len(outcomes) - len(skipped) >= 105, f"rank {rank}: {len(outcomes)} tests"


def test_horovods_elastic_suite(tmp_path: Path) -> None:
    outcomes = judge(1, "test/single/test_torch_elastic.py", tmp_path)[0]["outcomes"]
    assert outcomes == {"test_elastic_state": "passed", "test_elastic_sampler": "passed"}
