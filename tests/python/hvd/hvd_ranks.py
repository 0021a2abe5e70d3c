# SPDX-License-Identifier: Apache-2.0
"""Programs of several ranks under gradrun, on a private daemon; each rank ends with a JSON line."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("GRADD_BUILD", ROOT / "build")).resolve()
PROGRAMS = Path(__file__).resolve().parent / "programs"
PYTHON = os.environ.get("GRADD_TESTS_PYTHON", "/usr/bin/python3")

# The daemon of a test waits for nobody in vain; a job's worker need not outlive it.
SETTINGS = ("job_linger_s=0.1",)


class Run:
    """How a program ended: gradrun's exit code and words, and each rank's output."""

    def __init__(self, code: int, said: str, output: list[str]) -> None:
        self.code = code
        self.said = said
        self.output = output

    def __repr__(self) -> str:
        ranks = "".join(f"\n--- rank {rank}\n{text[-5000:]}"
                        for rank, text in enumerate(self.output))
        return f"gradrun ended with {self.code}\n{self.said[-3000:]}{ranks}"

    def result(self, rank: int) -> Any:
        """The object in the last line of a rank's output; None if it printed none."""
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


def run(program: str | Path, n: int, *arguments: str, settings: tuple[str, ...] = (),
        launcher: tuple[str, ...] = (), timeout_s: int = 120) -> Run:
    """Run PROGRAM (by python LAUNCHER... PROGRAM) as n ranks to its end, or for timeout_s."""
    with tempfile.TemporaryDirectory(prefix="gradd-hvd-") as directory:
        command = [str(BUILD / "client/run/gradrun"), "-np", str(n), "--private", "-q", "-o",
                   directory, "--timeout", str(timeout_s)]
        for setting in (*SETTINGS, *settings):
            command += ["--set", setting]
        ended = subprocess.run(
            [*command, PYTHON, *launcher, str(PROGRAMS / program), *arguments],
            env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, timeout=timeout_s + 30)
        output = []
        for rank in range(n):
            log = Path(directory) / f"rank.{rank}.log"
            output.append(log.read_text(errors="replace") if log.exists() else "")
        return Run(ended.returncode, ended.stdout, output)
