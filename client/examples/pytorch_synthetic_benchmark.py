# SPDX-License-Identifier: Apache-2.0
"""Images per second of a ResNet on random images, in the lines that Horovod's benchmark prints.

    gradrun -np 2 python3 pytorch_synthetic_benchmark.py --no-cuda --batch-size 4
    gradrun -np 2 python3 pytorch_synthetic_benchmark.py --model resnet_tiny --image-size 32 \\
        --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 3

Compare the total of N ranks with N times that of one: the rest is communication and shared cores.
Each of a run's figures is the mean of --num-batches-per-iter steps.

On GPUs: leave --no-cuda away; each rank takes the GPU of its local rank.
"""

from __future__ import annotations

import argparse
import timeit

import torch
import torch.nn.functional as F

import gradd.torch as hvd
import resnet


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--model", default="resnet50",
                        help="resnet50, resnet_tiny, or any model of torchvision if it is there")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


def make_model(name: str) -> torch.nn.Module:
    if hasattr(resnet, name):
        return getattr(resnet, name)()
    from torchvision import models
    return getattr(models, name)()


def log(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    is_cuda = not arguments.no_cuda and torch.cuda.is_available()
    device = torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda")
        torch.backends.cudnn.benchmark = True
    else:
        torch.set_num_threads(1)  # ranks share the node's cores

    model = make_model(arguments.model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    side = arguments.image_size
    data = torch.randn(arguments.batch_size, 3, side, side, device=device)
    target = torch.randint(0, 10, (arguments.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
        if is_cuda:
            torch.cuda.synchronize()

    place = "GPU" if is_cuda else "CPU"
    log(f"Model: {arguments.model}")
    log(f"Batch size: {arguments.batch_size}")
    log(f"Number of {place}s: {hvd.size()}")
    log("Running warmup...")
    timeit.timeit(step, number=arguments.num_warmup_batches)

    log("Running benchmark...")
    rates = []
    for i in range(arguments.num_iters):
        seconds = timeit.timeit(step, number=arguments.num_batches_per_iter)
        rate = arguments.batch_size * arguments.num_batches_per_iter / seconds
        log(f"Iter #{i}: {rate:.1f} img/sec per {place}")
        rates.append(rate)

    mean = sum(rates) / len(rates)
    variance = sum((rate - mean) ** 2 for rate in rates) / len(rates)
    spread = 1.96 * variance ** 0.5
    log(f"Img/sec per {place}: {mean:.1f} +-{spread:.1f}")
    log(f"Total img/sec on {hvd.size()} {place}(s): "
        f"{hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
