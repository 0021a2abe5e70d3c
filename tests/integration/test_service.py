# SPDX-License-Identifier: Apache-2.0
"""gradd as a service: socket activation, readiness, watchdog, reload, drain, units, config file."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Iterator

import pytest

from gradd_ctypes import STATUS
from harness import (
    BUILD, GRADD, REPLY_S, SANITIZER, LineReader, World, daemon_environment, eventually, fds_of,
    no_randomisation, settle,
)
from wire import RawConnection

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd's tools are not installed")


class Notify:
    """The service manager's end of NOTIFY_SOCKET."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(path)
        os.chmod(path, 0o777)
        self.seen: list[str] = []

    def wait_for(self, pattern: str, timeout_s: float = REPLY_S) -> str:
        """The next message with such a line."""
        deadline = time.monotonic() + timeout_s
        while True:
            ready, _, _ = select.select([self.sock], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"no notification {pattern!r}; came: {self.seen}")
            text = self.sock.recv(65536).decode()
            self.seen.append(text)
            if re.search(pattern, text, re.M):
                return text


class Service:
    """A gradd with a config file, started by systemd-socket-activate or by itself."""

    def __init__(self, home: Path, config: str = "", activated: bool = False,
                 watchdog_s: float = 0) -> None:
        self.home = home
        self.socket = str(home / "s")
        self.config = home / "gradd.conf"
        self.config.write_text(config)
        self.notify = Notify(str(home / "notify"))
        environment = daemon_environment(NOTIFY_SOCKET=self.notify.path)
        command = no_randomisation() + [str(GRADD), "--config", str(self.config)]
        if watchdog_s:
            environment["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        if activated:
            command = ["systemd-socket-activate", "--listen", self.socket, "-E",
                       f"NOTIFY_SOCKET={self.notify.path}"] + command
            for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"):
                if name in os.environ:
                    command[3:3] = ["-E", name]
        else:
            command += ["--set", f"socket={self.socket}"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        text=True, env=environment)
        self.log = LineReader(self.process.stderr)

    def status(self) -> dict[str, object]:
        with RawConnection.connect(self.socket, REPLY_S) as connection:
            connection.hello("admin")
            connection.send("status_request")
            return connection.expect("status_reply")

    def option(self, key: str) -> dict[str, object]:
        with RawConnection.connect(self.socket, REPLY_S) as connection:
            connection.hello("admin")
            connection.send("config_request")
            rows = connection.expect("config_reply")["options"]
        return next(row for row in rows if row["key"] == key)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(REPLY_S)
        self.notify.sock.close()
        self.log.thread.join(5)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    # The path of a socket must be short.
    path = Path("/tmp") / f"gradd-service-{os.getpid()}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def service(home: Path, world: World) -> Iterator[object]:
    started: list[Service] = []

    def start(**how: object) -> Service:
        started.append(Service(home, **how))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_readiness_status_and_stopping_are_notified(service, world: World) -> None:
    gradd = service()
    ready = gradd.notify.wait_for(r"^READY=1$")
    assert re.search(r"^STATUS=.+", ready, re.M)
    # READY means that a connection is accepted.
    assert gradd.status()["state"] == "running"
    gradd.process.terminate()
    gradd.notify.wait_for(r"^STOPPING=1$")
    assert gradd.process.wait(REPLY_S) == 0
    assert not os.path.exists(gradd.socket)


def test_the_watchdog_is_fed_from_the_loop(service) -> None:
    gradd = service(watchdog_s=0.3)
    gradd.notify.wait_for(r"^READY=1$")
    for _ in range(4):
        gradd.notify.wait_for(r"^WATCHDOG=1$", 1.0)
    # A daemon whose loop does not turn must not feed it.
    os.kill(gradd.process.pid, signal.SIGSTOP)
    with pytest.raises(AssertionError):
        for _ in range(5):
            gradd.notify.wait_for(r"^WATCHDOG=1$", 0.6)
    os.kill(gradd.process.pid, signal.SIGCONT)
    gradd.notify.wait_for(r"^WATCHDOG=1$", 5.0)


def test_sighup_reloads_and_says_so(service) -> None:
    gradd = service(config="[job]\nstall_warn_s = 11\n")
    gradd.notify.wait_for(r"^READY=1$")
    assert gradd.option("stall_warn_s")["value"] == "11"
    assert str(gradd.config) in str(gradd.option("stall_warn_s")["source"])
    gradd.config.write_text("[job]\nstall_warn_s = 22\n")
    gradd.process.send_signal(signal.SIGHUP)
    reloading = gradd.notify.wait_for(r"^RELOADING=1$")
    assert re.search(r"^MONOTONIC_USEC=\d+$", reloading, re.M)
    gradd.notify.wait_for(r"^READY=1$")
    assert gradd.option("stall_warn_s")["value"] == "22"


def test_a_broken_file_on_reload_changes_nothing_and_is_shown(service) -> None:
    gradd = service(config="[job]\nstall_warn_s = 11\n")
    gradd.notify.wait_for(r"^READY=1$")
    gradd.config.write_text("[job]\nstall_warn_s = 22\nnonsense = 1\n")
    gradd.process.send_signal(signal.SIGHUP)
    gradd.notify.wait_for(r"^RELOADING=1$")
    again = gradd.notify.wait_for(r"^READY=1$")
    assert "gradd.conf:3" in again
    assert gradd.option("stall_warn_s")["value"] == "11"
    error = gradd.status()["config_error"]
    assert "gradd.conf:3" in error and "nonsense" in error, error


@needs_systemd
def test_socket_activation_serves_the_passed_socket(service, world: World) -> None:
    gradd = service(activated=True)
    eventually(lambda: os.path.exists(gradd.socket), "systemd-socket-activate listens")
    # The first connection starts the daemon, and is answered.
    assert gradd.status()["state"] == "running"
    gradd.notify.wait_for(r"^READY=1$")
    trainers = [world.trainer(None) for _ in range(2)]
    for rank, trainer in enumerate(trainers):
        trainer.send("init", rank=rank, size=2, job="job", socket=gradd.socket)
    assert [t.reply()["status"] for t in trainers] == [0, 0]
    assert [r["status"] for r in settle(trainers, "barrier")] == [0, 0]
    settle(trainers, "shutdown")
    gradd.process.terminate()
    assert gradd.process.wait(REPLY_S) == 0
    # The socket belongs to the service manager: it stays.
    assert os.path.exists(gradd.socket)


def test_sigterm_waits_for_the_jobs(service, world: World) -> None:
    gradd = service()
    gradd.notify.wait_for(r"^READY=1$")
    trainers = [world.trainer(None) for _ in range(2)]
    for rank, trainer in enumerate(trainers):
        trainer.send("init", rank=rank, size=2, job="job", socket=gradd.socket)
    assert [t.reply()["status"] for t in trainers] == [0, 0]
    gradd.process.terminate()
    stopping = gradd.notify.wait_for(r"^STOPPING=1$")
    assert re.search(r"^EXTEND_TIMEOUT_USEC=\d+$", stopping, re.M)
    assert re.search(r"^STATUS=draining 1 job$", stopping, re.M), stopping
    assert [r["status"] for r in settle(trainers, "barrier")] == [0, 0]
    settle(trainers, "shutdown")
    assert gradd.process.wait(REPLY_S) == 0


def test_a_second_daemon_does_not_steal_the_socket(service, world: World, home: Path) -> None:
    first = service()
    first.notify.wait_for(r"^READY=1$")
    second = subprocess.run(
        no_randomisation() + [str(GRADD), "--config", str(first.config), "--set",
                              f"socket={first.socket}"],
        capture_output=True, text=True, timeout=REPLY_S, env=daemon_environment())
    assert second.returncode != 0
    assert first.socket in second.stderr
    assert first.status()["state"] == "running"


def test_a_stale_socket_is_replaced(service, home: Path) -> None:
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(str(home / "s"))
    stale.close()
    gradd = service()
    gradd.notify.wait_for(r"^READY=1$")
    assert gradd.status()["state"] == "running"


def test_a_file_in_place_of_the_socket_is_left_alone(home: Path) -> None:
    path = home / "precious"
    path.write_text("keep")
    result = subprocess.run(
        no_randomisation() + [str(GRADD), "--config", "/dev/null", "--set", f"socket={path}"],
        capture_output=True, text=True, timeout=REPLY_S, env=daemon_environment())
    assert result.returncode != 0
    assert path.read_text() == "keep"


CONFIG_ERRORS = {
    "unknown key": ("[job]\nno_such_key = 1\n", 2, "no_such_key"),
    "unknown section": ("\n[nope]\nx = 1\n", 3, "nope"),
    "key in another section": ("[daemon]\nstall_warn_s = 1\n", 2, "stall_warn_s"),
    "bad number": ("[job]\n\nworker_threads = many\n", 3, "worker_threads"),
    "out of range": ("[job]\nworker_threads = 100000\n", 2, "worker_threads"),
    "negative": ("[job]\nstall_warn_s = -1\n", 2, "stall_warn_s"),
    "bad bytes": ("[job]\njob_memory_bytes = 5Q\n", 2, "job_memory_bytes"),
    "bad level": ("[daemon]\nlog_level = loud\n", 2, "log_level"),
    "no ini": ("[job]\nthis is no setting\n", 2, ""),
    "empty value": ("[job]\nworker_threads =\n", 2, "worker_threads"),
    "twice": ("[job]\nworker_threads = 1\nworker_threads = 2\n", 3, "worker_threads"),
}


@pytest.mark.parametrize("what", list(CONFIG_ERRORS))
def test_a_config_error_names_file_and_line(home: Path, what: str) -> None:
    text, line, word = CONFIG_ERRORS[what]
    path = home / "bad.conf"
    path.write_text(text)
    for arguments in (["--check-config", str(path)], ["--config", str(path)]):
        result = subprocess.run(no_randomisation() + [str(GRADD), *arguments],
                                capture_output=True, text=True, timeout=REPLY_S,
                                env=daemon_environment())
        assert result.returncode not in (0, -6, -11), (arguments, result)
        assert f"{path}:{line}" in result.stderr + result.stdout, result
        assert word in result.stderr + result.stdout, result


def test_the_shipped_config_file_is_valid(home: Path) -> None:
    shipped = Path(__file__).resolve().parents[2] / "deploy/gradd.conf"
    result = subprocess.run(no_randomisation() + [str(GRADD), "--check-config", str(shipped)],
                            capture_output=True, text=True, timeout=REPLY_S)
    assert result.returncode == 0, result.stderr


def units(home: Path) -> Path:
    """The units as installed, with the program where it really is."""
    target = home / "units"
    target.mkdir()
    service = (BUILD / "deploy/gradd.service").read_text()
    service = re.sub(r"^ExecStart=\S+", f"ExecStart={GRADD}", service, flags=re.M)
    (target / "gradd.service").write_text(service)
    shutil.copy(Path(__file__).resolve().parents[2] / "deploy/systemd/gradd.socket", target)
    return target


@needs_systemd
def test_systemd_verifies_the_units(home: Path) -> None:
    directory = units(home)
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(directory / "gradd.service"),
         str(directory / "gradd.socket")], capture_output=True, text=True, timeout=60)
    # It also reports other units of the machine.
    ours = [line for line in (result.stderr + result.stdout).splitlines() if "gradd" in line]
    assert not ours, ours


@needs_systemd
def test_the_service_is_exposed_to_three_at_most(home: Path) -> None:
    directory = units(home)
    result = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", "--no-pager",
         str(directory / "gradd.service")], capture_output=True, text=True, timeout=60)
    print("\n".join(result.stdout.splitlines()[-2:]))
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_service_keeps_the_directory_of_its_socket(home: Path) -> None:
    text = (BUILD / "deploy/gradd.service").read_text()
    assert not re.search(r"^RuntimeDirectory\s*=", text, re.M)
    for line in ("Type=notify", "WatchdogSec="):
        assert line in text
