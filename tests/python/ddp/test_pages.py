# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any


def test_pages_of_others_are_shared_and_given_back(gradrun: Any) -> None:
    run = gradrun("pages.py", 2)
    assert run.code == 0 and run.output == ["ok\n", "ok\n"], run
