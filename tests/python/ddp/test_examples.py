# SPDX-License-Identifier: Apache-2.0
"""The PyTorch examples run, learn, and print what they promise."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ranks import EXAMPLES


def test_digits_with_horovods_five_changes(gradrun: Any) -> None:
    run = gradrun(EXAMPLES / "pytorch_digits.py", 2, "--epochs", "6")
    assert run.code == 0, run
    accuracies = [float(word) for word in re.findall(r"accuracy ([\d.]+)", run.output[0])]
    assert len(accuracies) == 6 and accuracies[-1] > 0.85, run
    assert not run.output[1].strip(), "only rank 0 prints"


def test_digits_with_fp16_gradients(gradrun: Any) -> None:
    run = gradrun(EXAMPLES / "pytorch_digits.py", 2, "--epochs", "2", "--fp16-allreduce")
    assert run.code == 0 and "epoch 2" in run.output[0], run


def test_digits_with_ddp_learn_the_same_under_every_backend(gradrun: Any) -> None:
    outputs = set()
    for how in (["--backend", "gradd"], ["--backend", "gloo"], ["--backend", "gloo", "--hook"]):
        run = gradrun(EXAMPLES / "pytorch_digits_ddp.py", 2, "--epochs", "3", *how)
        assert run.code == 0, run
        outputs.add(run.output[0])
    assert len(outputs) == 1 and "epoch 3" in outputs.pop()


def test_the_synthetic_benchmark_prints_horovods_lines(gradrun: Any) -> None:
    run = gradrun(EXAMPLES / "pytorch_synthetic_benchmark.py", 2, "--model", "resnet_tiny",
                  "--batch-size", "2", "--image-size", "32", "--num-warmup-batches", "1",
                  "--num-batches-per-iter", "2", "--num-iters", "2", "--no-cuda")
    assert run.code == 0, run
    text = run.output[0]
    for pattern in (r"^Model: resnet_tiny$", r"^Batch size: 2$", r"^Number of CPUs: 2$",
                    r"^Running warmup\.\.\.$", r"^Running benchmark\.\.\.$",
                    r"^Iter #1: [\d.]+ img/sec per CPU$",
                    r"^Img/sec per CPU: [\d.]+ \+-[\d.]+$",
                    r"^Total img/sec on 2 CPU\(s\): [\d.]+ \+-[\d.]+$"):
        assert re.search(pattern, text, re.MULTILINE), pattern + "\n" + text


@pytest.mark.parametrize("compress", ("none", "bf16"))
def test_gpt_learns_its_text(gradrun: Any, compress: str) -> None:
    run = gradrun(EXAMPLES / "pytorch_gpt.py", 2, "--steps", "50", "--width", "32", "--length",
                  "32", "--batch-size", "8", "--compress", compress)
    assert run.code == 0, run
    first, last = (float(word) for word in re.findall(r"loss ([\d.]+)", run.output[0]))
    assert last < first - 0.8, run
    assert "A model learns by asking one" in run.output[0], run
