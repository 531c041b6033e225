"""A small residual network on images of any size."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tasks.image_classifier.settings import ModelConfig


class Block(nn.Module):
    """Two convolutions beside a residual path. GroupNorm looks at one sample alone: the statistics of a BatchNorm would
    depend on how the samples are dealt to the ranks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(config.channels, config.channels, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(config.groups, config.channels) for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            out = F.relu(norm(convolution(out)))
        return x + self.dropout(out)


class Classifier(nn.Module):
    """Logits [batch, classes] of images [batch, 1, height, width]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, config.channels, 3, padding=1)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.pool = nn.AdaptiveAvgPool2d(2)  # where in the image something is counts a little
        self.head = nn.Linear(4 * config.channels, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.pool(x).flatten(1))
        return logits
