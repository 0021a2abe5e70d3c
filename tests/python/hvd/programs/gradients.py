# SPDX-License-Identifier: Apache-2.0
"""Autograd through the collectives, SyncBatchNorm, misuse, life and death of the context."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from checks import assert_close, main, raises, values  # noqa: E402
from torch import nn  # noqa: E402

import gradd  # noqa: E402
import gradd.torch as hvd  # noqa: E402


def weights(r: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The gradient that a rank's loss has by the op's output."""
    return values(r, shape, torch.float64, seed=7)


def check_gradient_of_allreduce() -> None:
    for op in (hvd.Sum, hvd.Average):
        x = values(hvd.rank(), (4, 3), torch.float64).requires_grad_()
        (hvd.allreduce(x, op=op) * weights(hvd.rank(), (4, 3))).sum().backward()
        want = sum(weights(r, (4, 3)) for r in range(hvd.size()))
        assert_close(x.grad, want / hvd.size() if op == hvd.Average else want)
    xs = [values(hvd.rank(), (2,), torch.float64).requires_grad_() for _ in range(3)]
    sum(y.sum() for y in hvd.grouped_allreduce(xs, op=hvd.Sum)).backward()
    for x in xs:
        assert_close(x.grad, torch.full((2,), float(hvd.size()), dtype=torch.float64))


def check_gradient_of_allgather() -> None:
    rows = sum(r + 1 for r in range(hvd.size()))
    start = sum(r + 1 for r in range(hvd.rank()))
    x = values(hvd.rank(), (hvd.rank() + 1, 2), torch.float64).requires_grad_()
    (hvd.allgather(x) * weights(hvd.rank(), (rows, 2))).sum().backward()
    mean = sum(weights(r, (rows, 2)) for r in range(hvd.size())) / hvd.size()
    assert_close(x.grad, mean[start:start + hvd.rank() + 1])


def check_gradient_of_broadcast() -> None:
    x = values(hvd.rank(), (5,), torch.float64).requires_grad_()
    (hvd.broadcast(x, 0) * weights(hvd.rank(), (5,))).sum().backward()
    mean = sum(weights(r, (5,)) for r in range(hvd.size())) / hvd.size()
    assert_close(x.grad, mean if hvd.rank() == 0 else torch.zeros_like(mean))


def check_gradient_of_alltoall() -> None:
    n = hvd.size()
    x = values(hvd.rank(), (2 * n + 1,), torch.float64).requires_grad_()
    received, _ = hvd.alltoall(x, [2] * n)  # the last row goes nowhere
    (received * weights(hvd.rank(), (2 * n,))).sum().backward()
    mine = [weights(r, (2 * n,))[2 * hvd.rank():2 * hvd.rank() + 2] for r in range(n)]
    assert_close(x.grad, torch.cat([*mine, torch.zeros(1, dtype=torch.float64)]))


def check_gradient_of_reducescatter() -> None:
    n = hvd.size()
    for op, factor in ((hvd.Average, 1), (hvd.Sum, n)):
        x = values(hvd.rank(), (3 * n,), torch.float64).requires_grad_()
        (hvd.reducescatter(x, op=op) * weights(hvd.rank(), (3,))).sum().backward()
        want = torch.cat([weights(r, (3,)) for r in range(n)]) * factor
        assert_close(x.grad, want, "as Horovod has it: gathered, times size for Sum")


def check_sync_batch_norm_is_batch_norm_of_the_whole_batch() -> None:
    n = hvd.size()
    for shape in ((4, 3), (2, 3, 5), (3, 3, 2, 2)):
        batches = [values(r, (shape[0] + r, *shape[1:]), torch.float64) + 5 for r in range(n)]
        ours = hvd.SyncBatchNorm(3).double()
        theirs = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](3).double()
        with torch.no_grad():
            ours.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
            theirs.weight.copy_(ours.weight)
        whole = torch.cat(batches).requires_grad_()
        mine = batches[hvd.rank()].clone().requires_grad_()
        start = sum(len(b) for b in batches[:hvd.rank()])
        stop = start + len(mine)
        grads = torch.cat([weights(r, tuple(b.shape)) for r, b in enumerate(batches)])
        for _ in range(2):
            want = theirs(whole)
            got = ours(mine)
        assert_close(got, want[start:stop].detach(), shape)
        (want * grads).sum().backward()
        (got * weights(hvd.rank(), tuple(mine.shape))).sum().backward()
        assert torch.allclose(mine.grad, whole.grad[start:stop], atol=1e-12), shape
        assert torch.allclose(ours.running_mean, theirs.running_mean, rtol=1e-12)
        assert torch.allclose(ours.running_var, theirs.running_var, rtol=1e-12)
        summed = hvd.allreduce(ours.weight.grad, op=hvd.Sum)
        assert torch.allclose(summed, theirs.weight.grad, atol=1e-12)
        assert torch.allclose(ours.eval()(mine), theirs.eval()(whole)[start:stop], atol=1e-12)


