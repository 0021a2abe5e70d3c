# SPDX-License-Identifier: Apache-2.0
"""Memory that somebody else allocated, shared with the worker where it lies.

The pages inside a buffer are replaced, at their addresses and with their contents, by a second
mapping of a region's pages: what the owner writes there, the worker reads, and the other way
round. The buffer's ends, which share their pages with strangers, are copied.

Invariant: the owner's object is kept alive for as long as its pages are replaced, so that no
allocator can hand them to anybody else; close() puts ordinary pages back first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from ctypes import c_int, c_size_t, c_void_p
from typing import Any

from gradd.context import Context

PAGE = mmap.PAGESIZE

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = c_void_p
_libc.mremap.argtypes = [c_void_p, c_size_t, c_size_t, c_int, c_void_p]
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = [c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long]


def _move(source: int, old_bytes: int, new_bytes: int, target: int) -> None:
    """mremap() to a given place; with old_bytes 0 the source stays where it is, too."""
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    if _libc.mremap(source, old_bytes, new_bytes, flags, target) == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mremap of {new_bytes} bytes: {os.strerror(number)}")


class SharedPages:
    """A buffer at `address` (bytes: n_bytes) that belongs to `owner`. Not thread-safe.

    Nobody may write to the buffer during construction and close(). Raises GraddError where the
    job's memory does not suffice, OSError where the kernel refuses.

    Attributes: shared_address, where ops find the buffer.
    """

    def __init__(self, context: Context, address: int, n_bytes: int, owner: Any) -> None:
        offset = address % PAGE
        end = address + n_bytes
        self._address = address
        self._n_bytes = n_bytes
        self._first = address + -address % PAGE
        self._last = max(end - end % PAGE, self._first)
        self._region = context.alloc(offset + n_bytes)
        self.shared_address = self._region.address + offset
        ctypes.memmove(self.shared_address, address, n_bytes)
        if self._last > self._first:
            _move(self._shared(self._first), 0, self._last - self._first, self._first)
        self._owner = owner

    def _shared(self, address: int) -> int:
        return self.shared_address + address - self._address

    def _ends(self) -> list[tuple[int, int]]:
        """(address, bytes) of what is not shared but copied."""
        end = self._address + self._n_bytes
        return [(self._address, min(self._first, end) - self._address),
                (self._last, end - self._last)]

    def before_op(self) -> None:
        """The owner has written: let the worker see it."""
        for address, n_bytes in self._ends():
            if n_bytes > 0:
                ctypes.memmove(self._shared(address), address, n_bytes)

    def after_op(self) -> None:
        """The worker has written: let the owner see it."""
        for address, n_bytes in self._ends():
            if n_bytes > 0:
                ctypes.memmove(address, self._shared(address), n_bytes)

    def close(self) -> None:
        """Give the buffer ordinary pages again, with what is in it now. Idempotent."""
        owner, self._owner = self._owner, None
        n_bytes = self._last - self._first
        if owner is None or n_bytes == 0:
            return
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        fresh = _libc.mmap(None, n_bytes, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if fresh == _FAILED:
            # The pages stay shared, hence the owner stays alive.
            self._owner = owner
            raise MemoryError(f"no memory for {n_bytes} bytes")
        ctypes.memmove(fresh, self._first, n_bytes)
        _move(fresh, n_bytes, n_bytes, self._first)
