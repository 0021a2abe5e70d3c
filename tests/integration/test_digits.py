# SPDX-License-Identifier: Apache-2.0
"""The main job: digits learns, and learns the same on 1, 2 and 4 ranks."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from harness import (
    DIGITS, GRADRUN, SANITIZER, World, adopt_orphans, daemon_environment, no_randomisation,
)

# Sanitised, it is slow: fewer epochs reach a lower accuracy, which is then not asserted.
EPOCHS = ["--epochs", "2"] if SANITIZER else []


def train(tmp_path: Path, n_ranks: int) -> tuple[str, np.ndarray]:
    weights = tmp_path / f"weights.{n_ranks}"
    runtime = tmp_path / "run"
    runtime.mkdir(exist_ok=True, mode=0o700)
    environment = daemon_environment(XDG_RUNTIME_DIR=str(runtime))
    result = subprocess.run(
        no_randomisation() + [str(GRADRUN), "-np", str(n_ranks), "--private", str(DIGITS),
                              "--save", str(weights), *EPOCHS],
        capture_output=True, text=True, timeout=300, env=environment)
    if not EPOCHS:
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert os.listdir(runtime) == []
    assert adopt_orphans() == []
    return result.stdout, np.fromfile(weights, np.float32)


@pytest.mark.limit(240)
def test_digits_learns_and_the_number_of_ranks_does_not_matter(world: World,
                                                               tmp_path: Path) -> None:
    outputs, weights = {}, {}
    for n_ranks in (1, 2, 4):
        outputs[n_ranks], weights[n_ranks] = train(tmp_path, n_ranks)
    for n_ranks, output in outputs.items():
        if not EPOCHS:
            accuracy = float(re.findall(r"accuracy\D*([01]\.\d+)", output)[-1])
            assert accuracy >= 0.95, output
        assert "images" in output and "loss" in output
        assert np.isfinite(weights[n_ranks]).all() and weights[n_ranks].size > 1000
        scale = np.abs(weights[1]).max()
        difference = np.abs(weights[n_ranks] - weights[1]).max() / scale
        print(f"{n_ranks} ranks: largest difference of a weight {difference:.2e} of the largest")
        assert difference <= 1e-5


def test_a_repeated_run_gives_the_same_bits(world: World, tmp_path: Path) -> None:
    first = train(tmp_path, 2)[1]
    assert np.array_equal(first, train(tmp_path, 2)[1])
