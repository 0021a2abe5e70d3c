# SPDX-License-Identifier: Apache-2.0
"""Objects, parameters and optimizer state from one rank to the others."""

from __future__ import annotations

import io
from typing import Any, Iterable

import cloudpickle
import torch

from gradd.torch.basics import ProcessSet, global_process_set, rank
from gradd.torch.ops import allgather_async, broadcast_async_, synchronize


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters with those of `root_rank`, in place.

    Args:
        params: a dict such as ``model.state_dict()``, or a list of tensors or (name, tensor)
            pairs such as ``list(model.named_parameters())``. Values that are no tensors are left.
    """
    if isinstance(params, dict):
        named = sorted(params.items())
    elif isinstance(params, (str, bytes)) or not isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}")
    else:
        named = [p if isinstance(p, tuple) else (None, p) for p in params]
    handles, staged = [], []
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            continue
        target = tensor.detach()
        if not target.is_contiguous():
            target = target.contiguous()
            staged.append((tensor, target))
        handles.append(broadcast_async_(target, root_rank, name))
    for handle in handles:
        synchronize(handle)
    with torch.no_grad():
        for tensor, target in staged:
            tensor.copy_(target)


def _dump(obj: Any) -> torch.Tensor:
    file = io.BytesIO()
    cloudpickle.dump(obj, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _load(data: torch.Tensor) -> Any:
    return cloudpickle.loads(data.numpy().tobytes())


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """The object of `root_rank` (pickled by cloudpickle), on every rank of the set.

    Args:
        name: default: the type's name, which must then be the same on all ranks.
    """
    name = type(obj).__name__ if name is None else name
    is_root = rank() == root_rank
    data = _dump(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    n_bytes = torch.tensor([data.numel()], dtype=torch.int64)
    synchronize(broadcast_async_(n_bytes, root_rank, name + ".sz", process_set))
    if not is_root:
        data = torch.empty(int(n_bytes), dtype=torch.uint8)
    synchronize(broadcast_async_(data, root_rank, name + ".t", process_set))
    return obj if is_root else _load(data)


def allgather_object(obj: Any, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's object (pickled by cloudpickle), in rank order, on every rank of the set."""
    name = type(obj).__name__ if name is None else name
    data = _dump(obj)
    sizes_handle = allgather_async(torch.tensor([data.numel()]), name + ".sz", process_set)
    data_handle = allgather_async(data, name + ".t", process_set)
    sizes = synchronize(sizes_handle).tolist()
    return [_load(part) for part in synchronize(data_handle).split(sizes)]


# ------------------------------------------------------------------ optimizer state


def _numbered_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters in the order in which state_dict() numbers them."""
    seen: dict[int, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            seen.setdefault(id(p), p)
    return list(seen.values())


def _describe_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything but the values of tensors: what the other ranks must make room for."""
    tensors, others = [], []
    for number, p in enumerate(_numbered_parameters(optimizer)):
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                is_on_host = value.device.type == "cpu"
                tensors.append((number, key, tuple(value.shape), value.dtype, is_on_host))
            else:
                others.append((number, key, value))
    groups = [{key: value for key, value in group.items() if key != "params"}
              for group in optimizer.param_groups]
    return {"tensors": tensors, "others": others, "groups": groups}


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int,
                              model: torch.nn.Module | None = None) -> None:
    """Make the optimizer's state and options those of `root_rank`, on every rank.

    State that a rank does not have yet is created; no step is taken for that. Where no rank has
    any yet, parameters get a gradient of zero, which Horovod's scripts find there. `model` is
    accepted for compatibility.

    Raises:
        ValueError: for LBFGS, whose state has no fixed form.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    wanted = broadcast_object(_describe_state(optimizer), root_rank, "optimizer.state")
    params = _numbered_parameters(optimizer)
    if not wanted["tensors"] and not wanted["others"]:
        for p in params:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
    if rank() != root_rank:
        _take_structure(optimizer, params, wanted)
    broadcast_parameters(
        [(f"optimizer.state.{number}.{key}", optimizer.state[params[number]][key])
         for number, key, *_ in wanted["tensors"]], root_rank)


def _take_structure(optimizer: torch.optim.Optimizer, params: list[torch.Tensor],
                    wanted: dict[str, Any]) -> None:
    before = {p: dict(optimizer.state.get(p, {})) for p in params}
    for p in params:
        optimizer.state.pop(p, None)
    for number, key, shape, dtype, is_on_host in wanted["tensors"]:
        p = params[number]
        device = torch.device("cpu") if is_on_host else p.device
        tensor = before[p].get(key)
        fits = (isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == shape
                and tensor.dtype == dtype and tensor.device == device)
        optimizer.state[p][key] = tensor if fits else torch.zeros(shape, dtype=dtype,
                                                                  device=device)
    for number, key, value in wanted["others"]:
        optimizer.state[params[number]][key] = value
    for group, options in zip(optimizer.param_groups, wanted["groups"]):
        group.update(options)
