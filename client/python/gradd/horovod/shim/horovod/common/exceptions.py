# SPDX-License-Identifier: Apache-2.0
"""Horovod's exceptions: gradd's."""

from gradd.errors import HorovodInternalError
from gradd.torch.elastic.run import HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
