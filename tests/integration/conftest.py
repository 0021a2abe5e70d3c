# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the integration tests: a world per test, a hard limit, and the leak check."""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path
from typing import Callable, Iterator

import pytest

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import cluster  # noqa: E402
import gradrun_site  # noqa: E402
import harness  # noqa: E402
import hostile  # noqa: E402
import netns  # noqa: E402
import ssh_hosts  # noqa: E402

LIMIT_S = 60.0


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "limit(seconds): hard limit of a test instead of the usual one",
        "timing: asserts a duration, which sanitisers distort",
        "large: moves so many bytes that sanitisers take too long",
        "tsan: exercises the worker's threads, and is quick enough for the thread sanitiser",
        "root: needs to run as root",
        "asan: worth its time under the address sanitiser (set below)",
    ):
        config.addinivalue_line("markers", line)
    if not harness.GRADD.exists():
        pytest.exit(f"{harness.GRADD} is not there: build it, or name the build in GRADD_BUILD", 4)
    harness.become_subreaper()


def is_worth_asan(item: pytest.Item) -> bool:
    """Whatever takes unusual ways through the code; of the collectives, each kind once."""
    if item.get_closest_marker("timing") or item.get_closest_marker("large"):
        return False
    if item.path.stem in ("test_gradrun", "test_digits"):
        return "private_daemon" in item.name or "ranks_aggregate" in item.name
    if item.path.stem == "test_nodes_failure":  # the chaos test has the rest, at random
        return any(name in item.name for name in ("TrainerKilled", "DaemonKilled", "still_hold"))
    if item.path.stem == "test_collectives" and "n_ranks" in getattr(item, "fixturenames", ()):
        return item.callspec.params["n_ranks"] == 3
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_worth_asan(item):
            item.add_marker(pytest.mark.asan)
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root, to act as two users"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = (yield).get_result()
    setattr(item, "report_" + report.when, report)


@pytest.fixture(autouse=True)
def hard_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test may hang: the alarm raises wherever the test waits."""
    marker = request.node.get_closest_marker("limit")
    seconds = (marker.args[0] if marker else LIMIT_S) * harness.SLOW

    def on_alarm(*_: object) -> None:
        raise TimeoutError(f"the test took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def world(request: pytest.FixtureRequest, hard_limit: None) -> Iterator[harness.World]:
    """Starts daemons and trainers; at the end asserts that nothing of them is left."""
    started = harness.World()
    yield started
    report = getattr(request.node, "report_call", None)
    is_failed = report is None or report.failed
    if is_failed:
        for daemon in started.daemons:
            print(f"--- log of gradd {daemon.pid}\n{daemon.log.text()[-6000:]}")
    started.close(is_failed)


@pytest.fixture
def make_cluster(world: harness.World) -> Callable[..., cluster.Cluster]:
    """Call it with the number of nodes and the daemons' settings."""
    reason = netns.why_not()
    if reason:
        pytest.skip(reason)
    return functools.partial(cluster.Cluster, world)


@pytest.fixture(scope="module")
def ssh_nodes() -> Iterator[ssh_hosts.SshHosts]:
    made = ssh_hosts.SshHosts(4)
    yield made
    made.close()


@pytest.fixture
def site(ssh_nodes: ssh_hosts.SshHosts, world: harness.World,
         tmp_path: Path) -> Iterator[gradrun_site.Site]:
    """Where a test runs gradrun over hosts; at the end nothing of it is left on any."""
    made = gradrun_site.Site(ssh_nodes, world, tmp_path)
    yield made
    try:
        made.assert_nothing_is_left()
    finally:
        made.close()


@pytest.fixture(scope="module")
def long_lived() -> Iterator[hostile.Honest]:
    """One daemon and one honest job for all lies of this file."""
    world = harness.World()
    try:
        yield hostile.Honest(world, job_linger_s=0)
    except BaseException:
        world.close(is_failed=True)
        raise
    world.close(is_failed=False)


@pytest.fixture
def honest(long_lived: hostile.Honest) -> Iterator[hostile.Honest]:
    """After the test the honest job works, and nothing of the liars is left in the daemon."""
    daemon_fds, worker_fds = harness.fds_of(long_lived.daemon.pid), harness.fds_of(long_lived.worker)
    n_lines = len(long_lived.daemon.log.lines)
    yield long_lived
    long_lived.assert_alive()
    harness.eventually(lambda: long_lived.daemon.worker_pids() == [long_lived.worker],
               "the workers of the liars are gone")
    harness.eventually(lambda: long_lived.daemon.admin("status") and
               len(harness.fds_of(long_lived.daemon.pid)) <= len(daemon_fds),
               f"the daemon has closed what it opened: {daemon_fds}")
    assert len(harness.fds_of(long_lived.worker)) == len(worker_fds)
    assert not harness.memfd_mappings(long_lived.daemon.pid)
    assert len(long_lived.daemon.log.lines) - n_lines < 200, "a liar can flood the log"


@pytest.fixture
def liars(honest: hostile.Honest) -> Iterator[hostile.Liars]:
    job = hostile.Liars(honest.daemon, 2)
    yield job
    job.close()
