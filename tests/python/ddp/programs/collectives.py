# SPDX-License-Identifier: Apache-2.0
"""Every collective of the c10d backend against what one process computes from all ranks' inputs.

Prints one JSON object: case -> "ok" or what went wrong.
"""

from __future__ import annotations

import json
import sys
import traceback
from datetime import timedelta
from typing import Callable

import torch
import torch.distributed as dist

import gradd.c10d.work

DTYPES = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
          torch.float32, torch.float64)
OTHER_DTYPES = (torch.bool, torch.int16, torch.complex64)
SHAPES = ((), (1,), (5,), (3, 7), (2, 3, 4), (0,), (300_000,))
REDUCTIONS = {
    dist.ReduceOp.SUM: lambda stack: stack.sum(0),
    dist.ReduceOp.PRODUCT: lambda stack: stack.prod(0),
    dist.ReduceOp.MIN: lambda stack: stack.amin(0),
    dist.ReduceOp.MAX: lambda stack: stack.amax(0),
    dist.ReduceOp.AVG: lambda stack: stack.sum(0) / len(stack),
}
CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def value(dtype: torch.dtype, shape: tuple[int, ...], rank: int, salt: int = 0) -> torch.Tensor:
    """What `rank` contributes; any rank can compute it."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    numbers = torch.randint(0, 4, shape, generator=generator)
    return numbers.to(dtype) if dtype != torch.bool else numbers > 1


def values(dtype: torch.dtype, shape: tuple[int, ...], salt: int = 0) -> torch.Tensor:
    """All ranks' contributions, stacked."""
    return torch.stack([value(dtype, shape, rank, salt) for rank in range(dist.get_world_size())])


def check(got: torch.Tensor, wanted: torch.Tensor, *what: object) -> None:
    assert got.shape == wanted.shape, f"{what}: shape {got.shape}, not {wanted.shape}"
    assert got.dtype == wanted.dtype, f"{what}: {got.dtype}, not {wanted.dtype}"
    exact = not wanted.is_floating_point()
    same = torch.equal(got, wanted) if exact else torch.allclose(
        got.double(), wanted.double(), rtol=1e-2 if got.element_size() == 2 else 1e-6)
    assert same, f"{what}: {got.flatten()[:8]}, not {wanted.flatten()[:8]}"


def reduced(op: object, stack: torch.Tensor) -> torch.Tensor:
    """In a wide type, so that the reference does not round."""
    wide = stack.double() if stack.is_floating_point() else stack.long()
    result = REDUCTIONS[op](wide)
    if not stack.is_floating_point():
        result = result.trunc() if result.is_floating_point() else result
    return result.to(stack.dtype)


@case
def all_reduce() -> None:
    for dtype in DTYPES:
        for op in REDUCTIONS:
            for shape in SHAPES:
                tensor = value(dtype, shape, dist.get_rank())
                dist.all_reduce(tensor, op)
                check(tensor, reduced(op, values(dtype, shape)), dtype, op, shape)


@case
def all_reduce_other_types() -> None:
    tensor = value(torch.bool, (9,), dist.get_rank())
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    check(tensor, values(torch.bool, (9,)).any(0))
    tensor = value(torch.bool, (9,), dist.get_rank())
    dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    check(tensor, values(torch.bool, (9,)).all(0))
    tensor = torch.complex(torch.ones(3), torch.full((3,), float(dist.get_rank())))
    dist.all_reduce(tensor)
    n = dist.get_world_size()
    assert torch.equal(tensor, torch.complex(torch.full((3,), float(n)),
                                             torch.full((3,), n * (n - 1) / 2)))


@case
def all_reduce_of_a_strided_tensor() -> None:
    whole = torch.zeros(6, 4)
    whole[:, 1] = value(torch.float32, (6,), dist.get_rank())
    dist.all_reduce(whole[:, 1])
    check(whole[:, 1].clone(), values(torch.float32, (6,)).sum(0))
    assert whole[:, 0].abs().sum() == 0 and whole[:, 2:].abs().sum() == 0


