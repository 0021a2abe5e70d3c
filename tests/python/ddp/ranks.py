# SPDX-License-Identifier: Apache-2.0
"""Programs of several ranks of this folder and of the examples, started by gradrun."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
from python_ranks import PYTHON, ROOT, Run, gradrun  # noqa: E402

__all__ = ["EXAMPLES", "PROGRAMS", "PYTHON", "Run", "start"]

PROGRAMS = Path(__file__).resolve().parent / "programs"
EXAMPLES = ROOT / "client/examples"


def start(program: Path, n: int, *arguments: str, directory: Path, settings: tuple[str, ...] = (),
          timeout_s: int = 120, environment: dict[str, str] | None = None) -> Run:
    return gradrun([program, *arguments], n, directory, settings, timeout_s, environment)
