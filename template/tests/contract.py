"""What the engine relies on in a task, tried out. Each function yields what is broken, in words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from trainer.task import Loss, Samples, Task


def broken_samples(samples: Samples, again: Samples, what: str) -> Iterator[str]:
    """Samples are a function of their numbers. `again` is the same, opened a second time."""
    call = f"{what}.samples(numbers, epochs)"
    if len(samples) != len(again) or dict(samples.identity) != dict(again.identity):
        yield f"{what}: opened twice, its length or `identity` differs; both must be those of the data"
    try:
        json.dumps(dict(samples.identity))
    except TypeError as error:
        yield f"{what}.identity: {error}; it is written into checkpoints and must hold plain text and numbers"
    numbers = np.unique(np.linspace(0, len(samples) - 1, 5).astype(np.int64))
    epochs = np.arange(len(numbers), dtype=np.int64)
    batch = _tensors(samples, numbers, epochs)
    if not batch or any(len(part) != len(numbers) for part in batch):
        yield f"{call}: for {len(numbers)} numbers all tensors must have that first dimension; {_shapes(batch)}"
        return
    torch.manual_seed(1)
    np.random.seed(1)
    if not _equal(batch, _tensors(again, numbers, epochs)):
        yield (
            f"{call}: asked twice, it gives different samples; randomness may depend on (seed, epoch, number) alone, "
            f"not on a global generator or on what was asked before"
        )
        return
    for place in range(len(numbers)):
        alone = _tensors(samples, numbers[place : place + 1], epochs[place : place + 1])
        if not _equal([part[place : place + 1] for part in batch], alone):
            yield f"{call}: sample {numbers[place]} is another one beside other samples than alone"
            return


def broken_model(task: Task) -> Iterator[str]:
    """The model is built alike on each rank, and without memory where only its size is asked for."""
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(task.build_model().state_dict())
    one, two = models
    if one.keys() != two.keys() or not all(torch.equal(one[name], two[name]) for name in one):
        yield "build_model(): built twice from one seed, it differs; initialise it from torch's global generator alone"
    with torch.device("meta"):
        meta = task.build_model().state_dict()
    if {name: value.shape for name, value in meta.items()} != {name: value.shape for name, value in one.items()}:
        yield "build_model(): on the meta device it has other parameters; it may depend on nothing but the settings"


def broken_loss(task: Task) -> Iterator[str]:
    """The loss adds up: that of a batch is the sum of those of its halves, and so are weight and metrics."""
    count = min(6, len(task.train))
    numbers, epochs = np.arange(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    torch.manual_seed(7)
    model = task.build_model().eval()  # without dropout
    pieces = [slice(0, count), slice(0, count // 3), slice(count // 3, count)]
    losses = [task.loss(model, task.train.samples(numbers[piece], epochs[piece])) for piece in pieces if count > 2]
    if not losses:
        return
    whole = losses[0]
    if whole.sum.numel() != 1 or not whole.sum.requires_grad:
        yield f"loss().sum: a scalar with its graph is needed; it is {_shapes([whole.sum])}, without one if detached"
        return
    values = [_values(loss) for loss in losses]
    if any(of.keys() != values[0].keys() for of in values):
        yield f"loss().metrics: their names change from batch to batch ({', '.join(values[0])})"
        return
    for name, total in values[0].items():
        first, second = values[1][name], values[2][name]
        if not math.isclose(total, first + second, rel_tol=1e-3, abs_tol=1e-6):
            yield (
                f"loss().{name} of {count} samples is {total:.6g}, and of {count // 3} and the other "
                f"{count - count // 3} of them {first:.6g} + {second:.6g} = {first + second:.6g}; it must be a sum "
                f"over the samples (reduction='sum'), never a mean: the run divides once, by the whole batch's weight"
            )
    whole.sum.backward()
    gradients = [part.grad for part in model.parameters() if part.grad is not None]
    if not gradients or not all(bool(part.isfinite().all()) for part in gradients):
        yield "loss().sum: its gradient is missing or not finite"


def broken_learning_rate(task: Task) -> Iterator[str]:
    """The learning rate is a function of the step."""
    steps = [1, 2, max(1, task.config.train.steps // 2), task.config.train.steps]
    rates = [task.learning_rate(step) for step in steps]
    if any(rate is not None and not 0 <= rate < math.inf for rate in rates):
        yield f"learning_rate(step) is {rates} at steps {steps}; it must be 0 or more and finite, or None"
    if [task.learning_rate(step) for step in reversed(steps)] != rates[::-1]:
        yield "learning_rate(step): asked in another order, it differs; it must be a function of the step alone"


def _values(loss: Loss) -> dict[str, float]:
    return {"sum": float(loss.sum.detach()), "weight": float(loss.weight)} | {
        f"metrics[{name!r}]": float(value) for name, value in loss.metrics.items()
    }


def _tensors(samples: Samples, numbers: np.ndarray, epochs: np.ndarray) -> list[Any]:
    return tree_flatten(samples.samples(numbers, epochs))[0]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _shapes(tensors: list[Any]) -> str:
    return "there are " + (", ".join(str(tuple(getattr(part, "shape", "?"))) for part in tensors) or "none")
