# SPDX-License-Identifier: Apache-2.0
"""One rank's trouble, as each rank sees it: failures.py CASE... prints {case: {error, text, ...}}.

Cases after which the job goes on may be run together.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any, Callable

import torch
from torch import nn

import gradd
import gradd.torch as hvd

SIZE = 50_000  # elements: large enough that a step takes a moment


def make() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    p = nn.Parameter(torch.zeros(SIZE))
    return p, hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("weight", p)])


def step(p: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (p * 2).sum().backward()
    optimizer.step()


def is_last() -> bool:
    return hvd.rank() == hvd.size() - 1


def killed() -> None:
    """The last rank is killed between two steps."""
    p, optimizer = make()
    step(p, optimizer)
    if is_last():
        os.kill(os.getpid(), signal.SIGKILL)
    step(p, optimizer)


def killed_while_gathering() -> None:
    hvd.barrier()
    if is_last():
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allgather(torch.ones(3), name="gather")


def killed_at_barrier() -> None:
    hvd.barrier()
    if is_last():
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


def forward_raises() -> None:
    p, optimizer = make()
    step(p, optimizer)
    if is_last():
        raise KeyError("bad sample")
    step(p, optimizer)


def shapes_differ() -> None:
    hvd.allreduce(torch.ones((6, 4) if is_last() else (4, 6)), name="fc.weight")


def types_differ() -> None:
    hvd.allreduce(torch.ones(5, dtype=torch.float64 if is_last() else torch.float32), name="fc")


def ops_differ() -> None:
    hvd.allreduce(torch.ones(5), name="fc", op=hvd.Max if is_last() else hvd.Sum)


def kinds_differ() -> None:
    if is_last():
        hvd.broadcast(torch.ones(5), 0, name="fc")
    else:
        hvd.allreduce(torch.ones(5), name="fc")


def unnamed_kinds_differ() -> None:
    if is_last():
        hvd.allgather(torch.ones(5))
    else:
        hvd.allreduce(torch.ones(5))


def roots_differ() -> None:
    hvd.broadcast(torch.ones(5), 1 if is_last() else 0, name="fc")


def gathered_shapes_differ() -> None:
    hvd.allgather(torch.ones(2, 3 + is_last()), name="rows")


def gathered_types_differ() -> None:
    hvd.allgather(torch.ones(2, dtype=torch.int16 if is_last() else torch.bool), name="rows")


def group_sizes_differ() -> None:
    hvd.grouped_allreduce([torch.ones(3)] * (2 + is_last()), name="group")


def sparse_on_one_rank() -> None:
    tensor = torch.ones(3, 2)
    if is_last():
        hvd.sparse_allreduce_async(tensor.to_sparse(1), "embedding", hvd.Sum)()
    else:
        hvd.allreduce(tensor, name="embedding", op=hvd.Sum)


def one_gradient_has_another_shape() -> None:
    """The optimizer waits for what else is in flight, and can be used again."""
    a = nn.Parameter(torch.zeros(3 + is_last()))
    b = nn.Parameter(torch.zeros(1000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), [("a", a), ("b", b)])
    (a.sum() + b.sum()).backward()
    try:
        optimizer.step()
    finally:
        optimizer.zero_grad()
        assert not optimizer._in_flight


def late() -> None:
    """The last rank submits something else; the daemon's op_timeout_s is short in this test."""
    hvd.barrier()
    if is_last():
        hvd.allreduce(torch.ones(1), name="something else")
    else:
        hvd.allreduce(torch.ones(1), name="late.weight")


def joined_rank_and_gather() -> None:
    if is_last():
        hvd.join()
        raise RuntimeError("joined")
    try:
        hvd.allgather(torch.ones(2))
    finally:
        hvd.join()


CASES = [killed, killed_while_gathering, killed_at_barrier, forward_raises, shapes_differ,
         types_differ, ops_differ, kinds_differ, unnamed_kinds_differ, roots_differ,
         gathered_shapes_differ, gathered_types_differ, group_sizes_differ, sparse_on_one_rank,
         one_gradient_has_another_shape, late, joined_rank_and_gather]
# After these the job goes on.
MILD = CASES[CASES.index(shapes_differ):CASES.index(joined_rank_and_gather)]


def outcome(case: Callable[[], None]) -> dict[str, Any]:
    start = time.monotonic()
    result: dict[str, Any] = {"error": None, "text": "", "is_internal": False}
    try:
        case()
    except Exception as error:
        result = {"error": type(error).__name__, "text": str(error),
                  "is_internal": isinstance(error, hvd.HorovodInternalError)}
    result["seconds"] = time.monotonic() - start
    if case in MILD:
        result["afterwards"] = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item()
    return result


def main() -> None:
    cases = {function.__name__: function for function in CASES}
    # gradrun ends the others when one rank has failed; they are to say first what they saw.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hvd.init()
    results = {name: outcome(cases[name]) for name in sys.argv[1:]}
    print(json.dumps(results), flush=True)
    if any(result["error"] == "KeyError" for result in results.values()):
        os._exit(3)  # dies without a farewell, as with an exception that nobody catches
    gradd.shutdown()


if __name__ == "__main__":
    main()
