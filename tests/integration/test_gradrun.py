# SPDX-License-Identifier: Apache-2.0
"""gradrun with a real private daemon: output, failure, signals, and nothing left behind."""

from __future__ import annotations

import glob
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

from harness import (
    GRADCTL, GRADRUN, PYTHON, REPLY_S, World, client_environment, eventually,
    no_randomisation, wait_for_exit,
)

PRELUDE = """
import ctypes, os, signal, sys
import gradd_ctypes as api
lib = api.load()
g = ctypes.c_void_p()
options = api.Options(struct_size=ctypes.sizeof(api.Options))
status = lib.gradd_init(ctypes.byref(options), ctypes.byref(g))
assert status == 0, lib.gradd_error().decode()
rank, size = lib.gradd_rank(g), lib.gradd_size(g)
"""


@pytest.fixture
def runtime(tmp_path: Path, world: World) -> Iterator[Path]:
    """Where private daemons put their directories; empty again at the end."""
    path = Path(f"/tmp/gradd-run-{os.getpid()}")
    path.mkdir(mode=0o700)
    yield path
    left = list(path.iterdir())
    for entry in left:
        subprocess.run(["rm", "-rf", str(entry)], check=True)
    path.rmdir()
    assert not left, f"left behind: {left}"


def environment(runtime: Path, **extra: str) -> dict[str, str]:
    return {**client_environment(), "XDG_RUNTIME_DIR": str(runtime),
            "GRADD_SOCKET": "", "PYTHONUNBUFFERED": "1", **extra}


def command(tmp_path: Path, n: int, body: str, *options: str, prelude: bool = True) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text((PRELUDE if prelude else "import os, sys, signal\n") + textwrap.dedent(body))
    # --private: the machine's own daemon, if there is one, stays out of it.
    return no_randomisation() + [str(GRADRUN), "-np", str(n), "--private", *options, PYTHON,
                                 str(script)]


def run(runtime: Path, tmp_path: Path, n: int, body: str, *options: str, prelude: bool = True,
        **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(tmp_path, n, body, *options, prelude=prelude),
                          capture_output=True, text=True, timeout=60,
                          env=environment(runtime, **extra))


def test_ranks_aggregate_and_their_output_is_prefixed(runtime: Path, tmp_path: Path) -> None:
    result = run(runtime, tmp_path, 3, """
        import numpy as np
        a = np.full(1000, rank + 1, np.float32)
        assert lib.gradd_allreduce(g, b"x", a.ctypes.data, a.ctypes.data, 1000, api.F32,
                                   api.SUM) == 0
        print("sum", a[0], "of", size)
        print("to stderr", file=sys.stderr)
        lib.gradd_shutdown(g)
    """)
    assert result.returncode == 0, result.stderr
    for rank in range(3):
        assert f"[{rank}] sum 6.0 of 3\n" in result.stdout
        assert f"[{rank}] to stderr\n" in result.stderr
    assert len(result.stdout.splitlines()) == 3


def test_all_launcher_variables_agree(runtime: Path, tmp_path: Path) -> None:
    result = run(runtime, tmp_path, 2, """
        e = os.environ
        assert e["RANK"] == e["LOCAL_RANK"] == e["GRADD_RANK"] == str(rank)
        assert e["WORLD_SIZE"] == e["LOCAL_WORLD_SIZE"] == e["GRADD_WORLD_SIZE"] == "2"
        assert "GRADD" in lib.gradd_source(g).decode()
        assert e["MASTER_ADDR"] and e["MASTER_PORT"]
        lib.gradd_barrier(g, 0)
        lib.gradd_shutdown(g)
    """)
    assert result.returncode == 0, result.stderr


def limited(words: list[str], runtime: Path, soft: int, hard: int) -> Any:
    return subprocess.run(["prlimit", f"--nofile={soft}:{hard}", *words], capture_output=True,
                          text=True, timeout=60, env=environment(runtime))


def test_a_low_limit_on_open_files_is_raised_for_gradrun_only(runtime: Path,
                                                              tmp_path: Path) -> None:
    words = command(tmp_path, 40, "", "--output", str(tmp_path / "logs"))
    result = limited([*words[:-2], "sh", "-c", "ulimit -n"], runtime, 48, 1024)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == sorted(f"[{i}] 48" for i in range(40))


