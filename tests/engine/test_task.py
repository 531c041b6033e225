"""The protocol of a task: what the engine finds out about any model without building it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from trainer.config.settings import Config, OptimConfig
from trainer.task import Loss, Task, checkpoint_bytes


class Tied(Task):
    """Two layers that share a weight, a buffer that is saved and one that is not."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10), nn.BatchNorm1d(10, affine=False))
        model[1].weight = model[0].weight
        model.register_buffer("cache", torch.zeros(1000), persistent=False)
        return model

    def loss(self, model: nn.Module, batch: object) -> Loss:
        raise NotImplementedError


def test_a_checkpoint_takes_weights_moments_averages_and_saved_buffers() -> None:
    parameters, buffers = 110, 10 * 4 + 10 * 4 + 8
    assert checkpoint_bytes(Tied(Config())) == 12 * parameters + buffers
    averaged = replace(Config(), optim=OptimConfig(ema_decay=0.9))
    assert checkpoint_bytes(Tied(averaged)) == 16 * parameters + buffers
