# SPDX-License-Identifier: Apache-2.0
"""Elastic training: after a failure on any rank it goes on from the last commit."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from checks import main, raises  # noqa: E402
from torch import nn  # noqa: E402

import gradd  # noqa: E402
import gradd.torch as hvd  # noqa: E402

LAST_STEP = 8


def make_state() -> hvd.elastic.TorchState:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(100.0 * hvd.rank())  # sync() makes it rank 0's
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0),
                                         model.named_parameters())
    return hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


def one_step(state: hvd.elastic.TorchState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(1, 1)).sum().backward()
    state.optimizer.step()
    state.step += 1


def check_a_failed_op_returns_to_the_last_commit() -> None:
    failures, resets = [], []
    state = make_state()
    state.register_reset_callbacks([lambda: resets.append(gradd.context().epoch)])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> str:
        while state.step < LAST_STEP:
            one_step(state)
            if state.step == 4:
                state.commit()
            if state.step == 6 and not failures:
                failures.append(state.step)
                # Every rank fails here, as all do when one is lost.
                hvd.allreduce(torch.ones(2 + hvd.rank()), name="disagree")
                if hvd.size() == 1:
                    raise hvd.HorovodInternalError("simulated")
        return "done"

    before = gradd.context().epoch
    assert train(state) == "done"
    assert failures == [6] and len(resets) == 1
    assert resets[0] > before or hvd.size() == 1
    # 4 steps to the commit, 2 that were lost, 4 more: each takes 1 off rank 0's weight.
    assert float(state.model.weight) == -float(LAST_STEP), state.model.weight


def check_changed_hosts_keep_the_state() -> None:
    resets = []
    state = make_state()
    state.register_reset_callbacks([lambda: resets.append(state.step)])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < LAST_STEP:
            one_step(state)
            if state.step == 3 and hvd.rank() == 0 and not resets:
                state.on_hosts_updated(1.0, 1)
            state.commit()

    train(state)
    assert resets == [3]
    assert float(state.model.weight) == -float(LAST_STEP)


def check_restore_gives_back_values_and_later_attributes() -> None:
    state = make_state()
    state.sync()
    state.step = 5
    with torch.no_grad():
        state.model.weight.fill_(7.0)
    state.restore()
    assert state.step == 0 and float(state.model.weight) == 0.0
    replacement = nn.Linear(1, 1, bias=False)
    state.model = replacement
    assert state.model is replacement and state._handlers["model"].value is replacement


def check_sampler_divides_what_is_left() -> None:
    data = list(range(25))
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True, seed=3)
    parts = hvd.allgather_object(list(sampler))
    assert set(sum(parts, [])) == set(data)
    assert len({len(part) for part in parts}) == 1
    sampler.record_batch(0, 2)
    done = sum((part[:2] for part in parts), [])
    state = hvd.elastic.TorchState(sampler=sampler)
    state.sync()
    rest = hvd.allgather_object(list(state.sampler))
    assert set(sum(rest, [])) == set(data) - set(done)
    sampler.set_epoch(1)
    assert len(sampler) == -(-25 // hvd.size())
    assert hvd.allgather_object(list(sampler)) != parts, "another order in each epoch"
    tiny = hvd.elastic.ElasticSampler([0], shuffle=False)
    assert len(list(tiny)) == len(tiny) == 1


def check_errors_of_the_function_are_its_callers() -> None:
    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        raise KeyError("mine")
    raises(KeyError, ("mine",), train, make_state())


if __name__ == "__main__":
    main()
