# SPDX-License-Identifier: Apache-2.0
"""Clients that lie to the daemon: bytes, messages and descriptors that make no sense, and more of
them than allowed. Whatever they send, the daemon and the other jobs live, and nothing of the liar
stays."""

from __future__ import annotations

import os
import random
import socket
import time
from typing import Any

import pytest

import wire
from harness import World, eventually, fds_of
from hostile import GARBAGE, Honest, Liars, make_memfd
from wire import Closed, RawConnection, frame


@pytest.mark.parametrize("what", list(GARBAGE))
def test_garbage_to_the_daemon_ends_only_that_connection(honest: Honest, what: str) -> None:
    for after_hello in (False, True):
        with honest.daemon.connect() as liar:
            if after_hello:
                liar.hello()
            liar.send_bytes(GARBAGE[what])
            liar.expect_closed()
        honest.assert_alive()


def test_one_byte_at_a_time_is_slow_but_right(honest: Honest) -> None:
    with honest.daemon.connect() as patient:
        data = frame("hello", protocol_min=1, protocol_max=1, program="slow", version="0")
        patient.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        for i in range(len(data)):
            patient.send_bytes(data[i : i + 1])
        assert patient.expect("hello_reply")["protocol"] == 1
        join = frame("join", job="alone", rank=0, size=1)
        for i in range(len(join)):
            patient.send_bytes(join[i : i + 1])
        assert patient.expect("joined")["size"] == 1


def test_a_connection_that_closes_in_the_middle_of_a_frame(honest: Honest) -> None:
    data = frame("hello", protocol_min=1, protocol_max=1, program="x", version="0")
    for cut in range(len(data)):
        with honest.daemon.connect() as liar:
            liar.send_bytes(data[:cut])


def test_many_connections_that_say_nothing(honest: Honest) -> None:
    silent = [honest.daemon.connect() for _ in range(200)]
    honest.assert_alive()
    for connection in silent:
        connection.close()


def test_fds_where_none_belong_are_closed(honest: Honest, liars: Liars) -> None:
    fd = make_memfd(4096)
    for n in (1, 4, 30):
        with honest.daemon.connect() as liar:
            liar.send_bytes(frame("hello", protocol_min=1, protocol_max=1), [fd] * n)
            liar.expect_closed()
    with honest.daemon.connect() as liar:
        # Declared, so the codec passes it on; but this message has no use for it.
        liar.send("hello", fds=[fd], protocol_min=1, protocol_max=1, program="x", version="0")
        try:
            liar.receive()
        except Closed:
            pass
        honest.assert_alive()
        assert not [x for x in fds_of(honest.daemon.pid).values() if "memfd:liar" in x]
    liars.submit(0)
    liars.worker_side[0].send_bytes(
        frame("feed_batch", epoch=liars.epoch), [fd, fd])
    liars.worker_side[0].expect_closed()
    os.close(fd)
    honest.assert_alive()
    for pid in [honest.daemon.pid, *honest.daemon.worker_pids()]:
        eventually(lambda: not [x for x in fds_of(pid).values() if "memfd:liar" in x],
                   "no descriptor of the liar is left")


@pytest.mark.parametrize("body", sorted(wire.MESSAGES["Envelope"]))
def test_every_message_where_it_does_not_belong(honest: Honest, liars: Liars, body: str) -> None:
    with honest.daemon.connect() as liar:
        liar.hello()
        liar.send(body)
        liar.sock.shutdown(socket.SHUT_WR)
        liar.expect_closed()
    with honest.daemon.connect() as liar:
        liar.hello("admin")
        liar.send(body)
        liar.sock.shutdown(socket.SHUT_WR)
        liar.expect_closed()
    try:
        liars.daemon_side[0].send(body)
        liars.worker_side[1].send(body)
    except BrokenPipeError:
        # The first message ended the epoch, and the worker closed the other side.
        pass
    honest.assert_alive()