@case
def all_reduce_async_out_of_order() -> None:
    tensors = [value(torch.float32, (1000 + i,), dist.get_rank(), i) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i in reversed(range(20)):
        works[i].wait()
        # Newer versions of torch wrap a Work, and ask the wrapper.
        assert works[i].is_completed() or not isinstance(works[i], gradd.c10d.work.Work)
        check(tensors[i], values(torch.float32, (1000 + i,), i).sum(0), i)


@case
def future_of_a_work() -> None:
    tensor = value(torch.float32, (10,), dist.get_rank())
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    check(future.wait(), values(torch.float32, (10,)).sum(0) * 2)


@case
def all_reduce_coalesced() -> None:
    shapes = ((3,), (4, 5), (1000,))
    tensors = [value(torch.float32, shape, dist.get_rank(), i) for i, shape in enumerate(shapes)]
    dist.all_reduce_coalesced(tensors)
    for i, shape in enumerate(shapes):
        check(tensors[i], values(torch.float32, shape, i).sum(0), shape)


@case
def broadcast() -> None:
    for dtype in DTYPES + OTHER_DTYPES:
        for root in range(dist.get_world_size()):
            for shape in SHAPES:
                tensor = value(dtype, shape, dist.get_rank(), root)
                dist.broadcast(tensor, root)
                check(tensor, value(dtype, shape, root, root), dtype, root, shape)


@case
def reduce() -> None:
    for root in range(dist.get_world_size()):
        tensor = value(torch.float32, (3, 7), dist.get_rank())
        dist.reduce(tensor, root)
        if dist.get_rank() == root:
            check(tensor, values(torch.float32, (3, 7)).sum(0), root)
        else:
            check(tensor, value(torch.float32, (3, 7), dist.get_rank()), "untouched")


@case
def all_gather() -> None:
    for dtype in DTYPES + (torch.bool, torch.int16):
        for shape in SHAPES:
            outputs = [torch.empty(shape, dtype=dtype) for _ in range(dist.get_world_size())]
            dist.all_gather(outputs, value(dtype, shape, dist.get_rank()))
            check(torch.stack(outputs), values(dtype, shape), dtype, shape)


@case
def all_gather_into_tensor() -> None:
    n = dist.get_world_size()
    for shape in ((5,), (3, 7), (300_000,)):
        output = torch.empty(n * shape[0], *shape[1:])
        dist.all_gather_into_tensor(output, value(torch.float32, shape, dist.get_rank()))
        check(output, values(torch.float32, shape).flatten(0, 1), shape)


@case
def all_gather_object() -> None:
    objects: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": dist.get_rank(), "pad": "x" * dist.get_rank()})
    assert objects == [{"rank": r, "pad": "x" * r} for r in range(dist.get_world_size())], objects
    shared = ["zero", 1] if dist.get_rank() == 0 else [None, None]
    dist.broadcast_object_list(shared, 0)
    assert shared == ["zero", 1]


@case
def reduce_scatter() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        inputs = [value(torch.float32, (3, 5), rank, part) for part in range(n)]
        output = torch.empty(3, 5)
        dist.reduce_scatter(output, inputs, op)
        check(output, reduced(op, values(torch.float32, (3, 5), rank)), op)


@case
def reduce_scatter_tensor() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for rows in (1, 4, 100_000):
            output = torch.empty(rows, 2, dtype=dtype)
            dist.reduce_scatter_tensor(output, value(dtype, (n * rows, 2), rank))
            wanted = reduced(dist.ReduceOp.SUM, values(dtype, (n * rows, 2)))
            check(output, wanted[rank * rows:(rank + 1) * rows], dtype, rows)


@case
def all_to_all_single() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    output = torch.empty(2 * n)
    dist.all_to_all_single(output, value(torch.float32, (2 * n,), rank))
    check(output, values(torch.float32, (2 * n,))[:, 2 * rank:2 * rank + 2].flatten())
    # Rank r sends (r + 1) rows to rank 0, (r + 2) to rank 1, and so on.
    sends = [rank + 1 + r for r in range(n)]
    receives = [r + 1 + rank for r in range(n)]
    output = torch.empty(sum(receives), 3)
    dist.all_to_all_single(output, value(torch.float32, (sum(sends), 3), rank), receives, sends)
    wanted = []
    for r in range(n):
        start = sum(r + 1 + other for other in range(rank))
        rows = sum(r + 1 + other for other in range(n))
        wanted.append(value(torch.float32, (rows, 3), r)[start:start + r + 1 + rank])
    check(output, torch.cat(wanted))


@case
def all_to_all() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    inputs = [value(torch.float32, (4 + r,), rank, r) for r in range(n)]
    outputs = [torch.empty(4 + rank) for _ in range(n)]
    dist.all_to_all(outputs, inputs)
    for r in range(n):
        check(outputs[r], value(torch.float32, (4 + rank,), r, rank), r)


@case
def gather() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for root in range(n):
        outputs = [torch.empty(3, 2) for _ in range(n)] if rank == root else None
        dist.gather(value(torch.float32, (3, 2), rank), outputs, root)
        if outputs:
            check(torch.stack(outputs), values(torch.float32, (3, 2)), root)


@case
def scatter() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for root in range(n):
        parts = [value(torch.float32, (3, 2), root, r) for r in range(n)]
        output = torch.empty(3, 2)
        dist.scatter(output, parts if rank == root else None, root)
        check(output, value(torch.float32, (3, 2), root, rank), root)


@case
def send_and_recv() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    if n == 1:
        return
    right, left = (rank + 1) % n, (rank - 1) % n
    for dtype, count in ((torch.float32, 10), (torch.bool, 3), (torch.bfloat16, 300_000)):
        work = dist.isend(value(dtype, (count,), rank), right)
        received = torch.empty(count, dtype=dtype)
        assert dist.recv(received, left) == left
        work.wait()
        check(received, value(dtype, (count,), left), dtype)


@case
def send_and_recv_by_tag() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    if n == 1 or rank > 1:
        return
    if rank == 0:
        works = [dist.isend(torch.full((4,), float(tag)), 1, tag=tag) for tag in (1, 2, 1)]
    else:
        tensors = [torch.empty(4) for _ in range(3)]
        works = [dist.irecv(tensor, 0, tag=tag) for tensor, tag in zip(tensors, (2, 1, 1))]
    for work in works:
        work.wait()
    if rank == 1:
        assert [t[0].item() for t in tensors] == [2.0, 1.0, 1.0]


@case
def batched_messages() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    if n == 1:
        return
    right, left = (rank + 1) % n, (rank - 1) % n
    received = torch.empty(6)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, value(torch.float32, (6,), rank), right),
        dist.P2POp(dist.irecv, received, left)])
    for work in works:
        work.wait()
    check(received, value(torch.float32, (6,), left))


