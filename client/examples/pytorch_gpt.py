# SPDX-License-Identifier: Apache-2.0
"""A small GPT learns to continue a text, character by character, on several ranks.

    gradrun -np 2 python3 pytorch_gpt.py
    gradrun -np 2 python3 pytorch_gpt.py --steps 600 --width 128 --layers 4

The model is wrapped in DistributedDataParallel, and its gradients go through gradd while backward
still runs. --compress bf16 sends them in half the bytes; they are summed in float32 all the same.
Every rank reads the whole text and draws its own random pieces of it.

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

import gradd.c10d  # noqa: F401 (registers the backend "gradd")
import gradd.ddp

TEXT = Path(__file__).resolve().parent / "data/gradients.txt"
HOOKS = {"none": gradd.ddp.hook, "fp16": gradd.ddp.fp16_hook, "bf16": gradd.ddp.bf16_hook}


class Block(nn.Module):
    """Attention to earlier characters, then a perceptron, each added to what came in."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(),
                                 nn.Linear(4 * width, width))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.n_heads, width // self.n_heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / (width // self.n_heads) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """int64[batch, length] characters -> float[batch, length, n_characters] scores of the next."""

    def __init__(self, n_characters: int, length: int, width: int, n_layers: int,
                 n_heads: int) -> None:
        super().__init__()
        self.length = length
        self.token = nn.Embedding(n_characters, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, n_heads) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_characters, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.token(x) + self.position(place))))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="pieces per rank and step")
    parser.add_argument("--length", type=int, default=64, help="characters of a piece")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compress", default="none", choices=tuple(HOOKS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return parser.parse_args()


def draw(data: torch.Tensor, n: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n random pieces int64[n, length], and the same pieces one character later."""
    starts = torch.randint(len(data) - length, (n,)).tolist()
    return (torch.stack([data[at:at + length] for at in starts]),
            torch.stack([data[at + 1:at + 1 + length] for at in starts]))


@torch.no_grad()
def continue_text(model: Gpt, start: torch.Tensor, n: int) -> torch.Tensor:
    """start int64[k], then the n characters that the model finds most likely."""
    model.eval()
    text = start
    for _ in range(n):
        scores = model(text[-model.length:].unsqueeze(0))[0, -1]
        text = torch.cat((text, scores.argmax().reshape(1)))
    return text


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gradd")
    rank = dist.get_rank()
    torch.set_num_threads(1)  # ranks share the node's cores
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device(arguments.device)

    text = arguments.text.read_text()
    characters = sorted(set(text))
    data = torch.tensor([characters.index(character) for character in text])

    torch.manual_seed(arguments.seed)
    gpt = Gpt(len(characters), arguments.length, arguments.width, arguments.layers,
              arguments.heads).to(device)
    model = DistributedDataParallel(gpt)
    model.register_comm_hook(None, HOOKS[arguments.compress])
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)

    torch.manual_seed(arguments.seed + rank)  # each rank draws other pieces
    for step in range(1, arguments.steps + 1):
        x, y = draw(data, arguments.batch_size, arguments.length)
        scores = model(x.to(device))
        loss = F.cross_entropy(scores.flatten(0, 1), y.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 50 == 0 or step == arguments.steps:
            mean = loss.detach().cpu()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item() / dist.get_world_size():.4f}")
    if rank == 0:
        written = continue_text(gpt, data[:32].to(device), 64).tolist()
        print("".join(characters[i] for i in written).replace("\n", " "))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
