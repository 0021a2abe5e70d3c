# SPDX-License-Identifier: Apache-2.0
"""Daemons, workers and trainers on the fake GPU libraries of the build tree."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from harness import BUILD, Daemon, Trainer, World

FAKES = BUILD / "tests/fakes"
KERNELS = Path(__file__).resolve().parent.parent / "fakes/cuda/kernels.ptx"


class Gpus:
    """The node's GPUs as one test sees them: a folder that all its processes share."""

    def __init__(self, world: World, **settings: Any) -> None:
        self.world = world
        self.dir = tempfile.mkdtemp(prefix="gradd-gpus-")
        world.on_destroy.append(self._remove)
        self.environment = {
            "LD_LIBRARY_PATH": str(FAKES), "GRADD_FAKE_CUDA_DIR": self.dir,
            "GRADD_CUDA_KERNELS": str(KERNELS),  # for builds without nvcc
            **{f"GRADD_FAKE_CUDA_{name}": str(value) for name, value in settings.items()}}

    def _remove(self) -> list[str]:
        shutil.rmtree(self.dir, ignore_errors=True)
        return []

    def daemon(self, **settings: Any) -> Daemon:
        return self.world.daemon(environment=self.environment, **settings)

    def trainer(self, daemon: Daemon | None, device: int = 0, script: str = "gpu_trainer.py",
                **environment: str) -> Trainer:
        trainer = self.world.trainer(daemon, script=script,
                                     environment={**self.environment, **environment})
        trainer.call("cuda_start", device=device)
        return trainer

    def job(self, daemon: Daemon, n: int, devices: list[int] | None = None) -> list[Trainer]:
        """n trainers that have joined."""
        trainers = [self.trainer(daemon, devices[rank] if devices else 0) for rank in range(n)]
        for answer in self.world.join(trainers):
            assert answer["status"] == 0, answer
        return trainers

    def alone(self) -> Trainer:
        trainer = self.trainer(None)
        answer = trainer.call("init", rank=0, size=1, job="alone")
        assert answer["status"] == 0, answer
        return trainer
