# SPDX-License-Identifier: Apache-2.0
"""What elastic training remembers: models, optimizers, samplers and plain objects."""

from __future__ import annotations

import copy
import queue
from typing import Any, Callable

import torch

from gradd.torch.basics import rank
from gradd.torch.elastic.run import HostsUpdatedInterrupt
from gradd.torch.elastic.sampler import ElasticSampler
from gradd.torch.functions import (
    broadcast_object, broadcast_optimizer_state, broadcast_parameters,
)

HOSTS_REMOVED = 2  # the bit of an update that only takes hosts away


class State:
    """Interface: save() and restore() a commit, sync() it from rank 0 to all ranks."""

    def __init__(self, bcast_object: Callable[[Any], Any] = broadcast_object,
                 get_rank: Callable[[], int] = rank) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: "queue.Queue[tuple[float, int]]" = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Functions to call after the set of ranks has changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The job was joined again."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update: int) -> None:
        """Somebody (a launcher's listener) says that hosts change; thread: any."""
        self._host_messages.put((timestamp, update))

    def commit(self) -> None:
        """save(), then check_host_updates()."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks when rank 0 has been told of a change."""
        before = latest = self._last_updated_timestamp
        update = 0
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                update |= change
        before, self._last_updated_timestamp, update = self._bcast_object(
            (before, latest, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(update == HOSTS_REMOVED)

    def save(self) -> None:
        """Remember the state of now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last save()."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take rank 0's state."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a changed set of ranks, before sync()."""


class ObjectState(State):
    """Plain Python objects, given by keyword and kept as attributes."""

    def __init__(self, bcast_object: Callable[[Any], Any] = broadcast_object,
                 get_rank: Callable[[], int] = rank, **objects: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = objects
        self._set_attributes()

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class StateHandler:
    """How TorchState saves, restores and shares one kind of value."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Remember the value's state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Return to the last save()."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take rank 0's state, and remember it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Another object takes the place."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """torch.nn.Module."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """torch.optim.Optimizer, distributed or not."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """ElasticSampler."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """(type, handler) in the order in which they are tried."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the handlers that later TorchStates use."""
    global _handler_registry
    _handler_registry = registry


def _handler_for(value: Any) -> StateHandler | None:
    for type_, handler in _handler_registry:
        if isinstance(value, type_):
            return handler(value)
    return None


class TorchState(ObjectState):
    """Models, optimizers, samplers and plain objects, kept as attributes.

    Args:
        model, optimizer: optional; more of them, and anything else, by keyword.
    """

    def __init__(self, model: torch.nn.Module | None = None,
                 optimizer: torch.optim.Optimizer | None = None, **objects: Any) -> None:
        objects.update(model=model, optimizer=optimizer)
        handlers = {name: _handler_for(value) for name, value in objects.items()}
        super().__setattr__("_handlers", {n: h for n, h in handlers.items() if h is not None})
        for name, handler in self._handlers.items():
            super().__setattr__(name, handler.value)
        super().__init__(**{n: v for n, v in objects.items() if n not in self._handlers})

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Samplers divide what is left among the ranks of now."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
