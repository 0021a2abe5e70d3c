# SPDX-License-Identifier: Apache-2.0
"""A job over several nodes under random faults; tests/integration/soak does it for hours."""

from __future__ import annotations

import os
import time
from typing import Callable

import pytest

import chaos
from cluster import Cluster

SECONDS = 60.0


@pytest.mark.limit(400)
def test_whatever_happens_sums_are_right_or_missing(make_cluster: Callable[..., Cluster]) -> None:
    seed = int(os.environ.get("GRADD_TEST_SEED", time.time_ns() % 1000000))
    done = chaos.run(make_cluster(len(chaos.LAYOUT)), seed, SECONDS)
    assert done.n_failed_epochs > 0 and done.n_right > 0
