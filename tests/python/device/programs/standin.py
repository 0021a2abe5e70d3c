# SPDX-License-Identifier: Apache-2.0
"""A stand-in for CUDA tensors where torch has no CUDA: imported before gradd's torch modules.

Tensors lie in memory of the fake driver, whose addresses the CPU may use here, so that torch's own
operators, which are of the CPU and run at once, work on them. To gradd they are device memory on
one stream. What torch does in streams by itself is therefore not tested; what gradd does is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Iterator

os.environ["GRADD_FAKE_CUDA_READABLE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "support"))

import fake_cuda as cuda  # noqa: E402
import torch  # noqa: E402

import gradd  # noqa: E402
import gradd._device as device  # noqa: E402

_ranges: list[tuple[int, int]] = []
_thread = threading.local()


def start() -> None:
    """As torch does when a thread first uses its device."""
    if not hasattr(_thread, "has_started"):
        _thread.has_started = True
        cuda.start()


start()


class Stream:
    def __init__(self) -> None:
        self.cuda_stream = cuda.new_stream()


stream, side = Stream(), Stream()


def empty(shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    n = torch.Size(shape).numel()
    start()
    n_bytes = max(n, 1) * torch.empty((), dtype=dtype).element_size()
    address = cuda.alloc(n_bytes)
    _ranges.append((address, n_bytes))
    memory = (ctypes.c_char * n_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)[:n].view(shape)


def is_device(tensor: torch.Tensor) -> bool:
    return any(at <= tensor.data_ptr() < at + n_bytes for at, n_bytes in _ranges)


def settle() -> None:
    """The streams have done all; found out by asking."""
    deadline = time.monotonic() + 20
    while not (cuda.is_done(stream.cuda_stream) and cuda.is_done(side.cuda_stream)):
        assert time.monotonic() < deadline, "the streams are stuck"
        time.sleep(0.0005)


@contextlib.contextmanager
def _on(_stream: Any) -> Iterator[None]:
    yield


_new_empty = torch.Tensor.new_empty


def _new_empty_there(self: torch.Tensor, size: Any, **options: Any) -> torch.Tensor:
    return empty(size, self.dtype) if is_device(self) else _new_empty(self, size, **options)


_empty_like = torch.empty_like


def _empty_like_there(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    return empty(tensor.shape, tensor.dtype) if is_device(tensor) else _empty_like(tensor,
                                                                                  **options)


device.is_device = is_device
device.stream_of = lambda tensor: stream.cuda_stream if is_device(tensor) else 0
device.current = lambda tensor: stream if is_device(tensor) else None
device.side_stream = lambda tensor: side
device.on = _on
device.mark = lambda tensor: None
device.future_of = lambda tensor: torch.futures.Future()
torch.Tensor.new_empty = _new_empty_there  # type: ignore[method-assign]
torch.empty_like = _empty_like_there


def of(values: torch.Tensor) -> torch.Tensor:
    """A device tensor with these values."""
    tensor = empty(values.shape, values.dtype)
    tensor.copy_(values)
    return tensor


def path() -> str:
    return "shared" if gradd.context().device_path()[0] else "staged"