@case
def many_calls_without_waiting() -> None:
    tensor = torch.zeros(3)
    for _ in range(300):
        dist.all_reduce(tensor, async_op=True)
    last = torch.ones(1)
    dist.all_reduce(last)
    assert last.item() == dist.get_world_size()


@case
def barrier() -> None:
    store = dist.distributed_c10d._get_default_store()
    store.add("arrived", 1)
    dist.barrier()
    assert store.add("arrived", 0) == dist.get_world_size()


@case
def new_groups() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    if n < 2:
        return
    members = [n - 1, 0]
    pair = dist.new_group(members)
    evens = dist.new_group(list(range(0, n, 2)))
    if rank in members:
        tensor = torch.tensor([float(rank + 1)])
        dist.all_reduce(tensor, group=pair)
        assert tensor.item() == 1 + n, tensor
        tensor = torch.tensor([float(rank)])
        dist.broadcast(tensor, n - 1, group=pair)
        assert tensor.item() == n - 1, tensor
    if rank % 2 == 0:
        tensor = torch.tensor([1.0])
        dist.all_reduce(tensor, group=evens)
        assert tensor.item() == (n + 1) // 2, tensor
    dist.barrier()
    if rank in members:
        dist.destroy_process_group(pair)


def main() -> None:
    dist.init_process_group("gradd", timeout=timedelta(seconds=30))
    chosen = sys.argv[1:] or list(CASES)
    results = {}
    for name in chosen:
        try:
            CASES[name]()
            results[name] = "ok"
        except Exception:  # what went wrong is the result
            results[name] = traceback.format_exc()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
