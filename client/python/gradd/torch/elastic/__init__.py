# SPDX-License-Identifier: Apache-2.0
"""Training that outlives lost ranks: state is committed, restored, and shared with who joins.

An epoch of a gradd job ends when a rank is lost. ``run`` then restores the last commit, leaves,
and joins the next epoch, which starts when all ranks of the job are there again (the launcher
starts the lost one anew).
"""

from gradd.torch.elastic.run import HostsUpdatedInterrupt, run
from gradd.torch.elastic.sampler import ElasticSampler
from gradd.torch.elastic.state import (
    ObjectState, State, TorchState, get_handler_registry, set_handler_registry,
)

__all__ = [
    "ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState",
    "get_handler_registry", "run", "set_handler_registry",
]