def test_a_limit_on_open_files_that_is_too_low_is_told(runtime: Path, tmp_path: Path) -> None:
    result = limited(command(tmp_path, 40, ""), runtime, 48, 64)
    assert result.returncode == 1, result
    assert re.fullmatch(r"gradrun: 40 ranks need \d+ open files, and at most 64 are allowed here: "
                        r"raise the limit \(.*\)\n", result.stderr), result.stderr
    assert not list(runtime.iterdir()), "something was started"


def test_the_first_failure_ends_all_and_gives_its_code(runtime: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    result = run(runtime, tmp_path, 3, """
        lib.gradd_barrier(g, 0)
        if rank == 1:
            os._exit(7)
        signal.pause()
    """)
    assert result.returncode == 7, result.stderr
    assert "rank 1" in result.stderr and "7" in result.stderr
    assert time.monotonic() - started < 5 * 6


def test_a_rank_killed_by_a_signal_is_said_so(runtime: Path, tmp_path: Path) -> None:
    result = run(runtime, tmp_path, 2, """
        lib.gradd_barrier(g, 0)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    """)
    assert result.returncode == 128 + 9, result.stderr
    assert "rank 0" in result.stderr and "signal 9" in result.stderr


@pytest.mark.timing
def test_a_rank_that_ignores_sigterm_is_killed(runtime: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    result = run(runtime, tmp_path, 2, """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lib.gradd_barrier(g, 0)
        if rank == 1:
            os._exit(3)
        while True:
            signal.pause()
    """)
    assert result.returncode == 3, result.stderr
    assert 4.5 < time.monotonic() - started < 12


def test_a_program_that_does_not_exist(runtime: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        no_randomisation() + [str(GRADRUN), "-np", "2", "--private", "/nonexistent/program"],
        capture_output=True, text=True, timeout=30, env=environment(runtime))
    assert result.returncode == 127, result
    assert "/nonexistent/program" in result.stderr


@pytest.mark.parametrize("arguments", [
    [], ["-np"], ["-np", "0", "true"], ["-np", "x", "true"], ["-np", "2"],
    ["-np", "2", "--nonsense", "true"], ["-np", "1", "-x", "GRADD_RANK=5", "true"],
], ids=str)
def test_usage_errors_are_2(runtime: Path, arguments: list[str]) -> None:
    result = subprocess.run(no_randomisation() + [str(GRADRUN), *arguments], capture_output=True,
                            text=True, timeout=30, env=environment(runtime))
    assert result.returncode == 2, result
    assert result.stderr


def test_output_goes_to_one_file_per_rank(runtime: Path, tmp_path: Path) -> None:
    out = tmp_path / "logs"
    result = run(runtime, tmp_path, 2, """
        print("hello from", rank)
        lib.gradd_barrier(g, 0)
        lib.gradd_shutdown(g)
    """, "--output", str(out), "--quiet")
    assert result.returncode == 0, result.stderr
    assert "hello" not in result.stdout
    for rank in range(2):
        text = (out / f"rank.{rank}.log").read_text()
        assert text == f"hello from {rank}\n"


def test_x_passes_variables(runtime: Path, tmp_path: Path) -> None:
    result = run(runtime, tmp_path, 1, """
        print(os.environ["GIVEN"], os.environ["INHERITED"])
    """, "-x", "GIVEN=a b", "-x", "INHERITED", prelude=False, INHERITED="c")
    assert result.returncode == 0, result.stderr
    assert "[0] a b c\n" in result.stdout
    missing = run(runtime, tmp_path, 1, "pass", "-x", "NOT_SET_ANYWHERE", prelude=False)
    assert missing.returncode == 2 and "NOT_SET_ANYWHERE" in missing.stderr


def test_timeout_ends_everything_with_124(runtime: Path, tmp_path: Path) -> None:
    result = run(runtime, tmp_path, 2, "signal.pause()", "--timeout", "0.5", prelude=False)
    assert result.returncode == 124, result.stderr
    assert "0.5" in result.stderr


def test_verbose_says_how_each_rank_ended(runtime: Path, tmp_path: Path) -> None:
    result = run(runtime, tmp_path, 2, """
        lib.gradd_barrier(g, 0)
        lib.gradd_shutdown(g)
    """, "--verbose")
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert f"rank {rank}" in result.stderr, result.stderr


def test_children_that_ranks_leave_behind_are_ended(runtime: Path, tmp_path: Path) -> None:
    result = run(runtime, tmp_path, 2, """
        import subprocess
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("child", child.pid)
    """, prelude=False)
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        assert wait_for_exit(int(line.split()[-1]), 10)


class Running:
    """A gradrun whose two ranks have joined and wait."""

    def __init__(self, world: World, runtime: Path, tmp_path: Path) -> None:
        self.process = world.popen(
            command(tmp_path, 2, """
                lib.gradd_barrier(g, 0)
                print("pid", os.getpid(), flush=True)
                signal.pause()
            """), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(runtime), start_new_session=True)
        self.ranks = [int(self.process.stdout.readline().split()[-1]) for _ in range(2)]
        sockets = glob.glob(f"{runtime}/*/gradd.sock")
        assert len(sockets) == 1, sockets
        self.socket = sockets[0]

    def assert_gone(self) -> None:
        for pid in self.ranks:
            assert wait_for_exit(pid), f"rank {pid} lives on"
        eventually(lambda: not os.path.exists(os.path.dirname(self.socket)),
                   "the private daemon has removed its directory")


def test_the_private_daemon_can_be_asked_meanwhile(world: World, runtime: Path,
                                                   tmp_path: Path) -> None:
    running = Running(world, runtime, tmp_path)
    result = subprocess.run(
        no_randomisation() + [str(GRADCTL), "--socket", running.socket, "jobs"],
        capture_output=True, text=True, timeout=20)
    assert result.returncode == 0 and "running" in result.stdout, result
    running.process.terminate()
    running.process.wait(REPLY_S)
    running.assert_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_gradrun_leaves_nothing(world: World, runtime: Path, tmp_path: Path,
                                            number: int) -> None:
    running = Running(world, runtime, tmp_path)
    running.process.send_signal(number)
    code = running.process.wait(REPLY_S)
    assert code in (-number, 128 + number), code
    running.assert_gone()


def test_ctrl_c_at_the_terminal_leaves_nothing(world: World, runtime: Path,
                                               tmp_path: Path) -> None:
    running = Running(world, runtime, tmp_path)
    # As a terminal does it: to the whole process group.
    os.killpg(running.process.pid, signal.SIGINT)
    code = running.process.wait(REPLY_S)
    assert code in (-2, 130), code
    running.assert_gone()


def test_sigkill_of_gradrun_leaves_nothing(world: World, runtime: Path, tmp_path: Path) -> None:
    running = Running(world, runtime, tmp_path)
    running.process.kill()
    running.process.wait(REPLY_S)
    running.assert_gone()


def test_sigkill_after_ctrl_z_leaves_nothing(world: World, runtime: Path, tmp_path: Path) -> None:
    running = Running(world, runtime, tmp_path)
    # The session is gradrun's own: nobody in it could let it go on, so only the ranks might stop.
    os.killpg(running.process.pid, signal.SIGTSTP)
    running.process.kill()
    running.process.wait(REPLY_S)
    running.assert_gone()


def test_the_nodes_daemon_is_used_when_there_is_one(world: World, runtime: Path,
                                                    tmp_path: Path) -> None:
    daemon = world.daemon()
    words = [w for w in command(tmp_path, 2, """
        lib.gradd_barrier(g, 0)
        print("job", lib.gradd_job(g).decode())
        lib.gradd_shutdown(g)
    """, "--job", "named") if w != "--private"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60,
                            env=environment(runtime, GRADD_SOCKET=daemon.socket))
    assert result.returncode == 0, result.stderr
    assert "job named" in result.stdout
    daemon.log.wait_for(r"epoch begins.*job=named")


def test_two_gradruns_at_once_do_not_meet(world: World, runtime: Path, tmp_path: Path) -> None:
    first = Running(world, runtime, tmp_path)
    (tmp_path / "second").mkdir()
    result = run(runtime, tmp_path / "second", 2, """
        lib.gradd_barrier(g, 0)
        lib.gradd_shutdown(g)
    """)
    assert result.returncode == 0, result.stderr
    first.process.terminate()
    first.process.wait(REPLY_S)
    first.assert_gone()
