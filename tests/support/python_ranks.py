# SPDX-License-Identifier: Apache-2.0
"""Programs of the Python package as ranks under gradrun, on a private daemon, each one's output
apart. The harness is not needed: nothing outlives gradrun."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Sequence

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("GRADD_BUILD", ROOT / "build")).resolve()
GRADRUN = BUILD / "client/run/gradrun"
# tests/python/venv names the interpreter of its virtual environment here.
PYTHON = os.environ.get("GRADD_TESTS_PYTHON", "/usr/bin/python3")


class Run:
    """How a program ended: `code` of gradrun, `output[rank]` and everything that gradrun said."""

    def __init__(self, code: int, said: str, output: list[str]) -> None:
        self.code = code
        self.said = said
        self.output = output

    def __repr__(self) -> str:
        ranks = "".join(f"\n--- rank {rank}\n{text[-6000:]}"
                        for rank, text in enumerate(self.output))
        return f"gradrun ended with {self.code}\n{self.said[-3000:]}{ranks}"

    def result(self, rank: int = 0) -> Any:
        """The object or list in the last line of a rank's output that is one; None: no line is."""
        for line in reversed(self.output[rank].splitlines()):
            if line.startswith(("{", "[")):
                return json.loads(line)
        return None


def environment() -> dict[str, str]:
    """Nothing of an outer job, the build under test, one thread per rank."""
    env = {key: value for key, value in os.environ.items()
           if not key.startswith(("GRADD_", "HOROVOD_"))}
    env.update(GRADD_LIBRARY=str(BUILD / "client/lib/libgradd.so.0"), OMP_NUM_THREADS="1",
               PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(ROOT / "client/python"))
    return env


def gradrun(command: Sequence[object], n: int, directory: Path, settings: Sequence[str] = (),
            timeout_s: int = 120, more: dict[str, str] | None = None) -> Run:
    """Run PYTHON COMMAND... as n ranks to its end, or for timeout_s; output is in `directory`."""
    options: list[object] = ["-np", n, "--private", "-q", "-o", directory, "--timeout", timeout_s]
    # The daemon of a test waits for nobody in vain; a job's worker need not outlive it.
    for setting in ("job_linger_s=0.1", *settings):
        options += ["--set", setting]
    ended = subprocess.run(
        [str(word) for word in (GRADRUN, *options, PYTHON, *command)],
        env={**environment(), **(more or {})}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=timeout_s + 30)
    output = []
    for rank in range(n):
        log = directory / f"rank.{rank}.log"
        output.append(log.read_text(errors="replace") if log.exists() else "")
    return Run(ended.returncode, ended.stdout, output)
