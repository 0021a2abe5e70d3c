# SPDX-License-Identifier: Apache-2.0
"""Who and where this process is, and the process sets: Horovod's names over gradd's context."""

from __future__ import annotations

from typing import Callable, Iterable, Sequence

import gradd
from gradd.errors import DuplicateName, GraddError, HorovodInternalError

Average, Sum, Adasum, Min, Max, Product = range(6)


class ProcessSet:
    """Ranks that run collectives among themselves.

    Pass one to ``init(process_sets=[...])`` or to :func:`add_process_set`; afterwards it can be
    given to every op. ``process_set_id`` is None while the set is not registered.
    """

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        try:
            ranks = sorted(ranks_or_comm)
        except TypeError:
            raise ValueError("a ProcessSet is made from a list of ranks: gradd knows no MPI "
                             "communicators") from None
        if any(not isinstance(rank_, int) for rank_ in ranks):
            raise ValueError(f"a ProcessSet is made from a list of ranks, not from {ranks!r}")
        self.ranks: list[int] | None = ranks
        self.process_set_id: int | None = None
        self.mpi_comm = None

    def _invalidate(self) -> None:
        self.process_set_id = None

    def size(self) -> int | None:
        """Number of ranks; None before the set is registered. ValueError for a removed set."""
        if self.process_set_id is None:
            return None
        return len(set_ranks(self.process_set_id))

    def rank(self) -> int | None:
        """This process's index in the set; None before registration; ValueError for outsiders."""
        if self.process_set_id is None:
            return None
        ranks = set_ranks(self.process_set_id)
        if rank() not in ranks:
            raise ValueError(f"rank {rank()} is not part of process set {self.process_set_id}, "
                             f"which has ranks {ranks}")
        return ranks.index(rank())

    def included(self) -> bool | None:
        """Is this process part of the set?"""
        if self.ranks is None:
            return None
        return rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

_sets: dict[int, list[int]] = {}
_objects: list[ProcessSet] = []
before_shutdown: list[Callable[[], None]] = []  # what to tell before the job is left


def set_ranks(set_id: int) -> list[int]:
    """Ranks of a registered set. ValueError for an unknown one, or before init()."""
    gradd.context()
    ranks = _sets.get(set_id)
    if ranks is None:
        raise ValueError(f"there is no process set {set_id}: it was not registered, or removed")
    return ranks


# ------------------------------------------------------------------ life


def init(comm: Sequence[int] | None = None,
         process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job and wait for its other ranks; does nothing when called again.

    Args:
        comm: None for all ranks, or a list of ranks: then only these call init().
        process_sets: sets to register at once, or "dynamic" (sets can always be added later).
    """
    if gradd.is_initialized():
        return
    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    if comm is not None and not isinstance(comm, Iterable):
        raise ValueError("comm is a list of ranks: gradd knows no MPI communicators")
    ranks = list(comm or [])
    if ranks:
        _join_some(ranks)
    else:
        gradd.init()
    _sets.clear()
    _sets[0] = list(range(size()))
    global_process_set.ranks = _sets[0]
    for process_set in sets:
        known = [p for p, members in _sets.items() if members == process_set.ranks]
        if known:
            process_set._invalidate()
        else:
            add_process_set(process_set)


def _join_some(ranks: Sequence[int]) -> None:
    """The given ranks of the launcher's job form a job of their own, in the order given."""
    world = gradd.init()
    if list(ranks) == list(range(world.size)):
        return
    me, job = world.rank, world.job
    gradd.shutdown()
    if me not in ranks:
        raise ValueError(f"rank {me} called init() but is not in comm {list(ranks)}")
    gradd.init(job=f"{job}.{'-'.join(map(str, ranks))}"[:64], rank=list(ranks).index(me),
               size=len(ranks))


def shutdown() -> None:
    """Leave the job; ops in flight end with an error. init() may be called again."""
    for function in before_shutdown:
        function()
    for process_set in _objects:
        process_set._invalidate()
    _objects.clear()
    gradd.shutdown()
    _sets.clear()


def is_initialized() -> bool:
    """Between init() and shutdown()."""
    return gradd.is_initialized()


def rank() -> int:
    """Global rank. ValueError before init()."""
    return gradd.context().rank


def size() -> int:
    """Ranks of the job. ValueError before init()."""
    return gradd.context().size


def local_rank() -> int:
    """Rank on this node. ValueError before init()."""
    return gradd.context().local_rank


def local_size() -> int:
    """Ranks on this node. ValueError before init()."""
    return gradd.context().local_size


def cross_rank() -> int:
    """Index of this node among the nodes of the job. ValueError before init()."""
    return gradd.context().node_rank


def cross_size() -> int:
    """Nodes of the job. ValueError before init()."""
    return gradd.context().n_nodes


def is_homogeneous() -> bool:
    """Has every node the same number of ranks?"""
    context = gradd.context()
    return context.size == context.local_size * context.n_nodes


# ------------------------------------------------------------------ process sets


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set; every rank of the job calls this. ValueError when the set exists."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks or []
    if ranks in _sets.values():
        raise ValueError(f"these ranks are a process set already: {process_set}")
    if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= size():
        raise ValueError(f"a process set has distinct ranks below {size()}: {process_set}")
    try:
        process_set.process_set_id = gradd.context().add_set(ranks)
    except DuplicateName as error:
        raise ValueError(str(error)) from error
    except HorovodInternalError:
        raise
    except GraddError as error:
        raise HorovodInternalError(str(error), error.status) from error
    _sets[process_set.process_set_id] = list(ranks)
    _objects.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Dissolve a set; every rank of the job calls this. False for the global or an unknown set."""
    set_id = process_set.process_set_id
    if set_id is None or set_id == 0 or set_id not in _sets:
        return False
    gradd.context().remove_set(set_id)
    _sets.pop(set_id, None)
    process_set._invalidate()
    return True


# ------------------------------------------------------------------ what is built in


def mpi_threads_supported() -> bool:
    """No MPI in gradd. ValueError before init()."""
    gradd.context()
    return False


def mpi_enabled() -> bool:
    """No MPI in gradd."""
    return False


def mpi_built() -> bool:
    """No MPI in gradd."""
    return False


def gloo_enabled() -> bool:
    """True: scripts choose the way without MPI by this."""
    return True


def gloo_built() -> bool:
    """True: scripts choose the way without MPI by this."""
    return True


def nccl_built() -> int:
    """0: NCCL belongs to the daemon's worker, not to this process."""
    return 0


def ddl_built() -> bool:
    """No DDL in gradd."""
    return False


def ccl_built() -> bool:
    """No oneCCL in gradd."""
    return False


def cuda_built() -> bool:
    """False: the trainer's side of gradd links no CUDA."""
    return False


def rocm_built() -> bool:
    """No ROCm in gradd."""
    return False
