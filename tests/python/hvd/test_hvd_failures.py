# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on one rank reaches every other one: the right exception, in time, in words."""

from __future__ import annotations

import functools
from typing import Any

import hvd_ranks
import pytest

IN_TIME_S = 5.0


def outcomes(case: str, n: int, settings: tuple[str, ...] = ()) -> tuple[hvd_ranks.Run, list[Any]]:
    run = hvd_ranks.run("failures.py", n, case, settings=settings)
    return run, [(run.result(rank) or {}).get(case) for rank in range(n)]


@functools.lru_cache(maxsize=None)
def disagreements(n: int) -> hvd_ranks.Run:
    """All of them in one job: it goes on after each."""
    return hvd_ranks.run("failures.py", n, *DISAGREEMENTS)


DISAGREEMENTS = {
    "shapes_differ": ("fc.weight", "float32[6,4]", "float32[4,6]"),
    "types_differ": ("fc", "float64[5]", "float32[5]"),
    "ops_differ": ("max", "sum"),
    "kinds_differ": ("broadcast", "all-reduce"),
    "unnamed_kinds_differ": ("all-gather", "all-reduce"),
    "roots_differ": ("root 0", "root 1"),
    "gathered_shapes_differ": ("rows", "float32[2,4]", "float32[2,3]"),
    "gathered_types_differ": ("rows", "int16[2]", "bool[2]"),
    "group_sizes_differ": ("group",),
    "sparse_on_one_rank": ("embedding", "all-gather", "all-reduce"),
    "one_gradient_has_another_shape": ('"a"', "float32[3]", "float32[4]"),
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case, words", [
    ("killed", ("killed by signal 9",)),
    ("killed_while_gathering", ("killed by signal 9",)),
    ("killed_at_barrier", ("killed by signal 9",)),
    ("forward_raises", ("exited",)),
])
def test_a_lost_rank(case: str, words: tuple[str, ...], n: int) -> None:
    run, results = outcomes(case, n)
    for result in results[:-1]:
        assert result and result["error"] == "RankLost" and result["is_internal"], run
        assert f"rank {n - 1}" in result["text"], run
        assert all(word in result["text"] for word in words), run
        assert result["seconds"] < IN_TIME_S, run


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_that_disagree(case: str, n: int) -> None:
    run = disagreements(n)
    assert run.code == 0, run
    for rank in range(n):
        result = run.result(rank)[case]
        assert result["error"] == "RanksDisagree" and result["is_internal"], result
        assert "rank " in result["text"], result
        assert all(word in result["text"] for word in DISAGREEMENTS[case]), result
        assert result["seconds"] < IN_TIME_S, result
        assert result["afterwards"] == n, "the job goes on"


def test_a_late_rank() -> None:
    run, results = outcomes("late", 2, settings=("op_timeout_s=0.5",))
    assert results[0]["error"] == "Timeout" and results[0]["is_internal"], run
    assert "late.weight" in results[0]["text"] and "rank 1" in results[0]["text"], run
    assert results[0]["seconds"] < IN_TIME_S, run
    assert results[0]["afterwards"] == 2, "the job goes on"


def test_a_gather_while_a_rank_has_joined() -> None:
    run, results = outcomes("joined_rank_and_gather", 2)
    assert results[0]["is_internal"] and "rank 1" in results[0]["text"], run
    assert "joined" in results[0]["text"], run
