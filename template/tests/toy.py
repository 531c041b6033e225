"""A task of the tests' own, so that what they find is true whatever is in tasks/.

Samples weigh differently and some weigh nothing, the model has blocks and dropout: with a mean of means, an order or a
mask that depends on the ranks, other losses come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.task import Config, Loss, Task


class Points:
    """Points of the plane; what is to be found is the sine of their sum. Each epoch adds noise of its own."""

    def __init__(self, length: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.points = random.normal(size=(length, 2))
        self.weights = random.integers(0, 4, length)
        self.identity: Mapping[str, Any] = {"data.length": length}

    def __len__(self) -> int:
        return len(self.points)

    def samples(self, numbers: np.ndarray, epochs: np.ndarray) -> dict[str, Tensor]:
        pairs = zip(epochs.tolist(), numbers.tolist(), strict=True)
        noise = np.stack([np.random.default_rng(pair).normal(size=2) for pair in pairs])
        points = self.points[numbers]
        arrays = {"inputs": points + 0.01 * noise, "targets": np.sin(points.sum(1)), "weights": self.weights[numbers]}
        return {name: torch.from_numpy(values).float() for name, values in arrays.items()}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 8)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x).squeeze(1)
        return out


class Toy(Task):
    """A weighted sum of squares."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.train, self.validation = Points(45, seed=1), Points(10, seed=2)

    def build_model(self) -> nn.Module:
        return Model()

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Loss:
        off = (model(batch["inputs"]) - batch["targets"]).abs()
        weights = batch["weights"]
        return Loss((off.square() * weights).sum(), weights.sum(), {"close": ((off < 0.1) * weights).sum()})


def build_task(config: Config) -> Task:
    return Toy(config)
