# SPDX-License-Identifier: Apache-2.0
"""Runs every check_* function of a program on every rank; prints {check: "" or traceback}."""

from __future__ import annotations

import inspect
import json
import sys
import traceback
from types import ModuleType
from typing import Any, Iterator

import torch

import gradd.torch as hvd

DTYPES = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
          torch.float32, torch.float64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (1,), (17,), (0,), (3, 5), (2, 0, 3), (7, 11, 13), (300_007,)]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-6,
             torch.float64: 1e-14}


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What a rank contributes: every rank can compute every other one's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def all_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [values(rank, shape, dtype, seed) for rank in range(hvd.size())]


def assert_close(got: torch.Tensor, want: torch.Tensor, what: Any = "") -> None:
    """Equal shape and type; equal values, floating ones within TOLERANCE of the largest."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
    if not got.numel():
        return
    if not got.dtype.is_floating_point:
        assert torch.equal(got, want), f"{what}: {got.flatten()[:8]}, not {want.flatten()[:8]}"
        return
    scale = max(float(want.double().abs().max()), 1e-3)
    error = float((got.double() - want.double()).abs().max()) / scale
    assert error <= TOLERANCE[got.dtype], f"{what}: relative error {error}"


def raises(kind: type | tuple[type, ...], words: tuple[str, ...], function: Any, *args: Any,
           **options: Any) -> BaseException:
    """The exception, which is of that kind and whose sentence has these words."""
    try:
        function(*args, **options)
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"no {missing} in: {error}"
        return error
    raise AssertionError(f"{function} raised nothing, {kind} was due")


def checks_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if name.startswith("check_"):
            yield name, function


def main() -> None:
    """A failed check leaves the ranks out of step: the rest is not run."""
    module = sys.modules["__main__"]
    wanted = sys.argv[1:]
    results = {}
    hvd.init()
    for name, function in checks_of(module):
        if wanted and name not in wanted:
            continue
        try:
            function()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
            break
        hvd.barrier()
    print(json.dumps(results), flush=True)
    if any(results.values()):
        sys.exit(1)
    hvd.shutdown()