def test_an_admin_that_stops_reading_is_cut_off(honest: Honest) -> None:
    with honest.daemon.connect() as liar:
        liar.hello("admin")
        liar.sock.settimeout(0.5)
        data = frame("config_request") * 500
        try:
            for _ in range(2000):
                liar.send_bytes(data)
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            pass
        honest.assert_alive()
        with open(f"/proc/{honest.daemon.pid}/status") as file:
            rss = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
        assert rss < 300 * 1024


def test_the_limits_per_user_are_errors_in_words(world: World) -> None:
    daemon = world.daemon(max_jobs_per_uid=2, max_sessions_per_uid=4)
    kept = []
    for i in range(4):
        connection = daemon.connect()
        connection.hello()
        connection.send("join", job=f"job{i % 2}", rank=i // 2, size=3)
        kept.append(connection)
    daemon.admin("status")
    with daemon.connect() as liar:
        refused = liar_join(liar, "job0", 2, 3)
        assert refused and refused["text"], refused
    kept.pop().close()
    kept.pop().close()
    eventually(lambda: len(daemon.jobs()) == 2, "two jobs")
    with daemon.connect() as liar:
        refused = liar_join(liar, "a third job", 0, 3)
        assert refused and refused["text"], refused
    for connection in kept:
        connection.close()


def liar_join(liar: RawConnection, job: str, rank: int, size: int) -> dict[str, Any] | None:
    """Hello and Join; the Error that came instead of an answer."""
    liar.send("hello", protocol_min=1, protocol_max=1, program="liar", version="0")
    body, fields = liar.receive()
    if body == "error":
        return fields
    liar.send("join", job=job, rank=rank, size=size)
    body, fields = liar.receive()
    return fields if body == "error" else None


def test_random_messages_hurt_only_their_sender(honest: Honest) -> None:
    seed = int(os.environ.get("GRADD_TEST_SEED", time.time_ns() % 1000000))
    print(f"GRADD_TEST_SEED={seed}")
    dice = random.Random(seed)
    for _ in range(60):
        with honest.daemon.connect() as liar:
            try:
                if dice.random() < 0.8:
                    liar.send("hello", protocol_min=1, protocol_max=1, role=dice.randrange(2))
                for _ in range(dice.randrange(1, 6)):
                    body, fields = random_message(dice)
                    liar.send(body, **fields)
            except (BrokenPipeError, ConnectionResetError):
                pass
    honest.assert_alive()
    for round_ in range(10):
        liars = Liars(honest.daemon, 2, f"random{round_}")
        try:
            for _ in range(20):
                body, fields = random_message(dice)
                liars.worker_side[dice.randrange(2)].send(body, **fields)
        except (BrokenPipeError, ConnectionResetError):
            pass
        liars.close()
    honest.assert_alive()


def random_message(dice: random.Random) -> tuple[str, dict[str, Any]]:
    body = dice.choice(sorted(wire.MESSAGES["Envelope"]))
    return body, random_fields(dice, wire.MESSAGES["Envelope"][body][1], 3)


def random_fields(dice: random.Random, message: str, depth: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, (_, kind, repeated) in wire.MESSAGES[message].items():
        if dice.random() < 0.3:
            continue
        make = lambda: random_value(dice, kind, depth)  # noqa: E731
        fields[name] = [make() for _ in range(dice.randrange(4))] if repeated else make()
    return fields


def random_value(dice: random.Random, kind: str, depth: int) -> Any:
    if kind in ("string", "bytes"):
        return dice.choice(["", "x", "job", "y" * 300, "z\n"])
    if kind == "double":
        return dice.choice([0.0, 1.0, -1e308, float("nan"), float("inf")])
    if kind in wire.MESSAGES:
        return random_fields(dice, kind, depth - 1) if depth else {}
    return dice.choice([0, 1, 2, 7, 255, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1])
