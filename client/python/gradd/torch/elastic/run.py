# SPDX-License-Identifier: Apache-2.0
"""The loop around an elastic training function."""

from __future__ import annotations

import functools
from typing import Any, Callable

from gradd.errors import HorovodInternalError
from gradd.torch import basics


class HostsUpdatedInterrupt(RuntimeError):
    """The set of ranks is about to change; the state of now is kept.

    skip_sync: nobody new will be there, so that nothing has to be shared.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``func(state, ...)``: it starts over with the last commit when a rank is lost.

    HorovodInternalError restores the last commit, HostsUpdatedInterrupt keeps the state; both
    leave the job, join it again and call the state's reset callbacks. An error in joining again
    (such as ServiceUnavailable or Timeout) is the caller's.
    """
    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **options: Any) -> Any:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **options)
            except HorovodInternalError:
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            basics.shutdown()
            basics.init()
            state.on_reset()
    return wrapper
