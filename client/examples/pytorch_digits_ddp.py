# SPDX-License-Identifier: Apache-2.0
"""A small CNN learns handwritten digits with DistributedDataParallel, through gradd.

    gradrun -np 2 python3 pytorch_digits_ddp.py
    torchrun --nproc-per-node 2 pytorch_digits_ddp.py       (where the node runs a gradd)

This is an ordinary DDP script. The one line that differs is the backend's name in
init_process_group(). To keep another backend for everything else and send only gradients through
gradd, leave that line alone and register the hook instead:

    model.register_comm_hook(None, gradd.ddp.hook)

(--backend gloo --hook does that here.) From PyTorch 2.5 on, an installed gradd registers its
backend by itself; before, `import gradd.c10d` does.

On GPUs: --device cuda. Each rank then takes the GPU of its local rank.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gradd.c10d  # noqa: F401 (registers the backend "gradd")
import gradd.ddp

DATA = Path(__file__).resolve().parent / "data/digits.csv"
N_TEST = 297  # of 1,797 images; the others are for training


def read_digits(path: Path) -> tuple[TensorDataset, TensorDataset]:
    """Images float32[n, 1, 8, 8] from 0 to 1 with their labels int64[n]: (training, test)."""
    rows = [[int(word) for word in line.split(",")] for line in path.read_text().splitlines()]
    table = torch.tensor(rows)
    images = table[:, :64].reshape(-1, 1, 8, 8).float() / 16
    labels = table[:, 64]
    return (TensorDataset(images[N_TEST:], labels[N_TEST:]),
            TensorDataset(images[:N_TEST], labels[:N_TEST]))


def make_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
                         nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backend", default="gradd", help="gradd, or gloo to compare")
    parser.add_argument("--hook", action="store_true", help="send gradients by gradd.ddp.hook")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group(arguments.backend)  # the changed line
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # ranks share the node's cores
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device(arguments.device)

    train, test = read_digits(arguments.data)
    sampler = DistributedSampler(train, seed=arguments.seed)
    loader = DataLoader(train, batch_size=arguments.batch_size, sampler=sampler)
    model = DistributedDataParallel(make_net().to(device))
    if arguments.hook:
        model.register_comm_hook(None, gradd.ddp.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr * size, momentum=0.9)

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(())
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach().cpu()
        dist.all_reduce(total)
        model.eval()
        with torch.no_grad():
            images, labels = test.tensors
            hits = (model.module(images.to(device)).argmax(1).cpu() == labels).float().mean()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item() / len(loader) / size:.4f}, "
                  f"test accuracy {hits.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
