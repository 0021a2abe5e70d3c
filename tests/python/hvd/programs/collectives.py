# SPDX-License-Identifier: Apache-2.0
"""Every collective × types × shapes against torch in one process."""

from __future__ import annotations

import itertools
import sys
from functools import reduce
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from checks import (  # noqa: E402
    DTYPES, FLOATS, SHAPES, all_values, assert_close, main, raises, values,
)

import gradd.torch as hvd  # noqa: E402


def rank() -> int:
    return hvd.rank()


def size() -> int:
    return hvd.size()


def expected(op: int, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Reduced in wide types; integers average toward zero."""
    dtype = inputs[0].dtype
    wide = [x.double() if dtype.is_floating_point else x.long() for x in inputs]
    if op == hvd.Min:
        result = reduce(torch.minimum, wide)
    elif op == hvd.Max:
        result = reduce(torch.maximum, wide)
    elif op == hvd.Product:
        result = reduce(torch.mul, wide)
    else:
        result = reduce(torch.add, wide)
        if op == hvd.Average:
            result = (result / len(wide) if dtype.is_floating_point
                      else torch.div(result, len(wide), rounding_mode="trunc"))
    return result.to(dtype)


def check_allreduce_of_every_type_shape_and_op() -> None:
    ops = {"average": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max,
           "product": hvd.Product}
    for dtype, shape, (name, op) in itertools.product(DTYPES, SHAPES, ops.items()):
        inputs = all_values(shape, dtype)
        mine = inputs[rank()].clone()
        result = hvd.allreduce(mine, name=f"{dtype}{shape}{name}", op=op)
        assert_close(result, expected(op, inputs), (dtype, shape, name))
        assert torch.equal(mine, inputs[rank()]), "the input was changed"


def check_allreduce_in_place_and_asynchronous() -> None:
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        inputs = all_values(shape, dtype)
        tensor = inputs[rank()].clone()
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        assert_close(tensor, expected(hvd.Sum, inputs), (dtype, shape))
        tensor = inputs[rank()].clone()
        handle = hvd.allreduce_async_(tensor, name="in place", op=hvd.Max)
        while not hvd.poll(handle):
            pass
        assert hvd.synchronize(handle) is tensor
        assert hvd.synchronize(handle) is None, "a handle is synchronised once"
        assert_close(tensor, expected(hvd.Max, inputs), (dtype, shape))


def check_allreduce_many_in_any_order() -> None:
    inputs = [all_values((31, i), torch.float32, seed=i) for i in range(50)]
    order = list(range(50))
    if rank() % 2:
        order.reverse()
    handles = {i: hvd.allreduce_async(inputs[i][rank()], name=f"many.{i}", op=hvd.Sum)
               for i in order}
    for i in reversed(order):
        assert_close(hvd.synchronize(handles[i]), expected(hvd.Sum, inputs[i]), i)


def check_allreduce_scales() -> None:
    for dtype in FLOATS:
        inputs = all_values((100,), dtype)
        for op in (hvd.Sum, hvd.Average):
            result = hvd.allreduce(inputs[rank()], op=op, prescale_factor=0.5,
                                   postscale_factor=3.0)
            want = expected(op, [x.double() * 0.5 for x in inputs]) * 3.0
            assert_close(result, want.to(dtype), (dtype, op))
    ones = torch.ones(4, dtype=torch.int32) * 3
    result = hvd.allreduce(ones, op=hvd.Sum, prescale_factor=0.5)
    assert_close(result, torch.full((4,), size(), dtype=torch.int32), "integers are truncated")
    zero = hvd.allreduce(torch.ones(3), op=hvd.Sum, postscale_factor=0.0)
    assert_close(zero, torch.zeros(3), "a factor of zero")


def check_half_types_do_not_overflow_in_the_sum() -> None:
    big = torch.full((8,), 40000.0, dtype=torch.float16)
    assert_close(hvd.allreduce(big, op=hvd.Average), big, "average")


def check_results_are_the_same_bits_on_all_ranks() -> None:
    result = hvd.allreduce(values(rank(), (10_001,), torch.float32), op=hvd.Average)
    for row in hvd.allgather(result.unsqueeze(0)):
        assert torch.equal(row, result)


def check_allreduce_compression() -> None:
    inputs = all_values((1000,), torch.float32)
    want = expected(hvd.Average, inputs)
    for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2)):
        result = hvd.allreduce(inputs[rank()], compression=compression)
        assert result.dtype == torch.float32
        assert float((result - want).abs().max()) < tolerance * float(want.abs().max())
    numbers = all_values((10,), torch.int64)
    assert_close(hvd.allreduce(numbers[rank()], op=hvd.Sum, compression=hvd.Compression.fp16),
                 expected(hvd.Sum, numbers), "integers are not compressed")


def check_grouped_allreduce() -> None:
    shapes = [(3,), (5, 2), (0,), (70_000,)]
    for dtype in DTYPES:
        inputs = [all_values(shape, dtype, seed=i) for i, shape in enumerate(shapes)]
        mine = [x[rank()].clone() for x in inputs]
        for got, want in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), inputs):
            assert_close(got, expected(hvd.Sum, want), dtype)
        results = hvd.grouped_allreduce_(mine, op=hvd.Average, name="group")
        for got, want, tensor in zip(results, inputs, mine):
            assert got is tensor
            assert_close(got, expected(hvd.Average, want), dtype)


def check_allgather_with_differing_first_dimensions() -> None:
    for dtype in [*DTYPES, torch.int16, torch.bool, torch.complex64]:
        for inner in ((), (3,), (2, 4)):
            inputs = [torch.arange(r * 10 + 1).to(dtype).reshape(-1, *[1] * len(inner))
                      .expand(-1, *inner).contiguous() for r in range(size())]
            result = hvd.allgather(inputs[rank()], name="gather")
            assert torch.equal(result, torch.cat(inputs)), (dtype, inner)
    empty = torch.zeros((0 if rank() == 0 else 2, 3))
    assert hvd.allgather(empty).shape == (2 * (size() - 1), 3)
    large = values(rank(), (200_000 + rank(), 3), torch.float32)
    assert torch.equal(hvd.allgather(large), torch.cat(
        [values(r, (200_000 + r, 3), torch.float32) for r in range(size())]))


def check_grouped_allgather() -> None:
    first = [torch.full((r + 1, 2), float(r)) for r in range(size())]
    second = [torch.full((3,), r) for r in range(size())]
    results = hvd.grouped_allgather([first[rank()], second[rank()]])
    assert torch.equal(results[0], torch.cat(first)) and torch.equal(results[1], torch.cat(second))


def check_gathers_may_be_synchronised_in_any_order() -> None:
    inputs = [[torch.full((i + r + 1,), r) for r in range(size())] for i in range(8)]
    handles = [hvd.allgather_async(inputs[i][rank()], name=f"any.{i}") for i in range(8)]
    order = list(range(8)) if rank() % 2 else list(reversed(range(8)))
    for i in order:
        assert torch.equal(hvd.synchronize(handles[i]), torch.cat(inputs[i]))


def check_broadcast_from_every_root() -> None:
    for dtype, shape, root in itertools.product([*DTYPES, torch.int16, torch.bool], SHAPES,
                                                range(size())):
        mine = values(rank(), shape, dtype)
        want = values(root, shape, dtype)
        assert torch.equal(hvd.broadcast(mine, root), want), (dtype, shape, root)
        assert torch.equal(mine, values(rank(), shape, dtype)), "the input was changed"
        assert hvd.broadcast_(mine, root, name="broadcast in place") is mine
        assert torch.equal(mine, want), (dtype, shape, root)


def check_alltoall_with_splits() -> None:
    def splits_of(r: int) -> list[int]:
        return [(r + other) % 3 for other in range(size())]

    def rows_for(sender: int, receiver: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((splits_of(sender)[receiver], 2), sender * 10 + receiver).to(dtype)

    for dtype in [*DTYPES, torch.int16]:
        mine = torch.cat([rows_for(rank(), r, dtype) for r in range(size())])
        want = torch.cat([rows_for(r, rank(), dtype) for r in range(size())])
        splits = splits_of(rank())
        for given in (splits, torch.tensor(splits, dtype=torch.int32)):
            received, counts = hvd.alltoall(mine, given, name="alltoall")
            assert torch.equal(received, want), dtype
            assert counts.tolist() == [splits_of(r)[rank()] for r in range(size())]
            assert counts.dtype == torch.int32
    even = torch.arange(2 * size()) + 100 * rank()
    want = torch.cat([torch.arange(2) + 2 * rank() + 100 * r for r in range(size())])
    assert torch.equal(hvd.alltoall(even), want)


def check_reducescatter() -> None:
    shapes = [(1,), (7,), (12, 3), (10, 0), (100_003, 2)]
    for dtype, shape, op in itertools.product(DTYPES, shapes, (hvd.Sum, hvd.Average)):
        inputs = all_values(shape, dtype)
        whole = expected(op, inputs)
        quotient, rest = divmod(shape[0], size())
        start = rank() * quotient + min(rank(), rest)
        want = whole[start:start + quotient + (rank() < rest)]
        assert_close(hvd.reducescatter(inputs[rank()], op=op), want, (dtype, shape, op))
        results = hvd.grouped_reducescatter([inputs[rank()]] * 2, op=op)
        assert_close(results[0], want, "group")
        assert_close(results[1], want, "group")
    scaled = hvd.reducescatter(torch.ones(size()), op=hvd.Sum, prescale_factor=2.0,
                               postscale_factor=0.25)
    assert_close(scaled, torch.full((1,), size() / 2), "scales")


def check_adasum() -> None:
    if size() & (size() - 1):
        raises(NotImplementedError, (), hvd.allreduce, torch.ones(3), op=hvd.Adasum)
        return
    parallel = torch.tensor([1.0, 2.0])
    assert_close(hvd.allreduce(parallel, op=hvd.Adasum), parallel, "parallel: averaged")
    orthogonal = torch.zeros(size())
    orthogonal[rank()] = 1.0 + rank()
    want = torch.arange(1.0, size() + 1)
    assert_close(hvd.allreduce(orthogonal, op=hvd.Adasum), want, "orthogonal: summed")
    if size() == 2:
        a, b = all_values((9,), torch.float64)
        dot = torch.dot(a, b)
        want = (1 - dot / (2 * a.dot(a))) * a + (1 - dot / (2 * b.dot(b))) * b
        assert_close(hvd.allreduce((a, b)[rank()], op=hvd.Adasum), want, "formula")


def check_sparse_allreduce() -> None:
    def contribution(r: int) -> torch.Tensor:
        indices = torch.tensor([[r, r + 1, 0], [0, 1, 2]])
        return torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0 + r]), (size() + 1, 3))

    dense = sum(contribution(r).to_dense() for r in range(size()))
    for op, want in ((hvd.Sum, dense), (hvd.Average, dense / size())):
        result = hvd.sparse_allreduce_async(contribution(rank()), "sparse", op)()
        assert result.is_sparse
        assert_close(result.to_dense(), want, op)


def check_join_with_uneven_data() -> None:
    # Rank r has r + 1 batches.
    for batch in range(rank() + 1):
        result = hvd.allreduce(torch.ones(5), name=f"uneven.{batch}", op=hvd.Average)
        assert_close(result, torch.full((5,), (size() - batch) / size()), batch)
    last = hvd.join()
    assert hvd.allgather(torch.tensor([last])).tolist() == [last] * size()
    if size() > 1:
        assert last == size() - 1
    # Unnamed ops match again although ranks have made different numbers of them.
    assert_close(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), float(size())))


def check_process_sets() -> None:
    if size() == 1:
        return
    evens = hvd.add_process_set(range(0, size(), 2))
    odds = hvd.add_process_set(hvd.ProcessSet(range(1, size(), 2)))
    mine = odds if rank() % 2 else evens
    other = evens if rank() % 2 else odds
    assert mine.included() and not other.included()
    assert mine.size() == len(mine.ranks) and mine.rank() == mine.ranks.index(rank())
    raises(ValueError, ("not part",), other.rank)
    raises(ValueError, ("not part",), hvd.allreduce, torch.ones(1), process_set=other)
    result = hvd.allreduce(torch.full((3,), float(rank())), op=hvd.Sum, process_set=mine)
    assert_close(result, torch.full((3,), float(sum(mine.ranks))))
    gathered = hvd.allgather(torch.full((rank() + 1,), rank()), process_set=mine)
    assert torch.equal(gathered, torch.cat([torch.full((r + 1,), r) for r in mine.ranks]))
    root = mine.ranks[-1]
    assert hvd.broadcast(torch.tensor(rank()), root, process_set=mine) == root
    n = mine.size()
    part = hvd.reducescatter(torch.ones(2 * n) * rank(), op=hvd.Sum, process_set=mine)
    assert_close(part, torch.full((2,), float(sum(mine.ranks))))
    received, counts = hvd.alltoall(torch.full((n,), rank()), [1] * n, process_set=mine)
    assert received.tolist() == mine.ranks and counts.tolist() == [1] * n
    hvd.barrier(process_set=mine)
    raises(ValueError, ("already",), hvd.add_process_set, range(0, size(), 2))
    assert hvd.remove_process_set(odds) and hvd.remove_process_set(evens)
    assert not hvd.remove_process_set(odds) and odds.process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)


def check_objects() -> None:
    assert hvd.broadcast_object({"rank": rank()}, size() - 1) == {"rank": size() - 1}
    assert hvd.broadcast_object(lambda: rank(), 0)() == rank(), "functions are pickled too"
    assert hvd.allgather_object(["x"] * rank()) == [["x"] * r for r in range(size())]


def check_names_of_any_length() -> None:
    for name in ("ä" * 200, "n" * 255, "n" * 5000, "n" * 4999 + "m"):
        assert_close(hvd.allreduce(torch.ones(1), name=name, op=hvd.Sum),
                     torch.tensor([float(size())]))


if __name__ == "__main__":
    main()
