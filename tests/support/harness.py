# SPDX-License-Identifier: Apache-2.0
"""Real gradd processes for tests: a daemon on a private socket, trainers that a test steps.

Everything that a test starts is known here and is gone at its end, whatever happened. Waiting is
for events (a reply, a log line, the end of a process) and always bounded.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterable

from wire import RawConnection

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("GRADD_BUILD", ROOT / "build")).resolve()
SANITIZER = os.environ.get("GRADD_SANITIZER", "")
GRADD = BUILD / "daemon/control/gradd"
WORKER = BUILD / "daemon/worker/gradd-worker"
GRADCTL = BUILD / "client/cli/gradctl"
GRADRUN = BUILD / "client/run/gradrun"
DIGITS = BUILD / "client/examples/digits"
SUPPORT = ROOT / "tests/support"
PYTHON = "/usr/bin/python3"

# Sanitised programs are several times slower.
SLOW = 6.0 if SANITIZER else 1.0
REPLY_S = 20.0 * SLOW
SANITIZER_REPORT = re.compile(
    r"ERROR: (Address|Leak)Sanitizer|WARNING: ThreadSanitizer|runtime error:|Assertion .* failed"
)
PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Orphans of this process's children come to it, so that none can be overlooked."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    pids: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                pids += [int(word) for word in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass
    return pids


def state_of(pid: int) -> str:
    """The letter of /proc/PID/stat, or "" when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def shut_down_socket(pid: int, fd: int) -> None:
    """End a socket of another process, which lives on."""
    pidfd = os.pidfd_open(pid)
    own = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, fd, 0)  # SYS_pidfd_getfd
    os.close(pidfd)
    assert own >= 0, os.strerror(ctypes.get_errno())
    with socket.socket(fileno=own) as end:
        end.shutdown(socket.SHUT_RDWR)


def fds_of(pid: int) -> dict[int, str]:
    result = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            result[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            pass
    return result


def memfd_mappings(pid: int) -> list[str]:
    with open(f"/proc/{pid}/maps") as maps:
        return [line.strip() for line in maps if "/memfd:" in line]


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status_of(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


def wait_for_exit(pid: int, timeout_s: float = REPLY_S) -> bool:
    """Wait until a process that need not be our child has ended (a zombie has not)."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([pidfd], [], [], timeout_s)
        return bool(ready)
    finally:
        os.close(pidfd)


def eventually(predicate: Any, what: str, timeout_s: float = REPLY_S) -> Any:
    """For state that has no event to wait for: ask again until it holds."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"never came true: {what}")
        time.sleep(0.01)


class LineReader:
    """The lines that a process writes, collected by a thread and waited for by the test."""

    def __init__(self, stream: Any) -> None:
        self.lines: list[str] = []
        self.is_over = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, args=(stream,), daemon=True)
        self.thread.start()

    def _run(self, stream: Any) -> None:
        for line in stream:
            with self.changed:
                self.lines.append(line.rstrip("\n"))
                self.changed.notify_all()
        stream.close()
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = REPLY_S, start: int = 0) -> str:
        regex = re.compile(pattern)
        deadline = time.monotonic() + timeout_s
        at = start
        with self.changed:
            while True:
                while at < len(self.lines):
                    if regex.search(self.lines[at]):
                        return self.lines[at]
                    at += 1
                left = deadline - time.monotonic()
                if self.is_over or left <= 0:
                    text = "\n".join(self.lines[-40:])
                    raise AssertionError(f"no line matches {pattern!r} in:\n{text}")
                self.changed.wait(left)

    def text(self) -> str:
        with self.changed:
            return "\n".join(self.lines)


def sanitizer_runtime(name: str) -> str:
    path = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True,
                          check=True).stdout.strip()
    return os.path.realpath(path)


