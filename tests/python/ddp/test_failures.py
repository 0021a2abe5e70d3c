# SPDX-License-Identifier: Apache-2.0
"""Trouble of one rank reaches the others as an error, in time, in words."""

from __future__ import annotations

from typing import Any

import pytest

IN_TIME_S = 5.0


def outcome(run: Any, rank: int) -> dict[str, Any]:
    result = run.result(rank)
    assert result["error"], run
    assert result["seconds"] < IN_TIME_S, run
    return result


@pytest.mark.parametrize("arguments", [("killed",), ("killed_hook", "gloo"), ("killed_hook",)],
                         ids=" ".join)
def test_a_killed_rank_fails_backward(gradrun: Any, arguments: tuple[str, ...]) -> None:
    run = gradrun("failures.py", 2, *arguments)
    got = outcome(run, 0)
    assert got["error"] in ("RuntimeError", "RankLost"), got
    assert "RankLost" in got["text"] and "rank 1" in got["text"], got
    assert "killed by signal 9" in got["text"], got


@pytest.mark.parametrize("arguments", [("forward_raises",), ("forward_raises_hook", "gloo")],
                         ids=" ".join)
def test_an_exception_in_one_ranks_forward_fails_the_others(
        gradrun: Any, arguments: tuple[str, ...]) -> None:
    run = gradrun("failures.py", 2, *arguments)
    assert outcome(run, 1)["text"] == "bad sample"
    got = outcome(run, 0)
    assert got["error"] in ("RuntimeError", "RankLost") and "rank 1" in got["text"], got


@pytest.mark.parametrize("case, words", [
    ("counts_differ", ("rank 0", "rank 1", "[5]", "[6]")),
    ("collectives_differ", ("rank 0", "rank 1", "all-reduce", "broadcast")),
    ("gathered_sizes_differ", ("rank 0",)),
    ("hooks_differ", ("rank 0", "rank 1", "float32", "float16")),
])
def test_ranks_that_disagree_are_told_both_sides(gradrun: Any, case: str,
                                                 words: tuple[str, ...]) -> None:
    run = gradrun("failures.py", 2, case)
    for rank in range(2):
        text = outcome(run, rank)["text"]
        assert all(word in text for word in words), text


def test_a_late_rank_fails_after_the_daemons_limit(gradrun: Any) -> None:
    run = gradrun("failures.py", 2, "late", settings=("op_timeout_s=0.5",))
    got = outcome(run, 0)
    assert got["error"] == "Timeout" and "rank 1" in got["text"], got


def test_a_wait_may_give_up_and_be_tried_again(gradrun: Any) -> None:
    run = gradrun("failures.py", 2, "wait_is_short")
    got = outcome(run, 0)
    assert got["error"] == "Timeout" and "0.2 s" in got["text"], got
    assert run.result(1)["error"] is None, run


def test_a_message_of_a_rank_that_left_is_an_error(gradrun: Any) -> None:
    run = gradrun("failures.py", 2, "receive_from_nobody")
    assert outcome(run, 0)["error"] == "RankLost", run


def test_bad_arguments_are_refused_and_the_group_goes_on(gradrun: Any) -> None:
    run = gradrun("failures.py", 2, "bad_arguments")
    texts = outcome(run, 0)["text"].split(" | ")
    assert len(texts) == 5, texts
    for text, word in zip(texts, ("3 elements", "any source", "rank 0", "1 outputs", "splits")):
        assert word in text, text
