# SPDX-License-Identifier: Apache-2.0
"""FSDP gives the same losses under gloo and under gradd, where torch has FSDP for the CPU."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from ranks import PYTHON


def torch_version() -> tuple[int, ...]:
    text = subprocess.run([PYTHON, "-c", "import torch; print(torch.__version__)"],
                          capture_output=True, text=True, check=True).stdout
    return tuple(int(word) for word in text.split("+")[0].split(".")[:2])


@pytest.mark.parametrize("kind, least", [("fsdp1", (2, 6)), ("fsdp2", (2, 7))])
def test_losses_are_gloos(gradrun: Any, kind: str, least: tuple[int, ...]) -> None:
    version = torch_version()
    if version < least:
        pytest.skip(f"torch {version[0]}.{version[1]} has no {kind} that runs on the CPU with a "
                    "process group written in Python")
    runs = [gradrun("fsdp_train.py", 2, kind, backend) for backend in ("gloo", "gradd")]
    for run in runs:
        assert run.code == 0, run
    for rank in range(2):
        wanted, got = (run.result(rank)["losses"] for run in runs)
        assert got == pytest.approx(wanted, rel=1e-5), f"rank {rank}"
