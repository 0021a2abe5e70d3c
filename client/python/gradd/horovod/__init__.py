# SPDX-License-Identifier: Apache-2.0
"""Run scripts that import Horovod, unchanged, on gradd.

    gradrun -np 2 python3 -m gradd.horovod train.py --epochs 3

``shim/`` holds a package ``horovod`` whose ``horovod.torch`` is :mod:`gradd.torch`. It is opt-in:
``python -m gradd.horovod``, or install(), put it in front of the path, for child processes too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SHIM = str(Path(__file__).resolve().parent / "shim")

# What Horovod's launcher would have set, from what gradrun sets. The library looks at GRADD_*
# first, so that these do not change who this process is.
_VARIABLES = {
    "HOROVOD_RANK": "GRADD_RANK", "HOROVOD_SIZE": "GRADD_SIZE",
    "HOROVOD_LOCAL_RANK": "GRADD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE": "GRADD_LOCAL_SIZE",
}


def install() -> None:
    """Make ``import horovod.torch`` mean gradd, in this process and in its children."""
    root = str(Path(__file__).resolve().parents[2])
    sys.path.insert(0, SHIM)
    if root not in sys.path:
        sys.path.append(root)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [SHIM, *[entry for entry in known if entry and entry not in (SHIM, root)], root])
    for theirs, ours in _VARIABLES.items():
        if ours in os.environ:
            os.environ.setdefault(theirs, os.environ[ours])