def client_environment() -> dict[str, str]:
    """For Python programs that load libgradd."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADD_")}
    environment["GRADD_BUILD"] = str(BUILD)
    environment["PYTHONPATH"] = str(SUPPORT)
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    environment["OPENBLAS_NUM_THREADS"] = "1"
    if SANITIZER == "address":
        # The interpreter is not sanitised and never frees all it has.
        environment["LD_PRELOAD"] = sanitizer_runtime("libasan.so")
        environment["ASAN_OPTIONS"] = "detect_leaks=0:verify_asan_link_order=0"
    elif SANITIZER == "thread":
        environment["LD_PRELOAD"] = sanitizer_runtime("libtsan.so")
        # Python's own threads synchronise in ways that are not instrumented.
        environment["TSAN_OPTIONS"] = "report_bugs=0"
    return environment


def daemon_environment(**extra: str) -> dict[str, str]:
    drop = ("GRADD_", "NOTIFY_SOCKET", "LISTEN_", "WATCHDOG_", "JOURNAL_STREAM")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    environment.update(extra)
    return environment


def no_randomisation() -> list[str]:
    """The thread sanitiser needs its address ranges free."""
    return ["setarch", "-R"] if SANITIZER == "thread" else []


class Trainer:
    """One trainer process. call() waits for the reply; send() and reply() are its halves."""

    def __init__(self, daemon: "Daemon | None", uid: int | None = None,
                 environment: dict[str, str] | None = None, n_fds: int | None = None,
                 prefix: Iterable[str] = (), script: str = "trainer.py") -> None:
        command = [*prefix] + no_randomisation() + [PYTHON, str(SUPPORT / script)]
        if uid is not None:
            command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] + command
        if n_fds is not None:
            command = ["prlimit", f"--nofile={n_fds}:{n_fds}"] + command
        self.daemon = daemon
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**client_environment(), **(environment or {})})
        self.errors = LineReader(self.process.stderr)
        self.pending = 0
        self.buffer = b""
        self.is_done = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        self.process.stdin.flush()
        self.pending += 1

    def reply(self, timeout_s: float = REPLY_S) -> Any:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([fd], [], [], left)
            if not ready:
                raise AssertionError(f"trainer {self.pid} did not reply within {timeout_s} s\n"
                                     + self.errors.text())
            piece = os.read(fd, 1 << 16)
            if not piece:
                raise AssertionError(f"trainer {self.pid} ended instead of replying\n"
                                     + self.errors.text())
            self.buffer += piece
        line, _, self.buffer = self.buffer.partition(b"\n")
        self.pending -= 1
        message = json.loads(line)
        assert "raised" not in message, message["raised"] + self.errors.text()
        return message["ok"]

    def has_reply(self) -> bool:
        assert self.process.stdout is not None
        if b"\n" in self.buffer:
            return True
        ready, _, _ = select.select([self.process.stdout.fileno()], [], [], 0)
        return bool(ready)

    def call(self, command: str, **arguments: Any) -> Any:
        self.send(command, **arguments)
        return self.reply()

    def init_arguments(self, rank: int, size: int, job: str, **more: Any) -> dict[str, Any]:
        socket = self.daemon.socket if self.daemon else None
        return {"rank": rank, "size": size, "job": job, "socket": socket, **more}

    def kill(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.process.wait(REPLY_S)

    def finish(self) -> int:
        """End of requests: the interpreter ends as a program that returns from main."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.close()
        self.is_done = True
        return self.process.wait(REPLY_S)

    def destroy(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(REPLY_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
        self.errors.thread.join(REPLY_S)


class Daemon:
    """A gradd of this build on a socket of its own. prefix: words before the command."""

    def __init__(self, settings: dict[str, Any] | None = None, n_fds: int | None = None,
                 environment: dict[str, str] | None = None, prefix: Iterable[str] = ()) -> None:
        self.home = tempfile.mkdtemp(prefix="gradd-test-")
        self.dir = os.path.join(self.home, "d")
        os.mkdir(self.dir, 0o755)
        os.chmod(self.home, 0o755)
        self.socket = os.path.join(self.dir, "gradd.sock")
        lifeline_read, self.lifeline = os.pipe()
        ready_read, ready_write = os.pipe()
        command = [*prefix] + no_randomisation() + [
            str(GRADD), "--private", self.dir, "--lifeline", str(lifeline_read),
            "--ready-fd", str(ready_write), "--log-level", "debug"]
        # Short, so that the end of a test need not wait for it.
        for key, value in {"job_linger_s": 0.1, **(settings or {})}.items():
            command += ["--set", f"{key}={value}"]
        if n_fds is not None:
            command = ["prlimit", f"--nofile={n_fds}:{n_fds}"] + command
        self.process = subprocess.Popen(
            command, pass_fds=(lifeline_read, ready_write), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            env=daemon_environment(**(environment or {})))
        os.close(lifeline_read)
        os.close(ready_write)
        self.log = LineReader(self.process.stderr)
        ready, _, _ = select.select([ready_read], [], [], REPLY_S)
        line = os.read(ready_read, 64) if ready else b""
        os.close(ready_read)
        if not line.endswith(b"\n"):
            self.destroy()
            raise AssertionError("gradd did not start:\n" + self.log.text())
        self.fds_at_start = fds_of(self.pid)
        self.n_more_fds = 0  # that may stay: links to other nodes

    @property
    def pid(self) -> int:
        return self.process.pid

    def connect(self) -> RawConnection:
        return RawConnection.connect(self.socket, REPLY_S)

    def admin(self, request: str, **fields: Any) -> dict[str, Any]:
        """One admin request on a connection of its own: also a proof that the daemon is alive."""
        with self.connect() as connection:
            connection.hello("admin")
            connection.send(request + "_request", **fields)
            return connection.expect(request + "_reply")

    def jobs(self) -> list[dict[str, Any]]:
        return self.admin("jobs").get("jobs", [])

    def wait_joined(self, job: str, n: int, uid: int | None = None) -> None:
        """Until n ranks of the job wait for the others."""
        uid = os.getuid() if uid is None else uid
        eventually(lambda: [j for j in self.jobs() if j["name"] == job and
                            j.get("uid", 0) == uid and j.get("n_joined", 0) >= n],
                   f"{n} ranks have joined {job}")

    def worker_pids(self) -> list[int]:
        return [pid for pid in children_of(self.pid) if state_of(pid) not in ("", "Z")]

    def worker_pid(self) -> int:
        pids = self.worker_pids()
        assert len(pids) == 1, f"workers: {pids}"
        return pids[0]

    def gradctl(self, *arguments: str, socket: str | None = None,
                uid: int | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(GRADCTL), *arguments]
        if uid is not None:
            command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] + command
        environment = daemon_environment(GRADD_SOCKET=socket or self.socket)
        return subprocess.run(no_randomisation() + command, capture_output=True, text=True,
                              timeout=REPLY_S, env=environment)

    def gradctl_json(self, *arguments: str) -> Any:
        result = self.gradctl("--json", *arguments)
        assert result.returncode in (0, 5), result.stderr + result.stdout
        return json.loads(result.stdout)

    def assert_idle(self) -> None:
        """No worker, no zombie, and the descriptors of the start."""
        for pid in children_of(self.pid):
            assert wait_for_exit(pid), f"process {pid} stays under the daemon"

        def is_clean() -> bool:
            self.admin("status")
            return not children_of(self.pid) and \
                len(fds_of(self.pid)) <= len(self.fds_at_start) + self.n_more_fds

        try:
            eventually(is_clean, "as many descriptors as at the start, no child")
        except AssertionError as error:
            now = fds_of(self.pid)
            raise AssertionError(
                f"leaked: children {children_of(self.pid)}, descriptors at start "
                f"{self.fds_at_start}, now {now}\n{self.log.text()[-3000:]}") from error
        assert not memfd_mappings(self.pid)

    def stop(self) -> int:
        """Close the lifeline: the daemon drains, removes its socket and directory and ends."""
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        return self.process.wait(REPLY_S)

    def destroy(self) -> None:
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(REPLY_S)
        self.log.thread.join(5.0)
        shutil.rmtree(self.home, ignore_errors=True)


class World:
    """What one test has started. close() ends it and asserts that nothing is left."""

    open_worlds: list["World"] = []

    def __init__(self) -> None:
        World.open_worlds.append(self)
        self.daemons: list[Daemon] = []
        self.trainers: list[Trainer] = []
        self.others: list[subprocess.Popen[Any]] = []
        self.on_destroy: list[Callable[[], list[str]]] = []  # each returns what is wrong

    def daemon(self, *, n_fds: int | None = None, environment: dict[str, str] | None = None,
               prefix: Iterable[str] = (), **settings: Any) -> Daemon:
        daemon = Daemon(settings, n_fds, environment, prefix)
        self.daemons.append(daemon)
        return daemon

    def trainer(self, daemon: Daemon | None, **how: Any) -> Trainer:
        trainer = Trainer(daemon, **how)
        self.trainers.append(trainer)
        return trainer

    def job(self, daemon: Daemon, n: int, job: str = "job", **how: Any) -> list[Trainer]:
        """n trainers that have joined."""
        trainers = [self.trainer(daemon, **how) for _ in range(n)]
        for result in self.join(trainers, job):
            assert result["status"] == 0, result
        return trainers

    @staticmethod
    def join(trainers: list[Trainer], job: str = "job") -> list[dict[str, Any]]:
        for rank, trainer in enumerate(trainers):
            trainer.send("init", **trainer.init_arguments(rank, len(trainers), job))
        return [trainer.reply() for trainer in trainers]

    def popen(self, *arguments: Any, **how: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen(*arguments, **how)
        self.others.append(process)
        return process

    def leave(self) -> None:
        """All trainers that still live end in order."""
        for trainer in self.trainers:
            if trainer.process.poll() is None and not trainer.is_done:
                while trainer.pending:
                    trainer.reply()
                trainer.send("shutdown_all")
        for trainer in self.trainers:
            if trainer.process.poll() is None and not trainer.is_done:
                trainer.reply()
                assert trainer.finish() == 0, trainer.errors.text()

    def close(self, is_failed: bool) -> None:
        problems: list[str] = []
        try:
            if not is_failed:
                self.leave()
                for daemon in self.daemons:
                    if daemon.process.poll() is None:
                        daemon.assert_idle()
                        code = daemon.stop()
                        if code != 0:
                            problems.append(f"gradd ended with {code}\n{daemon.log.text()[-3000:]}")
                        if os.path.exists(daemon.dir):
                            problems.append(f"left behind: {os.listdir(daemon.dir)}")
        finally:
            self.destroy(problems)
        assert not problems, "\n".join(problems)

    def pids(self) -> set[int]:
        started = [*self.trainers, *self.daemons, *self.others]
        return {process.pid for process in started}

    def destroy(self, problems: list[str]) -> None:
        for process in self.others:
            if process.poll() is None:
                process.kill()
                process.wait(REPLY_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    stream.close()
        for trainer in self.trainers:
            trainer.destroy()
        for daemon in self.daemons:
            daemon.destroy()
        World.open_worlds.remove(self)
        for source in [t.errors for t in self.trainers] + [d.log for d in self.daemons]:
            if SANITIZER_REPORT.search(source.text()):
                problems.append("a sanitiser or an assertion reported:\n" + source.text()[-6000:])
        problems += adopt_orphans()
        for function in self.on_destroy:
            problems += function()


def adopt_orphans() -> list[str]:
    """Reap what came to this process; what still runs is a leak, and is ended."""
    problems = []
    known = {pid for world in World.open_worlds for pid in world.pids()}
    for pid in set(children_of(os.getpid())) - known:
        command = Path(f"/proc/{pid}/cmdline")
        words = command.read_bytes().replace(b"\0", b" ").decode() if command.exists() else "?"
        if not wait_for_exit(pid, 5.0):
            problems.append(f"process {pid} was left behind: {words}")
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass
    return problems


def settle(trainers: Iterable[Trainer], command: str, **arguments: Any) -> list[Any]:
    """The same command on all trainers at once; their replies in rank order."""
    trainers = list(trainers)
    for trainer in trainers:
        trainer.send(command, **arguments)
    return [trainer.reply() for trainer in trainers]
