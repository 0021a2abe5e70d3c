# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import PROGRAMS, PYTHON, Run, start


@pytest.fixture
def gradrun(tmp_path: Path):
    """gradrun("program.py", n, arguments...) -> Run."""
    count = [0]

    def run(program: str | Path, n: int, *arguments: str, **how: Any) -> Run:
        count[0] += 1
        directory = tmp_path / str(count[0])
        directory.mkdir()
        return start(PROGRAMS / program, n, *arguments, directory=directory, **how)

    return run


def pytest_report_header() -> str:
    text = subprocess.run([PYTHON, "-c", "import sys, torch; print(sys.version.split()[0], "
                           "torch.__version__)"], capture_output=True, text=True).stdout.split()
    return f"ranks run Python {text[0]} with torch {text[1]}" if len(text) == 2 else \
        f"ranks run {PYTHON}, which has no torch (this is {sys.version.split()[0]})"
