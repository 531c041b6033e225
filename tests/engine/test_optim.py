"""Learning rates and the groups of the optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer import parallel
from trainer.config.settings import Config, OptimConfig
from trainer.optim import (
    AveragedWeights,
    average_gradients,
    build_optimizer,
    learning_rate,
    set_learning_rate,
)


def test_the_learning_rate_warms_up_and_falls_to_its_share_at_the_last_step() -> None:
    config = OptimConfig(lr=0.5, warmup_steps=4, min_lr_share=0.1)
    rates = [learning_rate(config, step, 20) for step in range(1, 21)]
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5]
    assert rates[-1] == pytest.approx(0.05)
    assert all(after < before for before, after in itertools.pairwise(rates[3:]))


@pytest.mark.parametrize("warmup", [0, 1, 20, 50])
def test_any_length_of_warm_up_works(warmup: int) -> None:
    rates = [learning_rate(OptimConfig(lr=1.0, warmup_steps=warmup), step, 20) for step in range(1, 21)]
    assert all(0 < rate <= 1 for rate in rates)


def test_a_learning_rate_that_is_a_tensor_is_set_in_place() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(1.0))
    lr = optimizer.param_groups[0]["lr"]
    set_learning_rate(optimizer, 0.25)
    assert lr is optimizer.param_groups[0]["lr"]
    assert lr == 0.25


def test_vectors_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    decay = {
        id(parameter): group["weight_decay"]
        for group in build_optimizer(model, OptimConfig(weight_decay=0.3)).param_groups
        for parameter in group["params"]
    }
    assert {name: decay[id(parameter)] for name, parameter in model.named_parameters()} == {
        "0.weight": 0.3, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0,
    }  # fmt: skip


def averaged(cases: Sequence[tuple[float, float]]) -> list[tuple[list[Tensor | None], Tensor]]:
    """Gradients and norm for each (weight, largest), of sums over two ranks whose norm is 50."""
    found = []
    with parallel.join() as world:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
        mesh = parallel.distribute(model, Config(), world)
        parameter = model[0].weight
        assert isinstance(parameter, DTensor)
        for weight, largest in cases:
            parameter.grad = distribute_tensor(torch.tensor([[30.0, 0], [0, 40]]), mesh, parameter.placements)
            norm = average_gradients(model, torch.tensor(weight, dtype=torch.float64), largest, mesh)
            found.append(
                ([p.grad.full_tensor() if isinstance(p.grad, DTensor) else None for p in model.parameters()], norm)
            )
    return found


def test_gradients_are_divided_by_the_weight_and_then_clipped(ranks: Callable[..., list[Any]]) -> None:
    expected = {  # (weight, largest): norm of the mean, and what is left of the sum
        (1.0, 0.0): (50, 1), (4.0, 0.0): (12.5, 0.25), (0.0, 0.0): (50, 1),
        (1.0, 1.0): (50, 0.02), (4.0, 1.0): (12.5, 0.02), (4.0, 20.0): (12.5, 0.25),
    }  # fmt: skip
    for found in ranks(2, averaged, list(expected)):
        for ((first, *others), norm), (of_mean, share) in zip(found, expected.values(), strict=True):
            assert norm == of_mean and norm.dtype is torch.float32
            torch.testing.assert_close(first, share * torch.tensor([[30.0, 0], [0, 40]]))
            assert others == [None, None]  # no gradient


def test_averaged_weights_follow_slowly() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    averages = AveragedWeights(model, decay=0.9)
    nn.init.ones_(model.weight)
    averages.update()
    assert averages.averages["weight"].item() == pytest.approx(0.1)
