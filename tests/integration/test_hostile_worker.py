# SPDX-License-Identifier: Apache-2.0
"""Ranks that lie to their worker: only their own job suffers."""

from __future__ import annotations

import os
from typing import Any

import pytest

import gradd_ctypes as api
from harness import World
from hostile import GARBAGE, Honest, Liars, make_memfd, register, wait_for_failure
from wire import Closed, frame


@pytest.mark.parametrize("what", list(GARBAGE))
def test_garbage_to_the_worker_fails_only_that_job(honest: Honest, liars: Liars,
                                                   what: str) -> None:
    liars.worker_side[0].send_bytes(GARBAGE[what])
    liars.worker_side[0].expect_closed()
    # The other rank of the liar's job learns whose fault it is.
    failed = wait_for_failure(liars.worker_side[1], liars.daemon_side[1])
    assert "rank 0" in failed["text"], failed


@pytest.mark.parametrize("fields", [
    {"count": 1 << 62, "ready": 1 << 62}, {"count": (1 << 64) - 1, "ready": 4},
    {"count": 1 << 63, "ready": 1 << 63}, {"count": 2049, "ready": 2049},
    {"dtype": 3}, {"dtype": 1 << 31}, {"redop": 99}, {"kind": 99}, {"name": ""},
    {"name": "n" * 256}, {"name": "n" * 100000}, {"ready": 100}, {"set": 5}, {"id": 0},
    {"kind": api.BROADCAST, "root": -1}, {"kind": api.BROADCAST, "root": 2},
    {"kind": api.BROADCAST, "root": -(1 << 31)},
    {"kind": api.ALLGATHER, "out_capacity": 1 << 62},
    {"kind": api.ALLGATHER, "out_capacity": 2048, "count": 2048},
    {"kind": api.REDUCE_SCATTER, "counts": [1 << 63, 1 << 63]},
    {"kind": api.REDUCE_SCATTER, "counts": [4]},
    {"kind": api.REDUCE_SCATTER, "counts": list(range(10000))},
    {"kind": api.ALLTOALL, "counts": [1 << 63, (1 << 63) + 4], "out_capacity": 4},
    {"kind": api.SET_ADD, "counts": [0, 0]}, {"kind": api.SET_ADD, "counts": [1 << 33]},
    {"kind": api.SET_ADD, "counts": []}, {"kind": api.SET_REMOVE, "root": 77},
    {"group": "g", "group_size": 0}, {"group": "g", "group_size": 1 << 31},
    {"group": "g" * 5000, "group_size": 2},
    {"prescale": float("nan")}, {"postscale": float("inf")},
], ids=lambda f: str(f)[:60])
@pytest.mark.parametrize("both", [False, True])
def test_submissions_that_make_no_sense(honest: Honest, liars: Liars, fields: dict[str, Any],
                                        both: bool) -> None:
    fds = [make_memfd(8192) for _ in range(2)]
    for rank in range(2):
        assert register(liars, rank, fds[rank], 8192).get("code", 0) == 0
    good = {"region": 1, "offset": 0}
    base = {"in": good, "out": good}
    liars.submit(0, **{**base, **fields})
    liars.submit(1, **{**base, **(fields if both else {})})
    for fd in fds:
        os.close(fd)
    honest.assert_alive()


def test_ids_and_names_used_twice(honest: Honest, liars: Liars) -> None:
    fds = [make_memfd(8192) for _ in range(2)]
    for rank in range(2):
        assert register(liars, rank, fds[rank], 8192).get("code", 0) == 0
    good = {"region": 1, "offset": 0}
    liars.submit(0, **{"in": good, "out": good})
    liars.submit(0, **{"in": good, "out": good, "id": 2})
    liars.submit(0, **{"in": good, "out": good, "name": "other"})
    liars.worker_side[0].send("feed_batch", epoch=liars.epoch,
                              feeds=[{"id": 77, "ready": 9}, {"id": 1, "ready": 1 << 63}])
    liars.worker_side[0].send("unregister", region=1)
    liars.worker_side[0].send("submit_batch", epoch=liars.epoch + 5, submits=[])
    liars.worker_side[0].send("hello", protocol_min=1)
    liars.worker_side[0].send("configure", job="mine")
    for fd in fds:
        os.close(fd)
    honest.assert_alive()


def test_many_ops_without_reading_completions(honest: Honest, liars: Liars) -> None:
    """A reader that stops reading is cut off; its job fails, and memory stays bounded."""
    liars.worker_side[0].sock.settimeout(0.2)
    text = "n" * 200
    batch = [{"id": i + 1, "name": f"{text}{i}", "kind": api.ALLREDUCE, "dtype": 77, "count": 4}
             for i in range(1000)]
    data = frame("submit_batch", epoch=liars.epoch, submits=batch)
    sent = 0
    try:
        for _ in range(2000):
            liars.worker_side[0].send_bytes(data)
            sent += len(data)
    except (TimeoutError, BrokenPipeError, ConnectionResetError):
        pass
    for pid in honest.daemon.worker_pids():
        with open(f"/proc/{pid}/status") as file:
            rss = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
        assert rss < 600 * 1024, f"worker {pid} grew to {rss} kB after {sent} bytes"
    honest.assert_alive()


def test_too_many_ops_in_flight_are_refused(world: World) -> None:
    honest = Honest(world, max_in_flight=8)
    liars = Liars(honest.daemon, 2)
    for i in range(20):
        liars.submit(0, id=i + 1, name=f"x{i}", count=0, ready=0)
    try:
        body, fields = liars.worker_side[0].receive()
        assert body in ("completion_batch", "error", "epoch_failed"), (body, fields)
        if body == "completion_batch":
            assert fields["completions"][0]["code"] != 0
    except Closed:
        pass
    liars.close()
    honest.assert_alive()


def test_a_liar_that_closes_only_one_of_its_sockets(honest: Honest) -> None:
    for close_worker_side in (True, False):
        liars = Liars(honest.daemon, 2)
        if close_worker_side:
            liars.worker_side[0].close()
        else:
            liars.daemon_side[0].close()
        failed = wait_for_failure(liars.worker_side[1], liars.daemon_side[1])
        assert "rank 0" in failed["text"], failed
        liars.close()
        honest.assert_alive()


def test_half_a_leave_is_no_leave(honest: Honest) -> None:
    """Leave to the worker alone, then silence and end of stream to the daemon."""
    liars = Liars(honest.daemon, 2)
    liars.worker_side[0].send("leave")
    liars.daemon_side[0].close()
    liars.worker_side[1].send("leave")
    liars.daemon_side[1].send("leave")
    liars.daemon_side[1].expect("left")
    liars.close()
