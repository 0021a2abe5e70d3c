# SPDX-License-Identifier: Apache-2.0
"""Training on n ranks against one process on the whole batch, and what the optimizer promises."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from checks import main, raises  # noqa: E402
from torch import nn  # noqa: E402

import gradd  # noqa: E402
import gradd.torch as hvd  # noqa: E402

STEPS = 5
BATCH = 12  # divisible by 1, 2, 3 and 4 ranks


class Net(nn.Module):
    """Small, with an embedding and a parameter that no forward uses."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(20, 6, sparse=sparse)
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 3)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.embedding(words))))


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (torch.randint(0, 20, (BATCH,), generator=generator),
            torch.randint(0, 3, (BATCH,), generator=generator))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)


def train_alone(make: Callable[..., Any] = sgd, sparse: bool = False,
                factor: float = 1.0) -> list[torch.Tensor]:
    """Weights after STEPS steps on whole batches; gradients times `factor`."""
    net = Net(sparse)
    optimizer = make(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        words, labels = data(step)
        (F.cross_entropy(net(words), labels) * factor).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def train_together(make: Callable[..., Any] = sgd, sparse: bool = False, passes: int = 1,
                   zero_grad: Callable[..., None] | None = None, groups: Any = None,
                   **options: Any) -> list[torch.Tensor]:
    net = Net(sparse)
    if hvd.rank() > 0:
        with torch.no_grad():
            for p in net.parameters():
                p.add_(hvd.rank())  # broadcast_parameters() has something to do
    hvd.broadcast_parameters(net.state_dict(), 0)
    if callable(groups):
        groups = groups(net)
    optimizer = hvd.DistributedOptimizer(
        make(net), named_parameters=net.named_parameters(), backward_passes_per_step=passes,
        groups=groups, **options)
    for step in range(STEPS):
        (zero_grad or (lambda o: o.zero_grad()))(optimizer)
        words, labels = (x.chunk(hvd.size())[hvd.rank()] for x in data(step))
        for words_part, labels_part in zip(words.chunk(passes), labels.chunk(passes)):
            F.cross_entropy(net(words_part), labels_part).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    for i, (a, b) in enumerate(zip(got, want)):
        error = float((a - b).abs().max())
        assert error <= tolerance, f"parameter {i}: weights differ by {error}"
    for a in got:
        for row in hvd.allgather(a.flatten().unsqueeze(0)):
            assert torch.equal(row, a.flatten()), "ranks have different weights"


def check_plain() -> None:
    assert_same(train_together(), train_alone())


def check_adam() -> None:
    def adam(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-3)
    assert_same(train_together(adam), train_alone(adam))


def check_sum() -> None:
    assert_same(train_together(op=hvd.Sum), train_alone(factor=hvd.size()), 1e-5)


def check_gradients_set_to_none() -> None:
    assert_same(train_together(zero_grad=lambda o: o.zero_grad(set_to_none=True)), train_alone())


def check_compression_fp16() -> None:
    # 10 bits of fraction: 5e-4 of a gradient (below 1 here), times lr / (1 - momentum) = 3.
    assert_same(train_together(compression=hvd.Compression.fp16), train_alone(), 3e-3)


def check_compression_bf16() -> None:
    # 7 bits of fraction: 4e-3 of a gradient, times 3.
    assert_same(train_together(compression=hvd.Compression.bf16), train_alone(), 2e-2)


def check_two_backward_passes_per_step() -> None:
    # Gradients of the passes are summed: twice the mean over the batch.
    if BATCH // hvd.size() % 2 == 0:
        assert_same(train_together(passes=2), train_alone(factor=2), 1e-5)


def check_predivide() -> None:
    assert_same(train_together(gradient_predivide_factor=2.0), train_alone())
    assert_same(train_together(gradient_predivide_factor=float(hvd.size()), groups=2),
                train_alone())


def check_groups() -> None:
    for groups in (1, 2, 5):
        assert_same(train_together(groups=groups), train_alone())


def check_groups_of_parameters() -> None:
    assert_same(train_together(groups=lambda net: [[net.first.weight, net.second.bias],
                                                   [net.unused]]), train_alone())


def check_sparse_gradients() -> None:
    def plain_sgd(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.3)
    want = train_alone(plain_sgd, sparse=True)
    assert_same(train_together(plain_sgd, sparse=True), want)
    assert_same(train_together(plain_sgd, sparse=True, sparse_as_dense=True), want)


def check_parameters_in_different_order_on_each_rank() -> None:
    def shuffled(net: nn.Module) -> torch.optim.Optimizer:
        params = list(net.parameters())
        return sgd_of(params[hvd.rank():] + params[:hvd.rank()])

    def sgd_of(params: list) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.3, momentum=0.9)
    assert_same(train_together(shuffled), train_alone())
    assert_same(train_together(shuffled, groups=2), train_alone())


def check_a_rank_that_does_not_use_a_parameter() -> None:
    for groups in (None, 1, 2):
        a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([a, b], lr=1.0), [("a", a), ("b", b)], groups=groups)
        for _ in range(2):
            optimizer.zero_grad()
            (a.sum() + b.sum() if hvd.rank() == 0 else b.sum()).backward()
            optimizer.step()
        assert torch.allclose(a, torch.full((3,), 1 - 2 / hvd.size())), (groups, a)
        assert torch.allclose(b, torch.full((3,), -1.0)), (groups, b)


