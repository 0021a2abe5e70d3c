# SPDX-License-Identifier: Apache-2.0
"""The same DDP script gives the same losses under gloo and under gradd."""

from __future__ import annotations

from typing import Any

import pytest

REFERENCES: dict[tuple[str, ...], Any] = {}


def losses(gradrun: Any, n: int, *arguments: str) -> list[list[float]]:
    """Of every rank; asserts that the ranks' parameters ended equal."""
    run = gradrun("ddp_train.py", n, *arguments)
    assert run.code == 0, run
    results = [run.result(rank) for rank in range(n)]
    assert all(result["is_equal_to_rank_0"] for result in results), run
    return [result["losses"] + [result["sum"], result["square"]] for result in results]


def reference(gradrun: Any, n: int, *arguments: str) -> list[list[float]]:
    key = (str(n), *arguments)
    if key not in REFERENCES:
        REFERENCES[key] = losses(gradrun, n, "--backend", "gloo", *arguments)
    return REFERENCES[key]


def same(got: list[list[float]], wanted: list[list[float]], relative: float) -> None:
    for rank, numbers in enumerate(got):
        assert numbers == pytest.approx(wanted[rank], rel=relative, abs=relative), f"rank {rank}"


@pytest.mark.parametrize("arguments", [
    ("--backend", "gradd"),
    ("--backend", "gradd", "--hook", "hook"),
    ("--backend", "gloo", "--hook", "hook"),
    ("--backend", "gloo", "--hook", "hook", "--state", "state"),
    ("--backend", "gloo", "--hook", "hook", "--state", "copied"),
    ("--backend", "gloo", "--hook", "hook", "--state", "copied", "--bucket-view"),
    ("--backend", "gloo", "--hook", "hook", "--state", "group"),
    ("--backend", "gloo", "--hook", "hook", "--state", "context", "--initialised"),
    ("--backend", "gloo", "--hook", "hook", "--initialised", "--rejoin"),
    ("--backend", "gloo", "--hook", "hook", "--bucket-view"),
    ("--backend", "gradd", "--bucket-view"),
], ids=" ".join)
def test_losses_are_gloos(gradrun: Any, arguments: tuple[str, ...]) -> None:
    # The mean of two numbers is exact up to the last rounding, in either order.
    same(losses(gradrun, 2, *arguments), reference(gradrun, 2), 1e-12)


@pytest.mark.parametrize("arguments", [("--models", "2"), ("--unused",), ("--double",)],
                         ids=" ".join)
@pytest.mark.parametrize("how", [("--backend", "gradd"), ("--backend", "gloo", "--hook", "hook")],
                         ids=" ".join)
def test_losses_are_gloos_for_other_models(gradrun: Any, how: tuple[str, ...],
                                           arguments: tuple[str, ...]) -> None:
    same(losses(gradrun, 2, *how, *arguments), reference(gradrun, 2, *arguments), 1e-12)


@pytest.mark.parametrize("n", (1, 3))
def test_losses_are_gloos_on_other_numbers_of_ranks(gradrun: Any, n: int) -> None:
    same(losses(gradrun, n, "--backend", "gradd", "--hook", "hook"), reference(gradrun, n), 1e-6)
    same(losses(gradrun, n, "--backend", "gradd"), reference(gradrun, n), 1e-6)


@pytest.mark.parametrize("hook, relative", [("fp16", 1e-3), ("bf16", 1e-2)])
def test_compressed_losses_are_close(gradrun: Any, hook: str, relative: float) -> None:
    got = losses(gradrun, 2, "--backend", "gradd", "--hook", hook)
    wanted = reference(gradrun, 2)
    same([numbers[:-2] for numbers in got], [numbers[:-2] for numbers in wanted], relative)
    assert got != wanted, "nothing was rounded"


def test_buckets_beyond_the_jobs_memory_are_copied_piece_by_piece(gradrun: Any) -> None:
    model = ("--width", "400", "--one-bucket")  # of 5.8 MB
    run = gradrun("ddp_train.py", 2, "--backend", "gloo", "--hook", "hook", *model,
                  settings=("job_memory_bytes=5M",))
    assert run.code == 0, run
    same([run.result(0)["losses"]], [reference(gradrun, 2, *model)[0][:-2]], 1e-12)
