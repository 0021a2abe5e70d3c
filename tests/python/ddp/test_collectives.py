# SPDX-License-Identifier: Apache-2.0
"""Every collective of the backend "gradd", on 1, 2 and 3 ranks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from ranks import PROGRAMS, Run, start

N_RANKS = (1, 2, 3)
TREE = ast.parse((PROGRAMS / "collectives.py").read_text())
CASES = [node.name for node in TREE.body if isinstance(node, ast.FunctionDef)
         and any(getattr(d, "id", "") == "case" for d in node.decorator_list)]


@pytest.fixture(scope="module", params=N_RANKS, ids=lambda n: f"{n}ranks")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All cases in one run, since starting torch takes longer than they do."""
    directory: Path = tmp_path_factory.mktemp("collectives")
    return start(PROGRAMS / "collectives.py", request.param, directory=directory)


@pytest.mark.parametrize("case", CASES)
def test_collective(run: Run, case: str) -> None:
    assert run.code == 0, run
    for rank in range(len(run.output)):
        assert run.result(rank)[case] == "ok", f"rank {rank}: {run.result(rank)[case]}"
