# SPDX-License-Identifier: Apache-2.0
"""python -m gradd.horovod [-m MODULE | SCRIPT] [ARGUMENTS...]"""

from __future__ import annotations

import os
import runpy
import sys

from gradd.horovod import install


def main() -> None:
    """Run the script (or module) as __main__, as Python itself would."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m gradd.horovod [-m MODULE | SCRIPT] [ARGUMENTS...]\n"
              "runs a script that imports horovod.torch, on gradd")
        sys.exit(0 if arguments else 2)
    install()
    if arguments[0] == "-m":
        if len(arguments) < 2:
            sys.exit("python -m gradd.horovod: -m needs the name of a module")
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


main()
