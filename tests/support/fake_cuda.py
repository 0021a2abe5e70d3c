# SPDX-License-Identifier: Apache-2.0
"""The fake CUDA driver through ctypes, as a framework in a trainer would use the real one.

It is opened by its SONAME: LD_LIBRARY_PATH of the process must name the fakes' folder.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p

import numpy as np

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_cuda_view.restype = c_void_p
driver.fake_cuda_view.argtypes = [c_void_p, c_size_t]
driver.fake_cuda_count.restype = c_uint64
driver.fake_cuda_count.argtypes = [c_char_p]
driver.fake_cuda_stream_push.argtypes = [c_void_p, c_void_p, c_void_p]

PINNED, DEVICE, POSIX_FD, READ_WRITE = 1, 1, 1, 3


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Properties(ctypes.Structure):
    _fields_ = [("type", c_int), ("handle_types", c_int), ("location", Location),
                ("win32", c_void_p), ("flags", ctypes.c_uint8 * 8)]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]


def call(name: str, *arguments: object) -> None:
    rc = getattr(driver, name)(*arguments)
    assert rc == 0, f"{name}: {rc}"


def start(device: int = 0) -> None:
    """Make the device's primary context current, as the first CUDA call of a framework does."""
    context = c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", byref(context), device)
    call("cuCtxSetCurrent", context)


def count(name: str) -> int:
    return driver.fake_cuda_count(name.encode())


def alloc(n_bytes: int) -> int:
    pointer = c_ulonglong()
    call("cuMemAlloc_v2", byref(pointer), c_size_t(n_bytes))
    return pointer.value


def free(pointer: int) -> None:
    call("cuMemFree_v2", c_ulonglong(pointer))


def alloc_managed(n_bytes: int) -> int:
    pointer = c_ulonglong()
    call("cuMemAllocManaged", byref(pointer), c_size_t(n_bytes), 1)
    return pointer.value


def map_chunk(at: int, n_bytes: int, is_shareable: bool = True, device: int = 0) -> None:
    """Physical memory at a reserved address."""
    handle = c_ulonglong()
    properties = Properties(type=PINNED, handle_types=POSIX_FD if is_shareable else 0,
                            location=Location(DEVICE, device))
    call("cuMemCreate", byref(handle), c_size_t(n_bytes), byref(properties), c_ulonglong(0))
    call("cuMemMap", c_ulonglong(at), c_size_t(n_bytes), c_size_t(0), handle, c_ulonglong(0))
    access = Access(Location(DEVICE, device), READ_WRITE)
    call("cuMemSetAccess", c_ulonglong(at), c_size_t(n_bytes), byref(access), c_size_t(1))
    call("cuMemRelease", handle)


def unmap_chunk(at: int, n_bytes: int) -> None:
    call("cuMemUnmap", c_ulonglong(at), c_size_t(n_bytes))


def alloc_chunks(chunks: list[int], is_shareable: bool = True) -> int:
    """Several pieces of physical memory side by side, as expandable segments have them."""
    pointer = c_ulonglong()
    call("cuMemAddressReserve", byref(pointer), c_size_t(2 * sum(chunks)), c_size_t(0),
         c_ulonglong(0), c_ulonglong(0))
    at = pointer.value
    for n_bytes in chunks:
        map_chunk(at, n_bytes, is_shareable)
        at += n_bytes
    return pointer.value


def view(pointer: int, dtype: np.dtype, n: int) -> np.ndarray:
    """The device's bytes as the CPU finds them; only for what no stream is using."""
    n_bytes = n * np.dtype(dtype).itemsize
    address = driver.fake_cuda_view(pointer, n_bytes)
    assert address, f"{pointer:#x}: not {n_bytes} bytes of device memory"
    return np.frombuffer((ctypes.c_char * n_bytes).from_address(address), dtype)


def new_stream() -> int:
    stream = c_void_p()
    call("cuStreamCreateWithPriority", byref(stream), 1, 0)
    return stream.value or 0


def destroy_stream(stream: int) -> None:
    call("cuStreamDestroy_v2", c_void_p(stream))


def is_done(stream: int) -> bool:
    rc = driver.cuStreamQuery(c_void_p(stream))
    assert rc in (0, 600), rc
    return rc == 0


def begin_capture(stream: int) -> None:
    call("cuStreamBeginCapture_v2", c_void_p(stream), 0)


def end_capture(stream: int) -> None:
    graph = c_void_p()
    call("cuStreamEndCapture", c_void_p(stream), byref(graph))


HOST_FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)
_kept: list[object] = []


def push(stream: int, function: "object") -> None:
    """Python code in the order of the stream; it may block."""
    wrapped = HOST_FUNCTION(lambda _: function())
    _kept.append(wrapped)
    call("fake_cuda_stream_push", c_void_p(stream), ctypes.cast(wrapped, c_void_p), None)


def primary_is_active(device: int) -> bool:
    flags, active = c_uint(), c_int()
    call("cuDevicePrimaryCtxGetState", device, byref(flags), byref(active))
    return bool(active.value)
