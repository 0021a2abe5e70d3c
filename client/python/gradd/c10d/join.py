# SPDX-License-Identifier: Apache-2.0
"""From torch's rendezvous to a job of gradd: a group's ranks agree on a name by their store."""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import weakref
from datetime import timedelta
from typing import Any

from gradd.context import Context

_joined: "weakref.WeakSet[Context]" = weakref.WeakSet()


def node_identity() -> str:
    """Equal on two ranks just when the same daemon serves them."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()} {boot} {os.environ.get('GRADD_SOCKET', '')}"


def _agree_on_name(store: Any, rank: int) -> str:
    """Rank 0's choice. Unique, so that a second run by the same user cannot join the first."""
    if rank == 0:
        base = os.environ.get("GRADD_JOB", "torch")[:80]
        store.set("gradd/job", f"{base}.{secrets.token_hex(4)}")
    return store.get("gradd/job").decode()


def _local_ranks(store: Any, rank: int, size: int) -> tuple[int, int]:
    """(local rank, local size) by the nodes that all ranks name in the store."""
    here = node_identity()
    store.set(f"gradd/node/{rank}", here)
    same = [r for r in range(size)
            if r == rank or store.get(f"gradd/node/{r}").decode() == here]
    return same.index(rank), len(same)


def join(store: Any, rank: int, size: int, timeout: timedelta) -> Context:
    """Join the job of a group's ranks; blocks until all are there.

    `store` must be the group's own. Raises gradd's errors, or the store's when its time runs out.
    """
    if size == 1:
        context = Context(rank=0, size=1)
    else:
        name = _agree_on_name(store, rank)
        local_rank, local_size = _local_ranks(store, rank, size)
        context = Context(job=name, rank=rank, size=size, local_rank=local_rank,
                          local_size=local_size, timeout_s=timeout.total_seconds())
    remember(context)
    return context


def remember(context: Context) -> None:
    """Leave the context's job at the interpreter's exit, if nobody does before."""
    _joined.add(context)


def _leave_at_exit() -> None:
    for context in list(_joined):
        if context.is_open:
            context.shutdown()


atexit.register(_leave_at_exit)
