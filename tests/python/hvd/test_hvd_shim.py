# SPDX-License-Identifier: Apache-2.0
"""python -m gradd.horovod runs scripts that import Horovod, and says how it is used."""

from __future__ import annotations

import json
import subprocess

import hvd_ranks


def test_an_unchanged_script_runs() -> None:
    run = hvd_ranks.run("unchanged.py", 2, "--epochs", "3", launcher=("-m", "gradd.horovod"))
    for rank in range(2):
        assert run.result(rank) == {"sum": 1.0, "arguments": ["--epochs", "3"],
                                    "name": "__main__"}, run


def test_an_unchanged_script_runs_without_a_launcher() -> None:
    env = {**hvd_ranks.environment(), "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1",
           "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}
    ended = subprocess.run(
        [hvd_ranks.PYTHON, "-m", "gradd.horovod", str(hvd_ranks.PROGRAMS / "unchanged.py")],
        env=env, text=True, stdout=subprocess.PIPE, check=True, timeout=60)
    assert json.loads(ended.stdout)["sum"] == 0.0


def test_help_and_misuse() -> None:
    for arguments, code in (["--help"], 0), ([], 2):
        ended = subprocess.run([hvd_ranks.PYTHON, "-m", "gradd.horovod", *arguments], text=True,
                               env=hvd_ranks.environment(), stdout=subprocess.PIPE, timeout=60)
        assert ended.returncode == code and ended.stdout.startswith("usage: ")
