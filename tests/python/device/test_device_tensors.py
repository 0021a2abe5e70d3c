# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors in the torch modules, by stand-ins on the fake driver: see programs/standin.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
from python_ranks import BUILD, gradrun  # noqa: E402

FAKES = BUILD / "tests/fakes"
PROGRAM = Path(__file__).resolve().parent / "programs/tensors.py"
CHECKS = re.findall(r"^def (check_\w+)", PROGRAM.read_text(), re.MULTILINE)
PATHS = {"host": "staged", "nccl": "shared"}

pytestmark = pytest.mark.skipif(not (FAKES / "libcuda.so.1").exists(),
                                reason=f"{FAKES}/libcuda.so.1 is not built")


@pytest.fixture(scope="module", params=list(PATHS))
def run(request: Any, tmp_path_factory: Any) -> tuple[str, list[dict[str, str]], str]:
    """All checks on two ranks: what the path should be, each rank's results, what was said."""
    directory = tmp_path_factory.mktemp("device")
    (directory / "gpus").mkdir()
    ended = gradrun([PROGRAM], 2, directory, [f"backend={request.param}"], timeout_s=90, more={
        "LD_LIBRARY_PATH": str(FAKES), "GRADD_FAKE_CUDA_DIR": str(directory / "gpus"),
        "GRADD_FAKE_CUDA_DELAY_US": "50", "GRADD_FAKE_CUDA_SEED": "7",
        "GRADD_FAKE_CUDA_SUBALLOCATE": "1"})
    results = [ended.result(rank) or {} for rank in range(2)]
    said = repr(ended)
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
