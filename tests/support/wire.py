# SPDX-License-Identifier: Apache-2.0
"""gradd's protocol for tests that lie: frames and messages of proto/*.proto on a raw socket.

The schema is read from the .proto files themselves, so that a test names messages and fields and
can send any of them, in any order, with any descriptors.
"""

from __future__ import annotations

import array
import os
import re
import socket
import struct
from pathlib import Path
from typing import Any, Iterable

PROTO = Path(__file__).resolve().parents[2] / "proto"
FRAME_MAX = 1 << 20
HEADER = struct.Struct("<IB3x")
VARINT_TYPES = {"uint32", "uint64", "int32", "int64", "bool", "enum"}

Field = tuple[int, str, bool]  # number, type, repeated


def _load_schema() -> tuple[dict[str, dict[str, Field]], set[str]]:
    messages: dict[str, dict[str, Field]] = {}
    enums: set[str] = set()
    for path in sorted(PROTO.glob("*.proto")):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        enums |= set(re.findall(r"\benum\s+(\w+)", text))
        for name, body in re.findall(r"\bmessage\s+(\w+)\s*\{((?:[^{}]|\{[^{}]*\})*)\}", text):
            fields = messages.setdefault(name, {})
            for repeated, kind, field, number in re.findall(
                r"(repeated\s+)?(\w+)\s+(\w+)\s*=\s*(\d+)\s*;", body
            ):
                fields[field] = (int(number), kind, bool(repeated))
    return messages, enums


MESSAGES, ENUMS = _load_schema()


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _encode_field(number: int, kind: str, value: Any) -> bytes:
    if kind in VARINT_TYPES or kind in ENUMS:
        return varint(number << 3) + varint(int(value))
    if kind == "double":
        return varint(number << 3 | 1) + struct.pack("<d", value)
    if kind in ("string", "bytes"):
        data = value.encode() if isinstance(value, str) else value
    else:
        data = encode(kind, value)
    return varint(number << 3 | 2) + varint(len(data)) + data


def encode(message: str, fields: dict[str, Any]) -> bytes:
    out = b""
    for name, value in fields.items():
        number, kind, repeated = MESSAGES[message][name]
        for item in value if repeated else [value]:
            out += _encode_field(number, kind, item)
    return out


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _raw_fields(data: bytes) -> Iterable[tuple[int, int, Any]]:
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        if tag & 7 == 0:
            value, at = _read_varint(data, at)
        elif tag & 7 == 1:
            value, at = struct.unpack_from("<d", data, at)[0], at + 8
        elif tag & 7 == 2:
            length, at = _read_varint(data, at)
            value, at = data[at : at + length], at + length
        else:
            value, at = struct.unpack_from("<f", data, at)[0], at + 4
        yield tag >> 3, tag & 7, value


def _decode_value(kind: str, wire_type: int, value: Any) -> Any:
    if kind == "string":
        return value.decode(errors="replace")
    if kind == "bool":
        return bool(value)
    if kind in ("int32", "int64"):
        return value - (1 << 64) if value >> 63 else value
    if kind in MESSAGES:
        return decode(kind, value)
    return value


def decode(message: str, data: bytes) -> dict[str, Any]:
    by_number = {f[0]: (name, f[1], f[2]) for name, f in MESSAGES[message].items()}
    out: dict[str, Any] = {}
    for number, wire_type, value in _raw_fields(data):
        if number not in by_number:
            continue
        name, kind, repeated = by_number[number]
        if repeated and wire_type == 2 and kind in VARINT_TYPES:
            values, at = out.setdefault(name, []), 0
            while at < len(value):
                item, at = _read_varint(value, at)
                values.append(item)
        elif repeated:
            out.setdefault(name, []).append(_decode_value(kind, wire_type, value))
        else:
            out[name] = _decode_value(kind, wire_type, value)
    return out


def frame(body: str, n_fds: int = 0, **fields: Any) -> bytes:
    """A whole frame whose envelope holds the member `body` with these fields."""
    payload = encode("Envelope", {body: fields})
    return HEADER.pack(len(payload), n_fds) + payload


class Closed(Exception):
    """The peer closed the connection."""


class RawConnection:
    """A blocking socket that speaks frames, or whatever bytes a test wants to send."""

    def __init__(self, sock: socket.socket, timeout_s: float = 20.0) -> None:
        self.sock = sock
        self.sock.settimeout(timeout_s)
        self.data = b""
        self.fds: list[int] = []

    @classmethod
    def connect(cls, path: str, timeout_s: float = 20.0) -> "RawConnection":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        sock.connect(path)
        return cls(sock, timeout_s)

    def send_bytes(self, data: bytes, fds: Iterable[int] = ()) -> None:
        fds = list(fds)
        if fds:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            sent = self.sock.sendmsg([data], [rights])
            data = data[sent:]
        if data:
            self.sock.sendall(data)

    def send(self, body: str, fds: Iterable[int] = (), **fields: Any) -> None:
        fds = list(fds)
        self.send_bytes(frame(body, len(fds), **fields), fds)

    def _fill(self) -> None:
        try:
            data, control, _, _ = self.sock.recvmsg(1 << 16, socket.CMSG_SPACE(64 * 4))
        except ConnectionResetError as error:
            raise Closed from error
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) // 4 * 4])
                self.fds.extend(fds)
        if not data:
            raise Closed
        self.data += data

    def receive(self) -> tuple[str, dict[str, Any]]:
        """The next message: the name of the envelope's member, and its fields."""
        while len(self.data) < HEADER.size:
            self._fill()
        length, _ = HEADER.unpack_from(self.data)
        while len(self.data) < HEADER.size + length:
            self._fill()
        payload = self.data[HEADER.size : HEADER.size + length]
        self.data = self.data[HEADER.size + length :]
        envelope = decode("Envelope", payload)
        return next(iter(envelope.items())) if envelope else ("", {})

    def expect(self, body: str) -> dict[str, Any]:
        got, fields = self.receive()
        assert got == body, f"expected {body}, got {got}: {fields}"
        return fields

    def expect_closed(self) -> list[tuple[str, dict[str, Any]]]:
        """Read until the peer closes; return what it said before."""
        messages = []
        while True:
            try:
                messages.append(self.receive())
            except Closed:
                return messages

    def hello(self, role: str = "trainer", **fields: Any) -> dict[str, Any]:
        request = {"protocol_min": 1, "protocol_max": 1, "program": "test", "version": "0"}
        if role == "admin":
            request["role"] = 1
        self.send("hello", **{**request, **fields})
        return self.expect("hello_reply")

    def take_fd(self) -> int:
        return self.fds.pop(0)

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def __enter__(self) -> "RawConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
