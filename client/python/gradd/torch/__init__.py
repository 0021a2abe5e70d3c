# SPDX-License-Identifier: Apache-2.0
"""Horovod's API for PyTorch on gradd: ``import gradd.torch as hvd``.

Names, defaults, semantics and error types are those of ``horovod.torch``, so that a script changes
one line. Errors are those of :mod:`gradd.errors`: HorovodInternalError and its subclasses, with a
sentence that names job, ranks and tensor.
"""

from gradd.errors import (
    GraddError, HorovodInternalError, NonFinite, RankLost, RanksDisagree, ServiceUnavailable,
    Timeout,
)
from gradd.torch.basics import (
    Adasum, Average, Max, Min, ProcessSet, Product, Sum, add_process_set, ccl_built, cross_rank,
    cross_size, cuda_built, ddl_built, global_process_set, gloo_built, gloo_enabled, init,
    is_homogeneous, is_initialized, local_rank, local_size, mpi_built, mpi_enabled,
    mpi_threads_supported, nccl_built, rank, remove_process_set, rocm_built, shutdown, size,
)
from gradd.torch.compression import Compression
from gradd.torch.ops import (
    allgather, allgather_async, allreduce, allreduce_, allreduce_async, allreduce_async_,
    alltoall, alltoall_async, barrier, broadcast, broadcast_, broadcast_async, broadcast_async_,
    grouped_allgather, grouped_allgather_async, grouped_allreduce, grouped_allreduce_,
    grouped_allreduce_async, grouped_allreduce_async_, grouped_reducescatter,
    grouped_reducescatter_async, join, poll, reducescatter, reducescatter_async,
    sparse_allreduce_async, synchronize,
)
from gradd.torch.timeline import start_timeline, stop_timeline

# isort: split
from gradd.torch import elastic
from gradd.torch.functions import (
    allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters,
)
from gradd.torch.optimizer import DistributedOptimizer
from gradd.torch.sync_batch_norm import SyncBatchNorm
