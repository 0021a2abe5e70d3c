# SPDX-License-Identifier: Apache-2.0
"""Memory that liars give to their worker: regions that would hurt it, buffers outside of them, more
than the quota, and files that change under it."""

from __future__ import annotations

import fcntl
import os

import pytest

from harness import World, eventually, memfd_mappings
from hostile import Honest, Liars, expect_refused_region, make_memfd, register
from wire import Closed


def test_regions_that_would_hurt_the_worker_are_refused(honest: Honest, liars: Liars) -> None:
    unsealed = make_memfd(8192, seals=0)
    expect_refused_region(register(liars, 0, unsealed, 8192), "seal")
    small = make_memfd(4096)
    expect_refused_region(register(liars, 0, small, 8192), "4096", "8192")
    grown = make_memfd(8192)
    expect_refused_region(register(liars, 0, grown, 0))
    expect_refused_region(register(liars, 0, grown, 1 << 62))
    expect_refused_region(register(liars, 0, grown, (1 << 64) - 1))
    expect_refused_region(register(liars, 0, grown, 8192, region=0))
    pipe_read, pipe_write = os.pipe()
    expect_refused_region(register(liars, 0, pipe_read, 4096))
    directory = os.open("/", os.O_RDONLY)
    expect_refused_region(register(liars, 0, directory, 4096))
    null = os.open("/dev/zero", os.O_RDWR)
    expect_refused_region(register(liars, 0, null, 4096))
    write_sealed = make_memfd(8192, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    reply = register(liars, 0, write_sealed, 8192)
    assert reply.get("code", 0) != 0, reply
    # An honest one passes after all that, and its number is taken.
    assert register(liars, 0, grown, 8192).get("code", 0) == 0
    expect_refused_region(register(liars, 0, grown, 8192))
    for fd in (unsealed, small, grown, pipe_read, pipe_write, directory, null, write_sealed):
        os.close(fd)
    liars.worker_side[0].send("unregister", region=1)
    assert liars.worker_side[0].expect("region_reply").get("code", 0) == 0
    liars.worker_side[0].send("unregister", region=99)
    expect_refused_region(liars.worker_side[0].expect("region_reply"))


def test_a_register_without_its_fd_is_refused(honest: Honest, liars: Liars) -> None:
    liars.worker_side[0].send("register", region=1, bytes=4096)
    try:
        body, fields = liars.worker_side[0].receive()
        assert body == "region_reply" and fields["code"] != 0
    except Closed:
        pass


BOUNDS = {
    "past the end": {"offset": 8192 - 12},
    "far past the end": {"offset": 1 << 40},
    "offset overflow": {"offset": (1 << 64) - 8},
    "unknown region": {"region": 7},
    "no region": {"region": 0},
    "ring of nothing": {"offset": 8192, "ring_bytes": 1},
    "ring overflow": {"offset": 4096, "ring_bytes": (1 << 64) - 1},
    "misaligned": {"offset": 3},
}


@pytest.mark.parametrize("side", ["in", "out"])
def test_a_ring_that_leaves_its_region_is_refused(honest: Honest, liars: Liars, side: str) -> None:
    fds = [make_memfd(8192) for _ in range(2)]
    for rank in range(2):
        assert register(liars, rank, fds[rank], 8192).get("code", 0) == 0
        os.close(fds[rank])
    good = {"region": 1, "offset": 0}
    bad = {"region": 1, "offset": 4096, "ring_bytes": 8192}
    liars.submit(0, **{"in": good, "out": good, side: bad, "count": 2000, "ready": 1000})
    liars.submit(1, **{"in": good, "out": good, "count": 2000, "ready": 2000})
    expect_op_refused_or_harmless(honest, liars, "ring")


@pytest.mark.parametrize("side", ["in", "out"])
@pytest.mark.parametrize("what", list(BOUNDS))
def test_buffers_outside_their_region_are_refused(honest: Honest, liars: Liars, what: str,
                                                  side: str) -> None:
    fds = [make_memfd(8192) for _ in range(2)]
    for rank in range(2):
        assert register(liars, rank, fds[rank], 8192).get("code", 0) == 0
    good = {"region": 1, "offset": 0}
    bad = {**good, **BOUNDS[what]}
    liars.submit(0, **{"in": good, "out": good, side: bad})
    liars.submit(1, **{"in": good, "out": good})
    expect_op_refused_or_harmless(honest, liars, what)
    for fd in fds:
        os.close(fd)


def expect_op_refused_or_harmless(honest: Honest, liars: Liars, what: str) -> None:
    """The liar's op fails in words, or the liar is cut off; a misaligned one may even work."""
    try:
        body, fields = liars.worker_side[0].receive()
    except Closed:
        return
    if body == "completion_batch":
        completion = fields["completions"][0]
        if what != "misaligned":
            assert completion.get("code", 0) != 0, completion
            assert completion["text"], completion
    else:
        assert body in ("error", "epoch_failed"), (body, fields)
    honest.assert_alive()


def test_a_liar_can_not_truncate_its_memfd_under_the_worker(honest: Honest,
                                                            liars: Liars) -> None:
    fds = [make_memfd(8192) for _ in range(2)]
    for rank in range(2):
        assert register(liars, rank, fds[rank], 8192).get("code", 0) == 0
    with pytest.raises(PermissionError):
        os.ftruncate(fds[0], 0)
    good = {"region": 1, "offset": 0}
    for rank in range(2):
        liars.submit(rank, **{"in": good, "out": good})
    assert liars.completion(0).get("code", 0) == 0
    for fd in fds:
        os.close(fd)


def test_a_punched_hole_in_the_memfd_reads_as_zeros(honest: Honest, liars: Liars) -> None:
    fds = [make_memfd(8192) for _ in range(2)]
    for rank in range(2):
        assert register(liars, rank, fds[rank], 8192).get("code", 0) == 0
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size, punch_hole = 1, 2
    assert libc.fallocate(fds[0], keep_size | punch_hole, ctypes.c_long(0),
                          ctypes.c_long(8192)) == 0
    good = {"region": 1, "offset": 0}
    for rank in range(2):
        liars.submit(rank, **{"in": good, "out": good})
    assert liars.completion(0).get("code", 0) == 0
    for fd in fds:
        os.close(fd)


def test_the_quota_of_a_job_holds_over_all_its_ranks(world: World) -> None:
    honest = Honest(world, job_memory_bytes="1M")
    liars = Liars(honest.daemon, 2)
    fd = make_memfd(1 << 20)
    half = make_memfd(1 << 19)
    assert register(liars, 0, half, 1 << 19).get("code", 0) == 0
    expect_refused_region(register(liars, 1, fd, 1 << 20))
    assert register(liars, 1, half, 1 << 19).get("code", 0) == 0
    expect_refused_region(register(liars, 1, half, 1 << 19, region=2))
    liars.worker_side[0].send("unregister", region=1)
    assert liars.worker_side[0].expect("region_reply").get("code", 0) == 0
    eventually(lambda: register(liars, 1, half, 1 << 19, region=2).get("code", 0) == 0,
               "the freed quota can be used")
    os.close(fd)
    os.close(half)
    liars.close()
    honest.assert_alive()


def test_the_honest_worker_keeps_no_mapping_of_liars(honest: Honest) -> None:
    before = len(memfd_mappings(honest.worker))
    liars = Liars(honest.daemon, 2)
    fd = make_memfd(1 << 20)
    assert register(liars, 0, fd, 1 << 20).get("code", 0) == 0
    os.close(fd)
    liars.close()
    honest.assert_alive()
    assert len(memfd_mappings(honest.worker)) == before
