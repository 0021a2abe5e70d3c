# SPDX-License-Identifier: Apache-2.0
"""One rank with PyTorch's CUDA tensors, through the C interface by ctypes: torch_tensors.py LIBRARY.

The launcher's variables say which rank. What libgradd needs is loaded from the library's own
folder first, so that a bundle works beside whatever the interpreter was built with.
"""

from __future__ import annotations

import ctypes
import json
import sys
from ctypes import c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

import torch

SUM, AVG, ALLREDUCE, BROADCAST = 0, 4, 0, 1
DTYPES = {torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6,
          torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}


class Op(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("kind", c_int32), ("dtype", c_int32), ("redop", c_int32),
        ("root", c_int32), ("set", c_uint32), ("name", c_char_p), ("input", c_void_p),
        ("output", c_void_p), ("count", c_uint64), ("out_capacity", c_uint64),
        ("counts", c_void_p), ("prescale", c_double), ("postscale", c_double),
        ("check_finite", c_uint32), ("dims", c_void_p), ("n_dims", c_uint64),
        ("stream", c_void_p),
    ]


def load(path: Path) -> ctypes.CDLL:
    for needed in sorted(path.parent.glob("libprotobuf-c.so.*")):
        ctypes.CDLL(str(needed), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.gradd_error.restype = c_char_p
    library.gradd_init.argtypes = [c_void_p, ctypes.POINTER(c_void_p)]
    library.gradd_submit.restype = c_int64
    library.gradd_submit.argtypes = [c_void_p, ctypes.POINTER(Op), c_size_t]
    library.gradd_wait.argtypes = [c_void_p, c_int64, c_double]
    library.gradd_wait_stream.argtypes = [c_void_p, c_int64, c_void_p, c_double]
    for name in ("gradd_rank", "gradd_size", "gradd_shutdown"):
        getattr(library, name).argtypes = [c_void_p]
    library.gradd_device_path.argtypes = [c_void_p, ctypes.POINTER(c_char_p)]
    return library


class Gradd:
    def __init__(self, path: Path) -> None:
        self.library = load(path)
        self.context = c_void_p()
        self.check(self.library.gradd_init(None, ctypes.byref(self.context)))
        self.rank = self.library.gradd_rank(self.context)
        self.size = self.library.gradd_size(self.context)
        why = c_char_p()
        if not self.library.gradd_device_path(self.context, ctypes.byref(why)):
            sys.exit(f"the worker takes no device memory: {(why.value or b'').decode()}")

    def check(self, status: int) -> int:
        if status < 0:
            sys.exit(f"status {status}: {self.library.gradd_error().decode()}")
        return status

    def run(self, tensor: torch.Tensor, name: str, kind: int = ALLREDUCE, redop: int = SUM,
            root: int = 0) -> None:
        """In place, in the order of the current stream; the host waits for no device."""
        stream = torch.cuda.current_stream().cuda_stream
        op = Op(struct_size=ctypes.sizeof(Op), kind=kind, dtype=DTYPES[tensor.dtype], redop=redop,
                root=root, name=name.encode(), input=tensor.data_ptr(), output=tensor.data_ptr(),
                count=tensor.numel(), stream=stream)
        handle = self.check(self.library.gradd_submit(self.context, ctypes.byref(op), 1))
        self.check(self.library.gradd_wait_stream(self.context, handle, stream, 60.0))
        self.check(self.library.gradd_wait(self.context, handle, 60.0))


def main() -> None:
    gradd = Gradd(Path(sys.argv[1]))
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    rank, size = gradd.rank, gradd.size
    total = size * (size + 1) / 2
    cases = 0
    for dtype in DTYPES:
        for shape in ((7,), (33, 5), (1000, 1000)):
            tensor = torch.full(shape, rank + 1, dtype=dtype, device=device)
            gradd.run(tensor, f"{dtype}{shape}")
            assert bool((tensor == total).all()), (dtype, shape, tensor.flatten()[:4])
            cases += 1
    # A matrix product as producer and consumer on a stream of its own: results differ if the
    # order of streams does not hold.
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(20):
            a = torch.eye(2048, device=device) * (i + 1)
            for _ in range(4):
                a = a @ torch.eye(2048, device=device)
            gradd.run(a, "product", redop=AVG)
            expected = torch.eye(2048, device=device) * (i + 1)
            assert torch.equal(a, expected), i
            cases += 1
    # Blocks that PyTorch frees and uses again, and views into them.
    for i in range(30):
        buffer = torch.empty(3_000_000 + 1000 * i, device=device)
        view = buffer[100 + i:200_100 + i]
        view.fill_(rank + 1 + i)
        gradd.run(view, "view")
        assert bool((view == total + size * i).all()), i
        del buffer, view
        cases += 1
    weights = torch.randn(10_000, device=device) if rank == 0 else torch.zeros(10_000, device=device)
    gradd.run(weights, "weights", kind=BROADCAST)
    assert bool((weights != 0).any())
    torch.cuda.synchronize()
    gradd.library.gradd_shutdown(gradd.context)
    print(json.dumps({"what": "torch", "rank": rank, "torch": torch.__version__,
                      "cases": cases + 1}), flush=True)


if __name__ == "__main__":
    main()
