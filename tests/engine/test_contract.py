"""The rendered test of a task says what is broken in one: faults that people make, each found by its words."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import contract
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy import Model, Points, Toy

from trainer.config.settings import Config
from trainer.task import Loss


class Mean(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum / loss.weight, loss.weight)


class WeighsOne(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(super().loss(model, batch).sum, 1.0)


class MeanMetric(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return replace(loss, metrics={"close": loss.metrics["close"] / loss.weight})


class Detached(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return replace(loss, sum=loss.sum.detach())


class Infinite(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return replace(loss, sum=loss.sum + (loss.sum - loss.sum).sqrt())


class OwnRandomness(Toy):
    def build_model(self) -> nn.Module:
        model = Model()
        nn.init.normal_(model.last.weight, generator=torch.Generator().manual_seed(time.time_ns()))
        return model


class OtherOnMeta(Toy):
    def build_model(self) -> nn.Module:
        return nn.Linear(2, 1) if torch.get_default_device().type == "meta" else Model()


class AdaptiveRate(Toy):
    asked = 0

    def learning_rate(self, step: int) -> float | None:
        self.asked += 1
        return 0.1 / self.asked


class GlobalNoise(Points):
    def samples(self, numbers: np.ndarray, epochs: np.ndarray) -> dict[str, Tensor]:
        found = super().samples(numbers, epochs)
        return found | {"inputs": found["inputs"] + torch.rand(2)}


class Normalised(Points):
    def samples(self, numbers: np.ndarray, epochs: np.ndarray) -> dict[str, Tensor]:
        found = super().samples(numbers, epochs)
        return found | {"inputs": found["inputs"] - found["inputs"].mean(0)}


class OneRow(Points):
    def samples(self, numbers: np.ndarray, epochs: np.ndarray) -> dict[str, Tensor]:
        return {name: value[None] for name, value in super().samples(numbers, epochs).items()}


class Unwritable(Points):
    def __init__(self, length: int, seed: int) -> None:
        super().__init__(length, seed)
        self.identity = {"data.hash": b"\x00"}


def _of_task(task: Toy) -> Iterator[str]:
    yield from contract.broken_model(task)
    yield from contract.broken_loss(task)
    yield from contract.broken_learning_rate(task)


def test_a_sound_task_has_nothing_broken() -> None:
    assert not list(_of_task(Toy(Config())))
    assert not list(contract.broken_samples(Points(45, seed=1), Points(45, seed=1), "train"))


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Mean, r"loss\(\).sum of 6 samples is .* never a mean"),
        (WeighsOne, r"loss\(\).weight of 6 samples is 1, .* must be a sum"),
        (MeanMetric, r"loss\(\).metrics\['close'\] of 6 samples"),
        (Detached, "a scalar with its graph"),
        (Infinite, "gradient is missing or not finite"),
        (OwnRandomness, "built twice from one seed, it differs"),
        (OtherOnMeta, "on the meta device it has other parameters"),
        (AdaptiveRate, "must be a function of the step alone"),
    ],
)
def test_a_fault_of_a_task_is_named(task: type[Toy], expected: str) -> None:
    [found] = _of_task(task(Config()))
    assert re.search(expected, found)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (GlobalNoise, "asked twice, it gives different samples"),
        (Normalised, "beside other samples than alone"),
        (OneRow, "must have that first dimension"),
        (Unwritable, "must hold plain text and numbers"),
    ],
)
def test_a_fault_of_samples_is_named(samples: type[Points], expected: str) -> None:
    [found] = contract.broken_samples(samples(45, seed=1), samples(45, seed=1), "train")
    assert found.startswith("train") and expected in found


def test_data_that_is_another_when_opened_again_is_named() -> None:
    found = list(contract.broken_samples(Points(45, seed=1), Points(46, seed=1), "validation"))
    assert "opened twice" in found[0]