def check_process_set() -> None:
    """Only members reduce; others step on their own gradients."""
    n = hvd.size()
    if n < 3:
        return
    pair = hvd.add_process_set([0, n - 1])
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)],
                                         process_set=pair)
    (p * hvd.rank()).sum().backward()
    optimizer.step()
    want = (n - 1) / 2 if pair.included() else hvd.rank()
    assert torch.allclose(p, torch.full((2,), -float(want))), p
    hvd.remove_process_set(pair)


def check_clipping_between_synchronize_and_step() -> None:
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    words, labels = data(0)
    F.cross_entropy(net(words) * 100, labels).backward()
    optimizer.synchronize()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert norm > 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.skip_synchronize():
            optimizer.step()
    F.cross_entropy(net(words), labels).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("skip_synchronize" in str(w.message) for w in caught)


def check_misuse_of_the_optimizer() -> None:
    net = Net()
    named = list(net.named_parameters())
    wrap = hvd.DistributedOptimizer
    raises(ValueError, ("tuples",), wrap, sgd(net), list(net.parameters()))
    raises(ValueError, ("unique", "unused"), wrap, sgd(net), [*named, ("unused", net.unused)])
    raises(ValueError, ("not named",), wrap, sgd(net), named[1:])
    raises(ValueError, ("backward_passes_per_step",), wrap, sgd(net), named,
           backward_passes_per_step=0)
    raises(ValueError, ("predivide",), wrap, sgd(net), named, op=hvd.Sum,
           gradient_predivide_factor=2.0)
    raises(ValueError, ("groups",), wrap, sgd(net), named, groups="all")
    raises(ValueError, ("only appear once",), wrap, sgd(net), named,
           groups=[[net.unused], [net.unused]])
    raises(ValueError, ("check_finite",), wrap, sgd(net), named, check_finite="maybe")
    optimizer = wrap(sgd(net), named)
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    words, labels = data(0)
    F.cross_entropy(net(words), labels).backward()
    if hvd.size() > 1:
        raises(AssertionError, ("race condition",), optimizer.zero_grad)
        raises(AssertionError, ("backward_passes_per_step",),
               F.cross_entropy(net(words), labels).backward)
    optimizer.step()
    optimizer.zero_grad()


def check_gradients_live_in_shared_memory() -> None:
    if hvd.size() == 1:
        return
    net = Net()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    places = []
    for step in range(2):
        optimizer.zero_grad(set_to_none=False)
        words, labels = data(step)
        F.cross_entropy(net(words), labels).backward()
        optimizer.step()
        places.append([p.grad.data_ptr() for p in net.parameters()])
    assert places[0] == places[1], "gradients moved"
    regions = gradd.context()._regions
    for p in net.parameters():
        assert any(start <= p.grad.data_ptr() < start + n for start, n in regions.items())
    gradient = net.first.weight.grad
    want = gradient.clone()
    hvd.shutdown()
    assert torch.equal(gradient, want), "they outlive the job"
    hvd.init()
    optimizer.zero_grad()
    F.cross_entropy(net(words), labels).backward()
    optimizer.step()
    assert_same([p.detach() for p in net.parameters()], [p.detach() for p in net.parameters()])


def check_non_finite_gradients() -> None:
    last = hvd.size() - 1
    for mode in (None, "warn", "raise"):
        for groups in (None, 1):
            good, bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([good, bad], lr=1.0), [("good", good), ("bad.weight", bad)],
                check_finite=mode, groups=groups)
            factor = float("nan") if hvd.rank() == last else 1.0
            (good.sum() + (bad * factor).sum()).backward()
            if mode == "raise":
                raises(gradd.NonFinite, ("bad.weight", f"rank {last}", "4 elements"),
                       optimizer.step)
                assert not optimizer._in_flight
                continue
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            assert torch.equal(good, torch.zeros(3)) and bad.isnan().all()
            said = [str(w.message) for w in caught if f"rank {last}" in str(w.message)]
            assert len(said) == (1 if mode == "warn" else 0), said


def check_adasum_optimizer() -> None:
    n = hvd.size()
    if n & (n - 1):
        return
    p = nn.Parameter(torch.zeros(n))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)],
                                         op=hvd.Adasum)
    for _ in range(2):
        optimizer.zero_grad()
        p[hvd.rank()].mul(2.0).backward()
        optimizer.step()
    assert torch.allclose(p, torch.full((n,), -4.0)), "orthogonal changes add up"
    p = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)],
                                         op=hvd.Adasum)
    p.sum().backward()
    optimizer.step()
    assert torch.allclose(p, torch.full((3,), -1.0)), "the same change counts once"
    optimizer.zero_grad()


def check_optimizer_state_is_broadcast() -> None:
    for make in (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
                 lambda ps: torch.optim.Adam(ps, lr=0.1), lambda ps: torch.optim.RMSprop(ps)):
        p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        optimizer = make([{"params": [p]}, {"params": [q], "lr": 0.5 + hvd.rank()}])
        for _ in range(hvd.rank() + 1 if hvd.rank() != 1 else 0):  # rank 1 has no state yet
            (p.sum() * (hvd.rank() + 1) + q.sum()).backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.param_groups[1]["lr"] == 0.5
        states = hvd.allgather_object(optimizer.state_dict())
        for number, state in states[0]["state"].items():
            for key, value in state.items():
                for other in states[1:]:
                    got = other["state"][number][key]
                    assert torch.equal(got, value) if torch.is_tensor(value) else got == value
    raises(ValueError, ("LBFGS",), hvd.broadcast_optimizer_state,
           torch.optim.LBFGS([nn.Parameter(torch.ones(1))]), 0)


if __name__ == "__main__":
    main()
