# SPDX-License-Identifier: Apache-2.0
"""Programs of several ranks, started by gradrun on a private daemon, each rank's output apart."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("GRADD_BUILD", ROOT / "build")).resolve()
GRADRUN = BUILD / "client/run/gradrun"
PROGRAMS = Path(__file__).resolve().parent / "programs"
EXAMPLES = ROOT / "client/examples"
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

    def last_json(self, rank: int = 0) -> Any:
        """The object in the last line of a rank's output."""
        return json.loads(self.output[rank].strip().splitlines()[-1])


def start(program: Path, n: int, *arguments: str, directory: Path, settings: tuple[str, ...] = (),
          timeout_s: int = 120, environment: dict[str, str] | None = None) -> Run:
    env = {key: value for key, value in os.environ.items() if not key.startswith("GRADD_")}
    env.update(GRADD_LIBRARY=str(BUILD / "client/lib/libgradd.so.0"), OMP_NUM_THREADS="1",
               PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(ROOT / "client/python"))
    env.update(environment or {})
    command = [str(GRADRUN), "-np", str(n), "--private", "-q", "-o", str(directory),
               "--timeout", str(timeout_s)]
    for setting in ("job_linger_s=0.1", *settings):
        command += ["--set", setting]
    result = subprocess.run([*command, PYTHON, str(program), *arguments], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            stdin=subprocess.DEVNULL, timeout=timeout_s + 30)
    output = [(directory / f"rank.{rank}.log").read_text(errors="replace")
              if (directory / f"rank.{rank}.log").exists() else "" for rank in range(n)]
    return Run(result.returncode, result.stdout, output)
