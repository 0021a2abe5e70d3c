# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks of a group: send and recv.

gradd moves data among all ranks of a job. Two ranks that exchange messages therefore share a job
of their own, which both join at their first message, on a thread: the first send or recv does not
block. A message is a broadcast in that job; its name has the sender, the tag and a number, so that
messages of one sender and tag arrive in order, and those of different tags do not wait for each
other.
"""

from __future__ import annotations

import collections
import threading
from datetime import timedelta
from typing import Any, Callable

import torch

from gradd.c10d import tensors as t
from gradd.c10d.join import node_identity, remember
from gradd.c10d.work import Work
from gradd.context import Context, make_op
from gradd.errors import GraddError, InvalidRequest
from gradd.types import Kind


class _Pair:
    """The job with one peer. Messages that come before it is joined wait in `_waiting`."""

    def __init__(self, join: Callable[[], Context], label: str) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Any, Work]] = []
        self._counts: collections.Counter[str] = collections.Counter()
        self.context: Context | None = None
        self._failure: GraddError | None = None
        self._is_closed = False
        self._join = join
        threading.Thread(target=self._run, name=f"gradd-{label}", daemon=True).start()

    def _run(self) -> None:
        context, failure = None, None
        try:
            context = self._join()
        except GraddError as error:
            failure = error
        with self._lock:
            self.context, self._failure = context, failure
            is_closed = self._is_closed
            waiting, self._waiting = self._waiting, []
            # Under the lock: what comes later must not overtake.
            for op, work in waiting:
                self._start(op, work)
        if is_closed and context is not None:
            context.shutdown()

    def _start(self, op: Any, work: Work) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            assert self.context is not None
            work.start_watched(self.context, self.context.submit([op]))
        except GraddError as error:
            work.end(error)

    def submit(self, op: Any, label: str, work: Work) -> None:
        with self._lock:
            op.name = f"{label}.{self._counts[label]}".encode()
            self._counts[label] += 1
            if self.context is None and self._failure is None:
                self._waiting.append((op, work))
            else:
                self._start(op, work)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            context = self.context
        if context is not None:
            context.shutdown()


class Peers:
    """The pairs of one rank, made at their first message."""

    def __init__(self, store: Any, context: Context, timeout: timedelta) -> None:
        self._store = store
        self._job = context.job
        self._rank = context.rank
        self._size = context.size
        self._timeout_s = timeout.total_seconds()
        self._pairs: dict[int, _Pair] = {}
        self._lock = threading.Lock()

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        host = t.Flat(tensor, on_host=True)
        work = Work(f"message {self._rank} to {peer}, tag {tag}", [tensor], self._timeout_s,
                    keep=host, source=self._rank, is_watched=True)
        return self._submit(host, work, self._rank, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        host = t.Flat(tensor, is_read=False, on_host=True)
        work = Work(f"message {peer} to {self._rank}, tag {tag}", [tensor], self._timeout_s,
                    host.bring_back, host, source=peer, is_watched=True)
        return self._submit(host, work, peer, peer, tag)

    def _submit(self, host: t.Flat, work: Work, sender: int, peer: int, tag: int) -> Work:
        pair = self._pair(peer)
        dtype, factor = t.as_elements(host.flat)
        where = t.address(host.flat)
        root = int(sender == max(self._rank, peer))
        op = make_op(Kind.BROADCAST, "", dtype=dtype, root=root, input=where, output=where,
                     count=host.flat.numel() * factor)
        pair.submit(op, f"from {sender}, tag {tag}", work)
        return work

    def _pair(self, peer: int) -> _Pair:
        if not 0 <= peer < self._size or peer == self._rank:
            raise InvalidRequest(f"job {self._job}: rank {self._rank} cannot exchange messages "
                                 f"with rank {peer} of {self._size}")
        with self._lock:
            if peer not in self._pairs:
                self._pairs[peer] = _Pair(lambda: self._join(peer), f"pair-{peer}")
            return self._pairs[peer]

    def _join(self, peer: int) -> Context:
        low, high = sorted((self._rank, peer))
        is_near = self._store.get(f"gradd/node/{peer}").decode() == node_identity()
        mine = int(self._rank == high)
        context = Context(job=f"{self._job}.{low}-{high}", rank=mine, size=2,
                          local_rank=mine if is_near else 0, local_size=2 if is_near else 1,
                          timeout_s=self._timeout_s)
        remember(context)
        return context

    def shutdown(self) -> None:
        with self._lock:
            pairs, self._pairs = list(self._pairs.values()), {}
        for pair in pairs:
            pair.close()
