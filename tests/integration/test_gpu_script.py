# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/run, which is meant for a machine with a GPU, on the fake libraries: every check of it
that a fake can make."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness import BUILD

ROOT = Path(__file__).resolve().parent.parent
SCRIPT, BUNDLE = ROOT / "gpu/run", ROOT / "gpu/bundle"
PLAIN = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}

pytestmark = pytest.mark.skipif(not (BUILD / "tests/gpu/gpu_trainer").exists(),
                                reason="tests/gpu is not built")


def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([script, "--build", BUILD, *arguments], text=True, timeout=170,
                          capture_output=True, env={**PLAIN, **environment}, check=False)


def test_every_check_passes_on_the_fakes(tmp_path: Path) -> None:
    done = run(SCRIPT, "--fakes", "--results", str(tmp_path / "results"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    skipped = [line for line in lines if ": skipped: " in line]
    assert [line.split(":")[0] for line in skipped] == ["torch", "beside_mps"], done.stdout
    assert "18 checks, 0 failed" in lines
    text = (tmp_path / "results").read_text()
    assert "two: ok" in text and "| trainer killed: error on rank 0 |" in text


def test_results_are_right_whatever_the_streams_delays() -> None:
    done = run(SCRIPT, "--fakes", "--only", "two,four,memory,order_event,order_flag,two_daemons",
               GRADD_FAKE_CUDA_DELAY_US="1500", GRADD_FAKE_CUDA_SEED="7",
               GRADD_FAKE_NCCL_IN_PROGRESS="2", GRADD_FAKE_NCCL_LAUNCH_MS="5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 checks, 0 failed" in done.stdout


def test_a_check_that_fails_is_told(tmp_path: Path) -> None:
    done = run(SCRIPT, "--fakes", "--only", "two_daemons,alone",
               GRADD_FAKE_NCCL_FAIL="ncclAllReduce:1+:3")
    assert done.returncode == 1, done.stdout
    assert "two_daemons: FAILED" in done.stdout and "injected by the test" in done.stdout
    assert "alone: ok" in done.stdout and "2 checks, 1 failed" in done.stdout


def test_a_machine_without_a_gpu_is_told_apart() -> None:
    done = run(SCRIPT, GRADD_GPU_LOAD="")
    if done.returncode != 77 and shutil.which("nvidia-smi"):
        pytest.skip("this machine has a GPU")
    assert done.returncode == 77, done.stdout + done.stderr
    assert done.stdout.startswith("skipped: no GPU: "), done.stdout


def test_a_bundle_runs_from_its_own_folder(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    subprocess.run([BUNDLE, "--build", BUILD, "--no-build", folder], check=True, timeout=60,
                   capture_output=True, env=PLAIN)
    assert (folder / "lib/libc.so.6").exists() and list(folder.glob("lib/ld*.so.*"))
    done = run(folder / "run", "--fakes", "--only", "two,kernels")
    assert done.returncode == 0, done.stdout + done.stderr
