# SPDX-License-Identifier: Apache-2.0
"""horovod.torch is gradd.torch; its submodules are gradd's, never second copies of them."""

import sys

import gradd.torch
import gradd.torch.elastic.sampler
import gradd.torch.elastic.state

_MODULES = {
    "horovod.torch": gradd.torch,
    "horovod.torch.mpi_ops": gradd.torch,  # all of its names are in gradd.torch
    "horovod.torch.compression": gradd.torch.compression,
    "horovod.torch.functions": gradd.torch.functions,
    "horovod.torch.optimizer": gradd.torch.optimizer,
    "horovod.torch.sync_batch_norm": gradd.torch.sync_batch_norm,
    "horovod.torch.elastic": gradd.torch.elastic,
    "horovod.torch.elastic.sampler": gradd.torch.elastic.sampler,
    "horovod.torch.elastic.state": gradd.torch.elastic.state,
}
sys.modules.update(_MODULES)
