# SPDX-License-Identifier: Apache-2.0
"""Horovod's collectives on tensors.

Common to all: an op is matched across ranks by `name` (None: counted, so that ranks which make
the same calls meet); it starts when every rank of `process_set` has submitted it. Tensors must be
contiguous. Misuse that this rank can see is a ValueError; what ends an op after its submission is
a HorovodInternalError (RanksDisagree, RankLost, Timeout, ... say which), and after RanksDisagree
the job goes on.
"""

from gradd.torch.engine import poll, synchronize
from gradd.torch.ops._allgather import (
    allgather, allgather_async, grouped_allgather, grouped_allgather_async,
)
from gradd.torch.ops._allreduce import (
    allreduce, allreduce_, allreduce_async, allreduce_async_, grouped_allreduce, grouped_allreduce_,
    grouped_allreduce_async, grouped_allreduce_async_,
)
from gradd.torch.ops._alltoall import alltoall, alltoall_async
from gradd.torch.ops._broadcast import (
    broadcast, broadcast_, broadcast_async, broadcast_async_,
)
from gradd.torch.ops._reducescatter import (
    grouped_reducescatter, grouped_reducescatter_async, reducescatter, reducescatter_async,
)
from gradd.torch.ops._sparse import sparse_allreduce_async
from gradd.torch.ops._waiting import barrier, join

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "join",
    "poll", "reducescatter", "reducescatter_async", "sparse_allreduce_async", "synchronize",
]
