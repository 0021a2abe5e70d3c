# SPDX-License-Identifier: Apache-2.0
"""Programs of several ranks of this folder, started by gradrun; each rank ends with a JSON line."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
from python_ranks import PYTHON, Run, environment, gradrun  # noqa: E402

__all__ = ["PROGRAMS", "PYTHON", "Run", "environment", "run"]

PROGRAMS = Path(__file__).resolve().parent / "programs"


def run(program: str | Path, n: int, *arguments: str, settings: tuple[str, ...] = (),
        launcher: tuple[str, ...] = (), timeout_s: int = 120) -> Run:
    """Run PROGRAM (by python LAUNCHER... PROGRAM) as n ranks to its end, or for timeout_s."""
    with tempfile.TemporaryDirectory(prefix="gradd-hvd-") as directory:
        return gradrun([*launcher, PROGRAMS / program, *arguments], n, Path(directory), settings,
                       timeout_s)