def check_misuse_is_a_value_error_here_and_nothing_elsewhere() -> None:
    square = torch.ones(4, 4)
    raises(ValueError, ("contiguous",), hvd.allreduce, square.t()[:2])
    raises(ValueError, ("not supported",), hvd.allreduce, torch.ones(2).bool())
    raises(ValueError, ("not supported",), hvd.allreduce, square.to_sparse())
    raises(ValueError, ("only one",), hvd.allreduce, square, average=True, op=hvd.Sum)
    raises(ValueError, ("root rank 99",), hvd.broadcast, square, 99)
    raises(ValueError, ("scalar",), hvd.allgather, torch.tensor(1.0))
    raises(ValueError, ("scalar",), hvd.reducescatter, torch.tensor(1.0))
    raises(ValueError, ("add up to",), hvd.alltoall, square, [5] * hvd.size())
    raises(ValueError, ("splits for",), hvd.alltoall, square, [0] * (hvd.size() + 1))
    raises(ValueError, ("int32",), hvd.alltoall, square,
           torch.ones(hvd.size(), dtype=torch.int64))
    raises(ValueError, ("not registered",), hvd.allreduce, square,
           process_set=hvd.ProcessSet([0]))
    raises(ValueError, ("not in use",), hvd.poll, 10**9)
    if hvd.size() > 1:
        raises(ValueError, ("divided evenly",), hvd.alltoall, torch.ones(hvd.size() + 1))
    handle = hvd.allreduce_async(square, name="twice")
    raises(ValueError, ("twice", "in flight already"), hvd.allreduce_async, square, name="twice")
    hvd.synchronize(handle)
    hvd.synchronize(hvd.allreduce_async(square, name="twice"))


def check_numpy_level_calls_on_any_buffer() -> None:
    import array

    import numpy

    n, me = hvd.size(), hvd.rank()
    plain = array.array("d", [1.0, 2.0])
    gradd.allreduce(plain, op=gradd.ReduceOp.SUM)
    assert list(plain) == [n, 2.0 * n]
    out = numpy.zeros(3, numpy.int32)
    gradd.allreduce(numpy.full(3, me, numpy.int32), out, op=gradd.ReduceOp.MAX, name="numpy")
    assert out.tolist() == [n - 1] * 3
    half = bytearray(torch.ones(4, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes())
    gradd.allreduce(half, op=gradd.ReduceOp.SUM, dtype=gradd.DType.BF16)
    assert torch.frombuffer(half, dtype=torch.bfloat16).tolist() == [n] * 4
    gathered, counts = gradd.allgather(numpy.full(me + 1, me))
    assert gathered.tolist() == [r for r in range(n) for _ in range(r + 1)]
    assert counts == [r + 1 for r in range(n)]
    text, _ = gradd.allgather(bytes([65 + me]))
    assert bytes(text) == bytes(range(65, 65 + n)), "a readable buffer is enough"
    received, counts = gradd.alltoall(numpy.arange(n) + 10.0 * me)
    assert received.tolist() == [10.0 * r + me for r in range(n)] and counts == [1] * n
    assert gradd.reduce_scatter(numpy.ones(n), op=gradd.ReduceOp.SUM).tolist() == [n]
    message = bytearray(b"from 0" if me == 0 else b"nobody")
    gradd.broadcast(message, 0)
    assert message == b"from 0"
    raises(ValueError, (), gradd.allreduce, numpy.zeros(2, numpy.int16))
    raises(BufferError, (), gradd.allreduce, b"readonly")


def check_shared_memory_outlives_the_context() -> None:
    region = gradd.context().alloc(400_000)
    tensor = torch.frombuffer(region.array, dtype=torch.float32)
    del region
    tensor.fill_(hvd.rank() + 1)
    hvd.allreduce_(tensor, op=hvd.Sum)
    want = float(sum(range(1, hvd.size() + 1)))
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert float(tensor[-1]) == want
    tensor.add_(1)
    hvd.init()
    hvd.allreduce_(tensor, op=hvd.Average)
    assert_close(tensor, torch.full_like(tensor, want + 1), "and can be reduced in the next one")
    del tensor


def check_calls_after_shutdown() -> None:
    handle = None
    if hvd.size() > 1 and hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(3), name="nobody else submits this")
    hvd.barrier()
    hvd.shutdown()
    hvd.shutdown()
    if handle is not None:
        raises(hvd.HorovodInternalError, (), hvd.synchronize, handle)
    raises(ValueError, ("init",), hvd.rank)
    raises(ValueError, ("init",), hvd.size)
    raises(hvd.HorovodInternalError, ("init",), hvd.allreduce, torch.ones(1))
    hvd.init()


def check_a_forked_child_is_refused_and_harms_nobody() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            gradd.context().barrier()
            os.write(write, b"no error")
        except gradd.Forked:
            os.write(write, b"refused")
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"refused"
    os.close(read)
    os.waitpid(child, 0)
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, num_workers=2)
    for batch in loader:
        assert_close(hvd.allreduce(batch), batch, "while workers of a DataLoader come and go")


def check_who_and_where() -> None:
    assert hvd.is_initialized() and hvd.is_homogeneous()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.gloo_built() and hvd.gloo_enabled() and not hvd.mpi_built()
    assert hvd.nccl_built() == 0 and not hvd.mpi_threads_supported()
    hvd.init()
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    assert hvd.global_process_set.size() == hvd.size()


