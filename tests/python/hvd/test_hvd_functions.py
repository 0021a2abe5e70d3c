# SPDX-License-Identifier: Apache-2.0
"""Every function of gradd.torch on several ranks; autograd through them; training.

The checks themselves are in programs/; a program runs once per number of ranks.
"""

from __future__ import annotations

import functools
import re

import hvd_ranks
import pytest

PROGRAMS = {"collectives.py": (1, 2, 3), "gradients.py": (1, 2, 3), "training.py": (1, 2, 4),
            "elastic.py": (1, 2, 3)}


@functools.lru_cache(maxsize=None)
def outcome(program: str, n: int) -> hvd_ranks.Run:
    return hvd_ranks.run(program, n)


def checks(program: str) -> list[str]:
    text = (hvd_ranks.PROGRAMS / program).read_text()
    return re.findall(r"^def (check_\w+)", text, re.MULTILINE)


CASES = [(program, n, check) for program, ranks in PROGRAMS.items() for n in ranks
         for check in checks(program)]


@pytest.mark.parametrize("program, n, check", CASES,
                         ids=[f"{p[:-3]}-{n}-{c[6:]}" for p, n, c in CASES])
def test_on_every_rank(program: str, n: int, check: str) -> None:
    run = outcome(program, n)
    for rank in range(n):
        results = run.result(rank)
        assert results is not None, run
        assert check in results, f"not reached: an earlier check failed\n{results}"
        assert not results[check], f"rank {rank}: {results[check]}"
