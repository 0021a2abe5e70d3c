# SPDX-License-Identifier: Apache-2.0
"""Horovod's name for scripts that run on gradd (see gradd.horovod)."""

__version__ = "0.28.1+gradd"  # the version whose API this is
