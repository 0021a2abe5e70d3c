# SPDX-License-Identifier: Apache-2.0
"""From tensors to submissions: what all kinds of ops check and do the same way.

The checks are those that need no other rank; what they find is a ValueError. Thread: any.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Iterator, Sequence

import torch

from gradd._device import is_device
from gradd._library import Op
from gradd.errors import GraddError, HorovodInternalError
from gradd.torch.engine import Engine, Pending, register


@contextmanager
def job_errors() -> Iterator[None]:
    """What ends the job is a HorovodInternalError for the caller; misuse stays a ValueError."""
    try:
        yield
    except (HorovodInternalError, ValueError):
        raise
    except GraddError as error:
        raise HorovodInternalError(str(error), error.status) from error


def submit(pending: Pending, ops: Sequence[Op]) -> int:
    """Submit ops whose results have a known size; a handle."""
    with job_errors():
        pending.engine.submit(pending, ops)
    return register(pending)


def submit_two_steps(pending: Pending, row: list[int], n_ranks: int,
                     second_step: Callable[[list[list[int]]], list[Op]]) -> int:
    """Exchange `row` with all ranks, then submit what second_step makes of all rows; a handle."""
    with job_errors():
        pending.engine.submit_two_steps(pending, row, n_ranks, second_step)
    return register(pending)


def wire_name(state: Engine, base: str, group: int, name: str | None,
              sources: Sequence[torch.Tensor]) -> str:
    """The name of an op of one step, whose end is awaited by a stream where it has CUDA tensors."""
    return state.device_name(base, group, bool(name)) if is_device(sources[0]) else base


def in_stream(pending: Pending, sources: Sequence[torch.Tensor], name: str) -> Pending:
    """Let the stream of CUDA tensors, and not the host, wait for the end of the op."""
    pending.wire_name = name
    pending.on_device = sources[0] if is_device(sources[0]) else None
    return pending


def check_list(tensors: Sequence[torch.Tensor]) -> None:
    """A group is not empty."""
    if not tensors:
        raise ValueError("a group has at least one tensor")


def check_one_device(tensors: Sequence[torch.Tensor]) -> None:
    """A group is one op of one device."""
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError("the tensors of a group must be on one device")


def without_zero_factors(tensors: Sequence[torch.Tensor], prescale: float, postscale: float,
                         ) -> tuple[Sequence[torch.Tensor], float, float]:
    """The same reduction with factors that the library takes: it reads 0 as 1."""
    if prescale == 0 or postscale == 0:
        return [torch.zeros_like(tensor) for tensor in tensors], 1.0, 1.0
    return tensors, prescale, postscale