def check_init_with_process_sets_or_some_ranks() -> None:
    rank, size = hvd.rank(), hvd.size()
    hvd.barrier()
    hvd.shutdown()
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([size - 1]), hvd.ProcessSet(range(size))]
    assert sets[0].size() is None and sets[0].rank() is None
    hvd.init(process_sets=sets)
    assert (sets[0].process_set_id is not None) == (size > 1)
    assert sets[2].process_set_id is None, "all ranks are the global set"
    if size > 1 and rank == 0:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=sets[0]).item() == 1
    hvd.barrier()
    hvd.shutdown()
    hvd.init(comm=list(reversed(range(size))))
    assert hvd.rank() == size - 1 - rank and hvd.size() == size
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(reversed(range(size)))
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    assert hvd.rank() == rank


def check_timeline() -> None:
    import json
    import tempfile

    raises(ValueError, ("HOROVOD_TIMELINE",), hvd.start_timeline, "/dev/null")
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    try:
        with tempfile.NamedTemporaryFile("r") as file:
            hvd.start_timeline(file.name, mark_cycles=True)
            hvd.allreduce(torch.ones(2, 3), name="a \"quoted\" name")
            if hvd.rank() == 0:
                json.load(file)  # complete also while it is written
                file.seek(0)
            hvd.allgather(torch.ones(2), name="rows")
            hvd.stop_timeline()
            hvd.allreduce(torch.ones(1), name="after the end")
            if hvd.rank() > 0:
                return
            events = json.load(file)
    finally:
        del os.environ["HOROVOD_TIMELINE"]
    assert "start_time_since_epoch_in_micros" in events[0]["args"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"
             and "name" in event["args"]]
    assert names == ['allreduce.a "quoted" name', "allgather.rows"]
    spans = [(event["name"], event["ph"]) for event in events if event["ph"] in "BE"]
    assert spans[:4] == [("NEGOTIATE_ALLREDUCE", "B"), ("NEGOTIATE_ALLREDUCE", "E"),
                         ("ALLREDUCE", "B"), ("ALLREDUCE", "E")]
    assert sum(event["name"] == "CYCLE_START" for event in events) == 2
    last = next(e for e in events if e["name"] == "ALLREDUCE" and e["ph"] == "E")
    assert last["args"] == {"dtype": "float32", "shape": "[2, 3]"}
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)


def check_two_threads_at_once() -> None:
    import threading

    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for i in range(100):
                got = hvd.allreduce(torch.full((50,), float(hvd.rank())), op=hvd.Sum,
                                    name=f"thread.{thread}.{i}")
                assert float(got[0]) == sum(range(hvd.size()))
                gathered = hvd.allgather(torch.tensor([thread]), name=f"gather.{thread}.{i}")
                assert gathered.tolist() == [thread] * hvd.size()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def check_shutdown_while_a_thread_waits() -> None:
    """The thread is told; nothing of the library is used after it is gone."""
    import threading

    outcome: list[object] = []
    is_waiting = threading.Event()

    def wait() -> None:
        try:
            handle = gradd.context().submit([gradd.make_op(
                gradd.Kind.BARRIER, f"only rank {hvd.rank()} comes here")])
            is_waiting.set()
            outcome.append(gradd.context().wait(handle))
        except gradd.HorovodInternalError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    is_waiting.wait()
    hvd.barrier()
    hvd.shutdown()
    thread.join()
    hvd.init()
    if hvd.size() > 1:
        assert isinstance(outcome[0], gradd.HorovodInternalError), outcome
    else:
        assert outcome, "a barrier of one ends at once"


def check_completion_callbacks() -> None:
    """Called once, with the error or None, where counts can be read; what is left is told."""
    import threading

    context = gradd.context()
    calls: list[tuple] = []
    done = threading.Event()
    mine, out = bytearray(b"a" * (hvd.rank() + 1)), bytearray(100)
    source, target = gradd._buffer.Buffer(mine, writable=True), gradd._buffer.Buffer(
        out, writable=True)
    handle = context.submit([gradd.make_op(
        gradd.Kind.ALLGATHER, "callback", input=source.address, output=target.address,
        count=source.count, out_capacity=100)])

    def on_done(error: gradd.GraddError | None) -> None:
        calls.append((error, context.counts(handle), threading.current_thread().name))
        done.set()

    context.add_done_callback(handle, on_done)
    assert done.wait(30)
    hvd.barrier()
    assert calls == [(None, [r + 1 for r in range(hvd.size())], "gradd-progress")]
    if hvd.size() == 1:
        return
    errors: list[object] = []
    handle = context.submit([gradd.make_op(
        gradd.Kind.BARRIER, f"only rank {hvd.rank()} submits this")])
    context.add_done_callback(handle, errors.append)
    hvd.barrier()
    hvd.shutdown()
    assert len(errors) == 1 and isinstance(errors[0], gradd.HorovodInternalError), errors
    hvd.init()


if __name__ == "__main__":
    main()
