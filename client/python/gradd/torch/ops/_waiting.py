# SPDX-License-Identifier: Apache-2.0
"""Waiting for the other ranks: a rank that is out of data, and barriers."""

from __future__ import annotations

import gradd
from gradd.torch.basics import ProcessSet, global_process_set
from gradd.torch.engine import engine, set_id
from gradd.torch.ops._submission import job_errors


def join(device: int = -1) -> int:
    """This rank is out of data: until all ranks have joined, others count it as zeros.

    All-reduces of the others go on (Average still divides by all ranks); other kinds fail.
    `device` is accepted for compatibility. Returns the last rank that joined, same on all ranks.
    """
    engine()
    with job_errors():
        return gradd.context().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it."""
    group = set_id(process_set)
    with job_errors():
        gradd.context().barrier(group)
