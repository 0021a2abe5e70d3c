# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's users have between hosts: torch.distributed's all_reduce over gloo, one rank; the
other ranks are other processes, on other hosts or on this one. Calls and rows as the other peers'.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

# As in run.c: calls of one size move about this many bytes a rank.
BYTES_PER_SIZE = 512 << 20
MIN_ITERS, MAX_ITERS = 3, 1500


def time_calls(tensor: torch.Tensor, iters: int) -> list[float]:
    seconds = []
    dist.barrier()
    for i in range(1 + iters // 10 + iters):
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - begin)
    return seconds[-iters:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--sizes", required=True, help="bytes, separated by commas")
    parser.add_argument("--iters", type=int)
    parser.add_argument("--json", action="store_true", help="(always)")
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = args.interface
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.store}/torch", rank=args.rank,
                            world_size=args.ranks)
    for size in map(int, args.sizes.split(",")):
        iters = args.iters or min(max(BYTES_PER_SIZE // size, MIN_ITERS), MAX_ITERS)
        seconds = time_calls(torch.zeros(size // 4), iters)
        if args.rank == 0:
            print(json.dumps({"program": "torch", "variant": "gloo", "ranks": args.ranks,
                              "type": "float32", "size": size, "iters": iters,
                              "p50_us": 1e6 * statistics.median(seconds)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
