# SPDX-License-Identifier: Apache-2.0
"""One rank of Horovod's own suite: python suite.py OUT PYTEST-ARGUMENTS...

Started by gradrun. Puts the shim on the path, stands in for the two modules that the suite's
helpers import and no test of the two files uses, and writes this rank's results to OUT.RANK as
JSON: {test: outcome}.
"""

from __future__ import annotations

import json
import os
import sys
import types
import unittest.mock
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "client/python"))

import gradd.horovod  # noqa: E402
import pytest  # noqa: E402


def stand_in_for_helpers() -> None:
    """test/utils/common.py imports `mock` and a part of Horovod's launcher."""
    sys.modules.setdefault("mock", unittest.mock)
    for name in ("horovod.runner", "horovod.runner.util", "horovod.runner.util.threads"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["horovod.runner.util.threads"].in_thread = None


class Recorder:
    """A pytest plugin that remembers outcomes, and why tests were skipped or failed."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name = report.nodeid.split("::")[-1]
        if self.outcomes.get(name) == "failed":
            return
        self.outcomes[name] = report.outcome
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            self.reasons[name] = report.longrepr[2]
        elif report.outcome == "failed":
            self.reasons[name] = str(report.longrepr)[-3000:]


def main() -> int:
    out, arguments = sys.argv[1], sys.argv[2:]
    gradd.horovod.install()
    stand_in_for_helpers()
    recorder = Recorder()
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short",
                          *arguments], plugins=[recorder])
    rank = os.environ["GRADD_RANK"]
    Path(f"{out}.{rank}").write_text(json.dumps(
        {"outcomes": recorder.outcomes, "reasons": recorder.reasons, "status": int(status)}))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
