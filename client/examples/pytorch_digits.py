# SPDX-License-Identifier: Apache-2.0
"""A small CNN learns handwritten digits on several ranks: Horovod's five changes to plain PyTorch.

    gradrun -np 2 python3 pytorch_digits.py

The numbered comments are all that differs from a script for one process. A script that was written
for Horovod needs only its import line changed. The ranks share one epoch's images between them, so
that more ranks mean fewer steps; the learning rate grows with the number of ranks.

On GPUs: --device cuda. Each rank then takes the GPU of its local rank (change 2).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gradd.torch as hvd

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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of one rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    return parser.parse_args()


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader,
                device: torch.device) -> float:
    """One pass over this rank's images. Returns its mean loss."""
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def accuracy(model: nn.Module, images: TensorDataset, device: torch.device) -> float:
    model.eval()
    with torch.no_grad():
        x, labels = images.tensors
        return (model(x.to(device)).argmax(1).cpu() == labels).float().mean().item()


def main() -> None:
    arguments = parse_arguments()

    hvd.init()  # 1: join the job
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # ranks share the node's cores
    if arguments.device == "cuda":
        torch.cuda.set_device(hvd.local_rank())  # 2: one GPU for each rank
    device = torch.device(arguments.device)

    train, test = read_digits(arguments.data)
    # 3: every rank sees its own part of the images
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(),
                                 seed=arguments.seed)
    loader = DataLoader(train, batch_size=arguments.batch_size, sampler=sampler)

    model = Net().to(device)
    # More ranks make a larger global batch, which allows a larger step.
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr * hvd.size(), momentum=0.9)
    # 4: step() waits for gradients averaged over all ranks
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none)
    # 5: all ranks start from rank 0's state
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        loss = torch.tensor(train_epoch(model, optimizer, loader, device))
        loss = hvd.allreduce(loss, name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, "
                  f"test accuracy {accuracy(model, test, device):.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
