# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend "gradd".

    import gradd.c10d                            # registers it; not needed from PyTorch 2.5 on
    torch.distributed.init_process_group("gradd")

Ranks and the rendezvous are torch's: any init_method works. Every process group becomes a job of
the node's daemon that has the group's ranks, so that a rank that dies fails just the groups that it
is in. Tensors are those of the CPU; those of other devices are copied through host memory.

What there is: broadcast, all_reduce, reduce, all_gather, all_gather_into_tensor, reduce_scatter,
reduce_scatter_tensor, all_to_all, all_to_all_single, gather, scatter, barrier, send, recv and their
asynchronous forms; recv from any source is not. Two ranks that send to each other become a job of
their own at the first message.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gradd.context import Context
from gradd.errors import Unsupported

NAME = "gradd"


def _create(options: Any, _group_options: object = None) -> object:
    from gradd.c10d.group import GraddGroup
    return GraddGroup(options.store, options.group_rank, options.group_size, options.timeout,
                      options.group_id)


def context_of_group(group: "dist.ProcessGroup") -> Context | None:
    """The job behind a process group of this backend; None for one of another backend."""
    context = getattr(group, "context", None)
    if context is None and hasattr(group, "_get_backend"):
        try:
            context = getattr(group._get_backend(torch.device("cpu")), "context", None)
        except RuntimeError:  # a group without a backend for the CPU
            pass
    return context if isinstance(context, Context) else None


def check_torch() -> None:
    """Raises Unsupported where this torch has no process groups that Python can implement."""
    if not dist.is_available():
        raise Unsupported("this torch was built without torch.distributed")
    trampoline = getattr(dist, "ProcessGroup", None)
    if trampoline is None or not hasattr(dist, "Backend") or \
            not hasattr(dist.Backend, "register_backend"):
        raise Unsupported(f"torch {torch.__version__} has no process groups written in Python: "
                          "use gradd.torch, or torch 1.13 and later")


def register() -> None:
    """Make "gradd" known to torch.distributed. Idempotent; called by importing this module."""
    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    check_torch()
    try:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    except TypeError:  # before torch 2.0 a backend had no devices
        dist.Backend.register_backend(NAME, _create, extended_api=True)


register()
