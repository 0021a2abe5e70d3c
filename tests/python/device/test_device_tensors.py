# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors in the torch modules, by stand-ins on the fake driver: see programs/standin.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("GRADD_BUILD", ROOT / "build")).resolve()
FAKES = BUILD / "tests/fakes"
PROGRAM = Path(__file__).resolve().parent / "programs/tensors.py"
PYTHON = os.environ.get("GRADD_TESTS_PYTHON", "/usr/bin/python3")
CHECKS = re.findall(r"^def (check_\w+)", PROGRAM.read_text(), re.MULTILINE)
PATHS = {"host": "staged", "nccl": "shared"}

pytestmark = pytest.mark.skipif(not (FAKES / "libcuda.so.1").exists(),
                                reason=f"{FAKES}/libcuda.so.1 is not built")


@pytest.fixture(scope="module", params=list(PATHS))
def run(request: Any, tmp_path_factory: Any) -> tuple[str, list[dict[str, str]], str]:
    """All checks on two ranks: what the path should be, each rank's results, what was said."""
    directory = tmp_path_factory.mktemp("device")
    env = {key: value for key, value in os.environ.items() if not key.startswith("GRADD_")}
    env.update(GRADD_LIBRARY=str(BUILD / "client/lib/libgradd.so.0"), OMP_NUM_THREADS="1",
               PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(ROOT / "client/python"),
               LD_LIBRARY_PATH=str(FAKES), GRADD_FAKE_CUDA_DIR=str(directory / "gpus"),
               GRADD_FAKE_CUDA_DELAY_US="50", GRADD_FAKE_CUDA_SEED="7",
               GRADD_FAKE_CUDA_SUBALLOCATE="1")
    (directory / "gpus").mkdir()
    (directory / "out").mkdir()
    ended = subprocess.run(
        [str(BUILD / "client/run/gradrun"), "-np", "2", "--private", "-q", "-o",
         str(directory / "out"), "--timeout", "90", "--set", "job_linger_s=0.1", "--set",
         f"backend={request.param}", PYTHON, str(PROGRAM)],
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, timeout=120)
    results, said = [], ended.stdout
    for rank in range(2):
        log = directory / f"out/rank.{rank}.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        said += f"\n--- rank {rank}\n{text[-4000:]}"
        lines = [line for line in text.splitlines() if line.startswith("{")]
        results.append(json.loads(lines[-1]) if lines else {})
    return PATHS[request.param], results, said


def test_the_path_is_the_one_under_test(run: Any) -> None:
    path, results, said = run
    assert [result.get("path") for result in results] == [path] * 2, said


@pytest.mark.parametrize("check", CHECKS)
def test_on_both_ranks(run: Any, check: str) -> None:
    _, results, said = run
    for rank, result in enumerate(results):
        assert check in result, f"rank {rank} did not reach it: an earlier check failed\n{said}"
        assert not result[check], f"rank {rank}: {result[check]}"
