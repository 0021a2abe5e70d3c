# SPDX-License-Identifier: Apache-2.0
"""A script written for Horovod: it knows nothing of gradd."""

import json
import os
import sys

import torch
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.elastic.state import TorchState
from horovod.torch.mpi_ops import rank

hvd.init()
assert (rank(), hvd.size()) == (int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"]))
assert TorchState is hvd.elastic.TorchState and HorovodInternalError is hvd.HorovodInternalError
torch.set_num_threads(1)
total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum)
print(json.dumps({"sum": total.item(), "arguments": sys.argv[1:], "name": __name__}))
