# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 as torchvision has it (same parameters, same shapes), for nodes without torchvision.

After K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", 2015; the
stride of a bottleneck lies on its 3x3 convolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the last widens to 4 * width channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = nn.Sequential()
        if stride != 1 or channels != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False),
                                            nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """blocks: bottlenecks of each stage. width: channels of the first one (64 in the paper)."""

    def __init__(self, blocks: tuple[int, ...], n_classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        channels, stages = width, []
        for stage, n_blocks in enumerate(blocks):
            stage_width = width << stage
            layers = []
            for block in range(n_blocks):
                stride = 2 if block == 0 and stage > 0 else 1
                layers.append(Bottleneck(channels, stage_width, stride))
                channels = 4 * stage_width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, n_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        x = self.stages(x)
        return self.fc(x.mean((2, 3)))


def resnet50() -> ResNet:
    """25,557,032 parameters in 161 tensors."""
    return ResNet((3, 4, 6, 3))


def resnet_tiny() -> ResNet:
    """The same kinds of layers, small enough for a test on a CPU."""
    return ResNet((1, 1), n_classes=10, width=8)
