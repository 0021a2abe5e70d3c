# SPDX-License-Identifier: Apache-2.0
"""libgradd through ctypes: where it is, what it exports, and whether it fits this package.

The declarations mirror ``include/gradd/gradd.h``; nothing else in the package calls ctypes
functions of the library without them.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from ctypes import (
    POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint, c_uint32,
    c_uint64, c_void_p,
)
from pathlib import Path

from gradd.errors import ProtocolMismatch, ServiceUnavailable

ABI_VERSION = 0
PROTOCOL = 1  # the protocol that this package's semantics belong to

PENDING = 1


class Options(Structure):
    """``struct gradd_options``."""

    _fields_ = [
        ("struct_size", c_size_t), ("socket", c_char_p), ("job", c_char_p), ("rank", c_int32),
        ("size", c_int32), ("local_rank", c_int32), ("local_size", c_int32),
        ("timeout_s", c_double),
    ]


class Op(Structure):
    """``struct gradd_op``; made by :func:`gradd.context.make_op`."""

    _fields_ = [
        ("struct_size", c_size_t), ("kind", c_int32), ("dtype", c_int32), ("redop", c_int32),
        ("root", c_int32), ("set", c_uint32), ("name", c_char_p), ("input", c_void_p),
        ("output", c_void_p), ("count", c_uint64), ("out_capacity", c_uint64),
        ("counts", POINTER(c_uint64)), ("prescale", c_double), ("postscale", c_double),
        ("check_finite", c_uint32), ("dims", POINTER(c_uint64)), ("n_dims", c_uint64),
        ("stream", c_void_p),
    ]


_PROTOTYPES = {
    "gradd_version": (c_char_p,),
    "gradd_protocol_range": (None, POINTER(c_uint), POINTER(c_uint)),
    "gradd_error": (c_char_p,),
    "gradd_status_name": (c_char_p, c_int),
    "gradd_dtype_size": (c_size_t, c_int),
    "gradd_init": (c_int, POINTER(Options), POINTER(c_void_p)),
    "gradd_shutdown": (None, c_void_p),
    "gradd_rank": (c_int, c_void_p),
    "gradd_size": (c_int, c_void_p),
    "gradd_local_rank": (c_int, c_void_p),
    "gradd_local_size": (c_int, c_void_p),
    "gradd_node_rank": (c_int, c_void_p),
    "gradd_n_nodes": (c_int, c_void_p),
    "gradd_epoch": (c_uint64, c_void_p),
    "gradd_job": (c_char_p, c_void_p),
    "gradd_source": (c_char_p, c_void_p),
    "gradd_alloc": (c_void_p, c_void_p, c_size_t),
    "gradd_free": (c_int, c_void_p, c_void_p),
    "gradd_submit": (c_int64, c_void_p, POINTER(Op), c_size_t),
    "gradd_test": (c_int, c_void_p, c_int64),
    "gradd_wait": (c_int, c_void_p, c_int64, c_double),
    "gradd_release": (c_int, c_void_p, c_int64),
    "gradd_counts": (c_int64, c_void_p, c_int64, c_size_t, POINTER(c_uint64), c_size_t),
    "gradd_nonfinite": (c_int, c_void_p, c_int64, c_size_t, POINTER(c_int32), POINTER(c_uint64)),
    "gradd_alloc_device": (c_void_p, c_void_p, c_int, c_size_t),
    "gradd_register": (c_int, c_void_p, c_void_p, c_size_t),
    "gradd_forget": (c_int, c_void_p, c_void_p),
    "gradd_device_path": (c_int, c_void_p, POINTER(c_char_p)),
    "gradd_wait_stream": (c_int, c_void_p, c_int64, c_void_p, c_double),
    "gradd_keep": (c_int, c_void_p, c_void_p),
    "gradd_fd": (c_int, c_void_p),
    "gradd_progress": (c_int, c_void_p),
}


def _candidates() -> list[str]:
    """Paths to try: GRADD_LIBRARY alone; else the newest build tree, then the system's."""
    named = os.environ.get("GRADD_LIBRARY")
    if named:
        return [named]
    root = Path(__file__).resolve().parents[3]
    built = [p for p in root.glob("build*/client/lib/libgradd.so.0") if p.exists()]
    built += [p for p in root.glob("build*/*/client/lib/libgradd.so.0") if p.exists()]
    built.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    found = ctypes.util.find_library("gradd")
    return [str(built[0])] if built else [found or "libgradd.so.0"]


def check(library: ctypes.CDLL, path: str) -> None:
    """Refuse a library whose structures or whose protocol this package does not know."""
    library.gradd_abi_version.restype = c_int
    abi = library.gradd_abi_version()
    if abi != ABI_VERSION:
        raise ProtocolMismatch(
            f"{path} has ABI {abi}, this package needs ABI {ABI_VERSION}: install versions of "
            "libgradd and of the Python package that belong together")
    low, high = c_uint(), c_uint()
    library.gradd_protocol_range(ctypes.byref(low), ctypes.byref(high))
    if not low.value <= PROTOCOL <= high.value:
        raise ProtocolMismatch(
            f"{path} speaks protocol {low.value} to {high.value}, this package needs protocol "
            f"{PROTOCOL}: install versions that belong together")


def load() -> ctypes.CDLL:
    """Open and check libgradd. Raises ServiceUnavailable or ProtocolMismatch."""
    errors = []
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            errors.append(str(error))
            continue
        for name, (result, *arguments) in _PROTOTYPES.items():
            function = getattr(library, name, None)
            if function is None:
                raise ProtocolMismatch(f"{path} has no {name}(): it is no libgradd of this version")
            function.restype = result
            function.argtypes = arguments
        check(library, path)
        return library
    raise ServiceUnavailable(
        f"libgradd was not found ({'; '.join(errors)}): install it, or name it in GRADD_LIBRARY")


_loaded: ctypes.CDLL | None = None


def library() -> ctypes.CDLL:
    """libgradd, opened once per process."""
    global _loaded
    if _loaded is None:
        _loaded = load()
    return _loaded
