# SPDX-License-Identifier: Apache-2.0
"""Addresses of objects that have the buffer protocol, readable ones included.

``ctypes`` itself takes the address of writable buffers only. A :class:`Buffer` keeps the exporter
from moving or freeing its memory for as long as the Buffer lives.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_ssize_t, c_void_p
from typing import Any

from gradd.types import DType, dtype_of_format

_WRITABLE, _FORMAT, _C_CONTIGUOUS = 0x0001, 0x0004, 0x0020 | 0x0010 | 0x0008


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", c_void_p), ("obj", ctypes.py_object), ("len", c_ssize_t), ("itemsize", c_ssize_t),
        ("readonly", c_int), ("ndim", c_int), ("format", c_char_p), ("shape", POINTER(c_ssize_t)),
        ("strides", POINTER(c_ssize_t)), ("suboffsets", POINTER(c_ssize_t)), ("internal", c_void_p),
    ]


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = [ctypes.py_object, POINTER(_PyBuffer), c_int]
_get.restype = c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = [POINTER(_PyBuffer)]
_release.restype = None


class Buffer:
    """One exported C-contiguous buffer. Raises BufferError where the object cannot be one.

    Attributes: address, n_bytes, shape, dtype (given, or by the buffer's format).
    """

    def __init__(self, obj: Any, *, writable: bool, dtype: DType | None = None) -> None:
        self._view = _PyBuffer()
        self._is_held = False
        _get(obj, ctypes.byref(self._view),
             _FORMAT | _C_CONTIGUOUS | (_WRITABLE if writable else 0))
        self._is_held = True
        view = self._view
        self.address: int = view.buf or 0
        self.n_bytes: int = view.len
        self.format = (view.format or b"B").decode()
        self.shape: tuple[int, ...] = tuple(view.shape[i] for i in range(view.ndim))
        self.dtype = dtype_of_format(self.format) if dtype is None else dtype
        if self.n_bytes % self.dtype.itemsize:
            raise ValueError(f"{self.n_bytes} bytes are no whole number of {self.dtype.name}")

    @property
    def count(self) -> int:
        """Elements."""
        return self.n_bytes // self.dtype.itemsize

    def release(self) -> None:
        """Let the exporter move its memory again. Idempotent."""
        if self._is_held:
            self._is_held = False
            _release(ctypes.byref(self._view))

    def __del__(self) -> None:
        self.release()
