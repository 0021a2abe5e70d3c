# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as exceptions. Each carries the daemon's or the library's own sentence.

Everything that ends an op after its submission is a :class:`HorovodInternalError`, so that a
script written for Horovod catches what it expects; what is wrong with a single call is also a
``ValueError``.
"""

from __future__ import annotations


class GraddError(RuntimeError):
    """An error of gradd. ``status`` is the library's negative ``enum gradd_status``."""

    status = -13

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        if status is not None:
            self.status = status


class HorovodInternalError(GraddError):
    """An op ended without a result; the name is the one that Horovod's users catch."""


class InvalidRequest(GraddError, ValueError):
    """An argument or an environment variable makes no sense."""

    status = -1


class RanksDisagree(HorovodInternalError):
    """Ranks submitted different things under one name. The job goes on."""

    status = -2


class RankLost(HorovodInternalError):
    """A rank or the worker died or left. Join the next epoch: ``shutdown()``, then ``init()``."""

    status = -3


class Timeout(HorovodInternalError, TimeoutError):
    """A rank did not submit or join in time."""

    status = -4


class ServiceUnavailable(HorovodInternalError, ConnectionError):
    """There is no daemon, or it refuses new jobs."""

    status = -5


class OutOfMemory(HorovodInternalError, MemoryError):
    """Memory, descriptors or a quota of the job ran out."""

    status = -6


class ProtocolMismatch(GraddError, ImportError):
    """Library, daemon and package do not fit together."""

    status = -7


class Denied(GraddError, PermissionError):
    """Not the owner of what was asked for."""

    status = -8


class Shutdown(HorovodInternalError):
    """The context has left its job."""

    status = -9


class Forked(HorovodInternalError):
    """A child process uses the context of its parent."""

    status = -10


class DuplicateName(GraddError, ValueError):
    """An op of this name is in flight already."""

    status = -11


class Unsupported(GraddError, NotImplementedError):
    """This build or this node cannot do that."""

    status = -12


class InternalError(HorovodInternalError):
    """A defect of gradd: please report it."""

    status = -13


class NonFinite(GraddError, ArithmeticError):
    """A rank's input has a NaN or an infinity (only where ``check_finite`` was asked for)."""

    status = -1


_BY_STATUS = {
    cls.status: cls
    for cls in (
        InvalidRequest, RanksDisagree, RankLost, Timeout, ServiceUnavailable, OutOfMemory,
        ProtocolMismatch, Denied, Shutdown, Forked, DuplicateName, Unsupported, InternalError,
    )
}


def from_status(status: int, text: str) -> GraddError:
    """The exception that belongs to a negative ``enum gradd_status``."""
    return _BY_STATUS.get(status, GraddError)(text or f"gradd status {status}", status)
