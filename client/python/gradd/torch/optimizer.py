# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: gradients are reduced while backward() still runs.

A hook on every parameter submits its gradient as soon as it is complete; step() (or
synchronize()) waits for all of them. Gradients that a rank did not compute take part as zeros, so
that ranks whose models take different ways agree.

Invariant: when synchronize() returns or raises, no op of the optimizer is in flight.
"""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch

from gradd.errors import GraddError
from gradd.torch import engine
from gradd.torch.basics import (
    Adasum, Average, ProcessSet, global_process_set, size,
)
from gradd.torch.compression import Compression
from gradd.torch.functions import broadcast_object
from gradd.torch.gradient_memory import GradientMemory
from gradd.torch.ops import (
    allreduce_async_, grouped_allreduce_async_, sparse_allreduce_async, synchronize,
)

_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally.")
_ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition.")
_SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.")


class _Reduction:
    """Gradients in flight: of one parameter, or of a group."""

    def __init__(self, params: Sequence[torch.nn.Parameter], wait: Callable[[], Any],
                 apply: Callable[[Any], None]) -> None:
        self.params = params
        self.wait = wait
        self.apply = apply


def _check_names(named: list, param_groups: list) -> None:
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), "
                         "usually produced by model.named_parameters().")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError("Parameter names in named_parameters must be unique. Found duplicates: "
                         + ", ".join(twice))
    known = {id(p) for _, p in named}
    unnamed = [id(p) for group in param_groups for p in group["params"] if id(p) not in known]
    if unnamed:
        raise ValueError("named_parameters was specified, but one or more model parameters were "
                         "not named. Python object ids: " + ", ".join(map(str, unnamed)))


def _check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, list):
        raise ValueError("groups should be a non-negative integer or a list of list of "
                         "torch.Tensor.")
    seen = set()
    for members in groups:
        for p in members:
            if not isinstance(p, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if id(p) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(p))


class _Hooked:
    """What both distributed optimizers share: names, hooks, and counting backward passes."""

    def _set_up(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
                compression: Any, backward_passes_per_step: int) -> None:
        if named_parameters is not None:
            named = list(named_parameters)
        else:
            named = [(f"allreduce.noname.{i}.{j}", p)
                     for i, group in enumerate(self.param_groups)
                     for j, p in enumerate(group["params"])]
        _check_names(named, self.param_groups)
        self._parameter_names = {p: name for name, p in named}
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self._passes_left: dict[torch.nn.Parameter, int] = {}
        self._accumulators: list[Any] = []  # keeps the hooks alive
        self._requires_update: list[torch.nn.Parameter] = []
        self._in_flight: dict[torch.nn.Parameter, _Reduction] = {}
        self._has_gradients = False  # some backward pass since the last synchronize()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes accumulate locally before gradients are reduced."""
        self.backward_passes_per_step = passes
        self._passes_left.clear()

    def _register_hooks(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if not p.requires_grad:
                    continue
                self._requires_update.append(p)
                accumulator = p.expand_as(p).grad_fn.next_functions[0][0]
                accumulator.register_hook(self._make_hook(p))
                self._accumulators.append(accumulator)

    def _make_hook(self, p: torch.nn.Parameter) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            left = self._passes_left.get(p, self.backward_passes_per_step)
            if left <= 0:
                raise AssertionError(_TOO_MANY_PASSES)
            if p.grad is not None and p.grad.requires_grad:
                raise AssertionError("gradients that require gradients cannot be reduced: do not "
                                     "use create_graph")
            self._has_gradients = True
            self._passes_left[p] = left - 1
            if left == 1:
                self._on_gradient(p)
        return hook

    def _on_gradient(self, p: torch.nn.Parameter) -> None:
        raise NotImplementedError

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """The inner optimizer's; AssertionError while gradients are in flight."""
        if self._has_gradients:
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        super().zero_grad(*args, **options)

    def _finish_all(self) -> None:
        """Wait for everything in flight; then raise the first error, if any."""
        first_error: Exception | None = None
        reductions = {id(reduction): reduction for reduction in self._in_flight.values()}
        for reduction in reductions.values():
            try:
                output = reduction.wait()
                if first_error is None:
                    reduction.apply(output)
            except GraddError as error:
                first_error = first_error or error
        self._in_flight.clear()
        self._passes_left.clear()
        self._has_gradients = False
        if first_error is not None:
            raise first_error


class _DistributedOptimizer(_Hooked):
    """Mixed in before the user's optimizer class."""

    def _set_up_reduction(self, op: int, gradient_predivide_factor: float, groups: Any,
                          sparse_as_dense: bool, process_set: ProcessSet,
                          check_finite: str | None) -> None:
        _check_groups(groups)
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.check_finite = check_finite
        self._synchronized = False
        self._should_synchronize = True
        self._sparse_params: set[torch.nn.Parameter] = set()
        self._group_of: dict[torch.nn.Parameter, tuple[torch.nn.Parameter, ...]] = {}
        self._arrived: dict[tuple, int] = {}
        self._memory = GradientMemory(p for group in self.param_groups for p in group["params"])
        is_alone = size() == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"
        if not process_set.included() or (is_alone and check_finite is None):
            return  # nothing to reduce: a plain optimizer
        if groups is not None:
            self._form_groups(groups)
        self._register_hooks()

    def _form_groups(self, groups: Any) -> None:
        """Groups in the parameter order of the set's first rank: all ranks form the same."""
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        names = broadcast_object(
            [self._parameter_names[p] for p in params], (self.process_set.ranks or [0])[0],
            "optimizer.groups", self.process_set)
        place = {name: i for i, name in enumerate(names)}
        params.sort(key=lambda p: place.get(self._parameter_names[p], len(place)))
        if isinstance(groups, list):
            ids = {id(p) for p in params}
            formed = [tuple(p for p in members if id(p) in ids) for members in groups]
            grouped = {id(p) for members in formed for p in members}
            formed += [(p,) for p in params if id(p) not in grouped]
        else:
            quotient, rest = divmod(len(params), groups)
            cuts = [i * quotient + min(i, rest) for i in range(groups + 1)]
            formed = [tuple(params[a:b]) for a, b in zip(cuts, cuts[1:])]
        for members in formed:
            for p in members:
                self._group_of[p] = members

    # -------------------------------------------------------------- reducing

    def _on_gradient(self, p: torch.nn.Parameter) -> None:
        members = self._group_of.get(p)
        if members is None:
            self._reduce([p])
            return
        self._arrived[members] = self._arrived.get(members, 0) + 1
        if self._arrived[members] == len(members):
            self._reduce(members)

    def _reduce(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Submit the gradients of a parameter or of a group."""
        members = self._group_of.get(params[0])
        if members is not None:
            self._arrived[members] = 0
        for p in params:
            self._ensure_gradient(p)
        if members is None and params[0].grad.is_sparse and not self.sparse_as_dense:
            reduction = self._reduce_sparse(params[0])
        else:
            reduction = self._reduce_dense(params, members is not None)
        for p in params:
            self._in_flight[p] = reduction

    def _ensure_gradient(self, p: torch.nn.Parameter) -> None:
        """A gradient that was not computed is zero: other ranks may have one."""
        if p.grad is None:
            zeros = torch.zeros_like(p, memory_format=torch.preserve_format)
            p.grad = zeros.to_sparse() if p in self._sparse_params else zeros
        if p.grad.is_sparse:
            self._sparse_params.add(p)
        elif self._compression is Compression.none:
            self._memory.adopt(p)

    def _reduce_sparse(self, p: torch.nn.Parameter) -> _Reduction:
        wait = sparse_allreduce_async(p.grad, self._parameter_names[p], self.op,
                                      self.process_set)

        def apply(output: torch.Tensor) -> None:
            p.grad = output

        return _Reduction([p], wait, apply)

    def _reduce_dense(self, params: Sequence[torch.nn.Parameter], is_group: bool) -> _Reduction:
        tensors, contexts = [], []
        for p in params:
            grad = p.grad
            if grad.is_sparse and not self.sparse_as_dense:
                raise ValueError(f"\"{self._parameter_names[p]}\": a sparse gradient cannot be in "
                                 "a group: use sparse_as_dense=True")
            grad = grad.to_dense() if grad.is_sparse else grad
            tensor, context = self._compression.compress(grad.contiguous())
            tensors.append(tensor)
            contexts.append(context)
        options: dict[str, Any] = {"name": self._parameter_names[params[0]], "op": self.op,
                                   "process_set": self.process_set}
        if self.op == Average:
            options["prescale_factor"] = 1.0 / self.gradient_predivide_factor
            options["postscale_factor"] = self.gradient_predivide_factor
        names = [self._parameter_names[p] for p in params]
        with engine.checking(self.check_finite, names):
            if is_group:
                handle = grouped_allreduce_async_(tensors, **options)
            else:
                handle = allreduce_async_(tensors[0], **options)

        def apply(output: Any) -> None:
            outputs = output if is_group else [output]
            for p, result, context in zip(params, outputs, contexts):
                self._store(p, self._compression.decompress(result, context))

        return _Reduction(params, lambda: synchronize(handle), apply)

    @staticmethod
    def _store(p: torch.nn.Parameter, result: torch.Tensor) -> None:
        if p.grad is None:
            p.grad = result
        elif p.grad.is_sparse:
            p.grad = result.to_sparse()
        elif p.grad.data_ptr() != result.data_ptr():
            with torch.no_grad():
                p.grad.copy_(result)

    # -------------------------------------------------------------- stepping

    def synchronize(self) -> None:
        """Wait until every gradient is reduced (for clipping before step()).

        Raises HorovodInternalError, or the subclass that says what happened.
        """
        self._synchronized = True
        if not self.process_set.included():
            return
        try:
            for p in self._requires_update:
                if p not in self._in_flight:
                    self._reduce(self._group_of.get(p, (p,)))
        finally:
            self._arrived.clear()
            self._finish_all()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, step() does not wait for gradients: synchronize() was called before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients, then the inner optimizer's step()."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(_SYNCHRONIZED_TWICE)
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def load_state_dict(self, *args: Any, **options: Any) -> None:
        """The inner optimizer's; gradients in flight are forgotten."""
        self._in_flight.clear()
        self._passes_left.clear()
        self._arrived.clear()
        self._has_gradients = False
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(*args, **options)


class _DistributedAdasumOptimizer(_Hooked):
    """Adasum combines what each rank's own optimizer would have done to the weights.

    Each parameter is stepped by itself when its gradient is complete; the change is combined, and
    the weight is what it was plus the combined change.
    """

    def _set_up_adasum(self) -> None:
        self._register_hooks()

    def _on_gradient(self, p: torch.nn.Parameter) -> None:
        start = p.detach().clone()
        params = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [p] if any(p is other for other in group["params"]) else []
        try:
            super().step()
        finally:
            for group, all_ in zip(self.param_groups, params):
                group["params"] = all_
        delta = p.detach() - start
        with torch.no_grad():
            p.copy_(start)
        tensor, context = self._compression.compress(delta)
        handle = allreduce_async_(tensor, name=self._parameter_names[p], op=Adasum)

        def apply(output: torch.Tensor) -> None:
            with torch.no_grad():
                p.copy_(start + self._compression.decompress(output, context))

        self._in_flight[p] = _Reduction([p], lambda: synchronize(handle), apply)

    def synchronize(self) -> None:
        """Nothing: the combination belongs to step()."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Not supported, as in Horovod."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum "
                             "optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the ranks' changes and apply them."""
        loss = closure() if closure is not None else None
        try:
            for p in self._requires_update:
                if p not in self._in_flight:
                    if p.grad is None:
                        p.grad = torch.zeros_like(p)
                    self._on_gradient(p)
        finally:
            self._finish_all()
        return loss


def DistributedOptimizer(optimizer: torch.optim.Optimizer,
                         named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
                         compression: Any = Compression.none, backward_passes_per_step: int = 1,
                         op: int = Average, gradient_predivide_factor: float = 1.0,
                         num_groups: int = 0, groups: Any = None, sparse_as_dense: bool = False,
                         process_set: ProcessSet = global_process_set,
                         check_finite: str | None = None) -> torch.optim.Optimizer:
    """An optimizer of the same class whose step() applies gradients reduced over all ranks.

    Args:
        named_parameters: (name, parameter) of every parameter, such as model.named_parameters().
        compression: Compression.none, .fp16 or .bf16 on the wire.
        backward_passes_per_step: passes that accumulate (sum up) locally before reducing.
        op: Average, Sum, Adasum, ...
        gradient_predivide_factor: f divides by f before the sum, by size / f after (Average).
        groups: number of groups, or lists of parameters, that are reduced as one.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that reduce; others step on their own gradients.
        check_finite: "warn" or "raise" when a rank's gradient has a NaN or an infinity, naming the
            first such rank and the tensor; None does not look.

    It shares parameters and state with `optimizer`, which should not be used any more.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups` and will be removed in "
                      "v0.23.0.", DeprecationWarning)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if check_finite not in (None, "warn", "raise"):
        raise ValueError(f"check_finite is None, \"warn\" or \"raise\", not {check_finite!r}")
    is_adasum = op == Adasum and size() > 1
    if is_adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    inner = optimizer.__class__
    mixin = _DistributedAdasumOptimizer if is_adasum else _DistributedOptimizer
    cls = type(inner.__name__, (mixin, inner), {})
    wrapped = cls.__new__(cls)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped._set_up(named_parameters, compression, backward_passes_per_step)
    if is_adasum:
        wrapped._set_up_adasum()
    else:
        wrapped._set_up_reduction(op, gradient_predivide_factor, groups, sparse_as_dense,
                                  process_set, check_finite)
    return wrapped
