# SPDX-License-Identifier: Apache-2.0
"""What a node, a GPU or a library lacks: memory that can not be imported, no room for a context, no
NCCL. Said in words, and done in another way where there is one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gpu import FAKES
from gpu_failure import (
    GPU, N, NODE, Node, ORDERS, again, expect_ok, join, needs_fakes, sums_are_right, try_submit,
)
from harness import Daemon, World, eventually, settle

pytestmark = needs_fakes


@pytest.mark.parametrize("order", ORDERS)
def test_memory_that_can_not_be_imported_is_copied(world: World, order: str) -> None:
    """By the trainer, to memory that can."""
    node = Node(world)
    trainers = join(world, node, node.node(order=order), [0, 0])
    node.inject("gradd-worker/cuIpcOpenMemHandle:*:201")
    sums_are_right(trainers, 3)
    assert settle(trainers, "cuda_counts", names=["cuMemCreate"]) == [{"cuMemCreate": 1}] * 2


def test_an_import_that_fails_is_told_and_heals(world: World) -> None:
    """The rank whose memory it is hears why, when it submits; nothing else is hurt."""
    node = Node(world)
    trainers = join(world, node, node.node(), [0, 0])
    expect_ok(settle(trainers, "tensor", key="a", count=N, kind="chunks", chunks=[2 << 20]))
    node.inject("gradd-worker/cuMemImportFromShareableHandle:*:201")
    for answer in try_submit(trainers):
        assert answer["status"] < 0 and "201" in answer["error"], answer
    node.inject("")
    sums_are_right(trainers, 2)


@pytest.mark.parametrize("error, word", [(2, "OUT_OF_MEMORY"), (46, "UNAVAILABLE")])
def test_a_gpu_without_room_for_a_context_is_told(world: World, error: int, word: str) -> None:
    """Memory that is full, or a compute mode that lets nobody else in."""
    node = Node(world)
    daemon = node.node()
    trainers = join(world, node, daemon, [0, 0])
    node.inject(f"gradd-worker/cuDevicePrimaryCtxRetain:*:{error},"
                f"gradd-worker/cuCtxCreate:*:{error}")
    for answer in try_submit(trainers):
        assert answer["status"] < 0 and word in answer["error"], answer
        assert re.search(GPU, answer["error"]), answer
    node.inject("")
    again(world, trainers)


def status_of_node(daemon: Daemon) -> dict[str, Any]:
    eventually(lambda: daemon.gradctl_json("status")["cuda_driver"], "the GPUs were looked for")
    return daemon.gradctl_json("status")


def staged_sums(world: World, node: Node, daemon: Daemon) -> None:
    trainers = join(world, node, daemon, [0, 0], is_on=False)
    text = trainers[0].call("device_path")["text"]
    assert text == status_of_node(daemon)["device_text"], text
    sums_are_right(trainers, 2)
    eventually(lambda: daemon.gradctl_json("job", "job")["staged_ops"] >= 2, "they are counted")


@pytest.mark.parametrize("environment, words", [
    ({"GRADD_FAKE_CUDA_COMPUTE_MODE": "3"}, "compute mode.*second process"),
    ({"GRADD_FAKE_CUDA_WITHOUT": "cuIpcOpenMemHandle"}, "cuIpcOpenMemHandle"),
    ({"GRADD_FAKE_NCCL_VERSION": "21700"}, r"NCCL 2\.17\.0 is too old"),
    ({"CUDA_VISIBLE_DEVICES": ""}, "no CUDA-capable device"),
    ({"LD_LIBRARY_PATH": "no-nccl"}, r"libnccl\.so\.2"),
    ({"LD_LIBRARY_PATH": "nothing"}, r"libcuda\.so\.1"),
], ids=["exclusive", "lacking", "old NCCL", "no GPU", "no NCCL", "no driver"])
def test_what_the_node_lacks_is_said_and_the_host_serves(
        world: World, tmp_path: Path, environment: dict[str, str], words: str) -> None:
    """The trainers' own libraries are well."""
    node = Node(world)
    path = environment.get("LD_LIBRARY_PATH")
    if path is not None:
        (tmp_path / "libnccl.so.2").write_text("not a library, nor the machine's own\n")
        if path == "no-nccl":
            (tmp_path / "libcuda.so.1").symlink_to(FAKES / "libcuda.so.1")
        environment = {"LD_LIBRARY_PATH": str(tmp_path)}
    own = dict(node.environment)
    node.environment |= environment
    daemon, strict = node.node(backend="auto"), node.node()
    node.environment = own
    status = status_of_node(daemon)
    if path == "nothing" and status["gpus"]:
        pytest.skip("this machine has a driver of its own")
    assert status["device_path"] is False, status
    assert re.search(words, status["device_text"]), status["device_text"]
    if environment.get("GRADD_FAKE_CUDA_COMPUTE_MODE") != "3":
        staged_sums(world, node, daemon)
    # backend = nccl takes no other way.
    status_of_node(strict)
    trainers = [node.trainer(strict) for _ in range(2)]
    for answer in world.join(trainers, "strict"):
        assert answer["name"] == "GRADD_ERR_UNAVAILABLE", answer
        assert re.search(rf"job strict: backend = nccl on node {NODE}.*({words})",
                         answer["error"]), answer


@pytest.mark.parametrize("lacks, words", [
    ({"LD_LIBRARY_PATH": str(FAKES / "nccl_2_18") + ":" + str(FAKES)}, "ncclCommRevoke"),
    ({"GRADD_FAKE_CUDA_WITHOUT": "cuStreamWaitValue64_v2"}, ""),
    ({"GRADD_FAKE_CUDA_IPC_EVENTS": "0"}, "")], ids=["NCCL 2.18", "no flags", "no events"])
@pytest.mark.parametrize("devices", [[0, 0], [0, 1]], ids=["one", "two"])
def test_optional_functions_are_done_without(world: World, devices: list[int],
                                             lacks: dict[str, str], words: str) -> None:
    node = Node(world)
    node.environment |= lacks
    daemon = node.node()
    trainers = join(world, node, daemon, devices)
    sums_are_right(trainers, 3)
    assert re.search(words, str(status_of_node(daemon))), status_of_node(daemon)
