# SPDX-License-Identifier: Apache-2.0
"""What the comparisons share: running a program for its rows, medians, ratios and verdicts, and how
much of the machine others took meanwhile."""

from __future__ import annotations

import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import time

KIB, MIB = 1 << 10, 1 << 20
PROGRAM_TIMEOUT_S = 180
QUIET_PERCENT = 5  # programs that poll lose most when others take more of the machine


class ProgramFailed(Exception):
    """A benchmark program ended with an error, printed a wrong result, or took too long."""


def size_text(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def time_text(us: float) -> str:
    return f"{us / 1000:.2f} ms" if us >= 1000 else f"{us:.2f} us"


class CpuMeter:
    """How much of the machine others took: /proc/stat without this program and its children.

    Interrupts belong to nobody: the kernel does not say on whose behalf packets are received."""

    def __init__(self) -> None:
        self.ticks = os.sysconf("SC_CLK_TCK")
        self.begin = self._read()

    def _read(self) -> tuple[float, float, float, float]:
        fields = [int(x) for x in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        user, nice, system, _idle, _iowait, _irq, _softirq, steal = fields[:8]
        busy = (user + nice + system) / self.ticks
        own = sum(
            usage.ru_utime + usage.ru_stime
            for usage in map(
                resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
            )
        )
        return busy, own, steal / self.ticks, (sum(fields[:8])) / self.ticks

    def percent(self) -> tuple[float, float]:
        """Shares of the machine's capacity since the start: other processes, the hypervisor."""
        busy, own, steal, total = (b - a for a, b in zip(self.begin, self._read()))
        total = max(total, 1e-9)
        return max(0.0, 100 * (busy - own) / total), 100 * steal / total


def run(command: list[str], variables: dict[str, str] | None = None) -> list[dict]:
    """The rows that a command prints; its whole process group is ended when it takes too long."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(variables or {})},
    )
    keep_priority(process)
    try:
        out, error = process.communicate(timeout=PROGRAM_TIMEOUT_S)
    except BaseException as e:
        end_group(process)
        if isinstance(e, subprocess.TimeoutExpired):
            raise ProgramFailed(f"{' '.join(command)}: over {PROGRAM_TIMEOUT_S} s") from e
        raise
    rows = [row for row in map(parse_row, out.splitlines()) if row and "size" in row]
    if process.returncode != 0 or not rows:
        raise ProgramFailed(f"{' '.join(command)}: exit {process.returncode}\n{error}{out}")
    return rows


def end_group(process: subprocess.Popen) -> None:
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sig)
            process.wait(timeout=10)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def keep_priority(process: subprocess.Popen) -> None:
    """The process has a session of its own: where the kernel groups tasks by session, `nice` counts
    between groups only when the group is told."""
    try:
        pathlib.Path(f"/proc/{process.pid}/autogroup").write_text(str(os.nice(0)))
    except OSError:
        pass  # no such groups, or not root


def parse_row(line: str) -> dict | None:
    """A JSON row, behind the rank that gradrun puts before it."""
    line = re.sub(r"^\[\d+\] ", "", line)
    return json.loads(line) if line.startswith("{") else None


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def machine_text() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.*)", cpuinfo)
    return (f"{model.group(1) if model else os.uname().machine},"
            f" {len(os.sched_getaffinity(0))} cores, Linux {os.uname().release}")


class Verdicts:
    """Target, measured, ok or MISS, a line each."""

    def __init__(self) -> None:
        self.n_missed = 0
        self.n_judged = 0

    def judge(self, what: str, target: float, measured: float | None, at_most: bool = False) -> None:
        if measured is None:
            print(f"  {what:<44} target {target:<5g} not measured")
            return
        is_met = measured <= target if at_most else measured >= target
        self.n_judged += 1
        self.n_missed += not is_met
        sign = "<=" if at_most else ">="
        print(f"  {what:<44} {sign} {target:<5g} measured {measured:7.2f}  {'ok' if is_met else 'MISS'}")


