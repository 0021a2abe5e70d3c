# SPDX-License-Identifier: Apache-2.0
"""Buffers of all positions and sizes whose pages the worker shares (gradd._pages)."""

from __future__ import annotations

import ctypes

import gradd
from gradd._pages import PAGE, SharedPages
from gradd.types import DType, Kind, ReduceOp

SIZES = (1, 100, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 5, 100 * PAGE)
OFFSETS = (0, 1, 64, PAGE - 1)


def shared_bytes(address: int, n_bytes: int) -> int:
    """How much of a range is mapped from a memfd."""
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/memfd:" in line:
                first, last = (int(word, 16) for word in line.split()[0].split("-"))
                total += max(0, min(last, address + n_bytes) - max(first, address))
    return total


def check(context: gradd.Context, memory: ctypes.Array, offset: int, n: int) -> None:
    start = ctypes.addressof(memory)
    address = start + -start % PAGE + offset
    view = (ctypes.c_uint8 * n).from_address(address)
    around = [(ctypes.c_uint8).from_address(a) for a in (address - 1, address + n)]
    for byte in around:
        byte.value = 77
    view[:] = [i % 100 for i in range(n)]
    pages = SharedPages(context, address, n, memory)
    inside = max(0, (address + n) // PAGE - -(-address // PAGE)) * PAGE
    assert shared_bytes(address, n) == inside, (offset, n)
    assert list(view) == [i % 100 for i in range(n)], "contents stay"
    for round_number in range(2):
        view[:] = [(i + round_number + context.rank) % 100 for i in range(n)]
        pages.before_op()
        context.wait(context.submit([gradd.make_op(
            Kind.ALLREDUCE, "bytes", dtype=DType.U8, redop=ReduceOp.SUM,
            input=pages.shared_address, output=pages.shared_address, count=n)]))
        pages.after_op()
        wanted = [sum((i + round_number + rank) % 100 for rank in range(context.size))
                  for i in range(n)]
        assert list(view) == wanted, (offset, n, round_number)
    pages.close()
    pages.close()
    assert list(view) == wanted, "contents stay when the pages are given back"
    assert shared_bytes(address, n) == 0
    assert [byte.value for byte in around] == [77, 77], "neighbours are untouched"


def main() -> None:
    context = gradd.init()
    memory = (ctypes.c_uint8 * (104 * PAGE))()
    for offset in OFFSETS:
        for n in SIZES:
            check(context, memory, offset + (1 if offset == 0 else 0), n)
            check(context, memory, offset or PAGE, n)
    gradd.shutdown()
    print("ok")


if __name__ == "__main__":
    main()
