"""What the engine needs of a task: a model, samples by number, and a loss that is a sum.

A task is a folder of tasks/. Its `__init__.py` has `build_task(config) -> Task`; its `settings.py`, which must not
import torch, has the dataclasses `ModelConfig` and `DataConfig` (a subclass of the one below): the sections `model:`
and `data:` of config.yaml. A task imports this module, and `run` where it uses a trained model; nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from trainer.config.load import load_config
from trainer.config.settings import (
    Config,
    DataConfig,
    Limits,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    ShareBelowOne,
    home,
    require,
)  # fmt: skip
from trainer.outcome import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

__all__ = [
    "Config", "ConfigError", "DataConfig", "Limits", "Loss", "NonNegativeFloat", "NonNegativeInt", "PositiveFloat",
    "PositiveInt", "Samples", "Share", "ShareBelowOne", "Task", "home", "load_config", "require",
]  # fmt: skip


class Samples(Protocol):
    """Samples by number, the same ones on every machine."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Small and exact, such as a hash: a resume on other data is refused."""
        ...

    def __len__(self) -> int: ...

    def samples(self, numbers: np.ndarray, epochs: np.ndarray) -> Any:
        """The samples `numbers` (int64 [n]) in these epochs (int64 [n]): tensors, or dicts and tuples of tensors,
        whose first dimension is the sample. Randomness may depend on (seed, epoch, number) and nothing else."""
        ...


@dataclass(frozen=True)
class Loss:
    """Sums over the samples of a micro-batch: the run divides them by the weight of the whole global batch."""

    sum: Tensor  # scalar, with its graph
    weight: Tensor | float  # what the sum stands for, such as the number of samples
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)  # more sums, such as correct answers


class Task(ABC):
    """What is trained. The methods below the line have defaults that suit most."""

    train: Samples  # opened on every rank, after `prepare`
    validation: Samples

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model on the CPU in fp32, initialised from the global generator, which is seeded alike on all ranks. With
        `blocks` (a ModuleList) it is sharded and compiled block by block."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Of a micro-batch of `samples` on the model's device; never of padding."""

    # -----------------------------------------------------------------------------------------------------------------

    unit = "samples"  # that throughput is counted in
    units_per_sample = 1.0
    small: ClassVar[Mapping[str, Any]] = {}  # settings with which a drill on CPUs takes minutes at most

    def prepare(self) -> None:  # noqa: B027
        """Make on the volume what `train` and `validation` need, once. Rank 0 does it while the others wait."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW by the section `optim:`."""
        from trainer.optim import build_optimizer

        return build_optimizer(model, self.config.optim)

    def learning_rate(self, step: int) -> float | None:
        """Of optimizer step `step` (1 to `train.steps`), a function of the step; None: the optimizer has its own."""
        from trainer.optim import learning_rate

        return learning_rate(self.config.optim, step, self.config.train.steps)

    def flops_per_unit(self, model: nn.Module) -> float:
        """Floating-point operations of forward and backward for one unit; 0: not known, no MFU is shown."""
        return 0.0


def build_task(config: Config) -> Task:
    """The task that `config.task` names. Raises ConfigError."""
    import importlib

    module = importlib.import_module(f"tasks.{config.task}")
    if not callable(getattr(module, "build_task", None)):
        where = f"tasks/{config.task}/__init__.py"
        raise ConfigError(f"{where} has no build_task(config); it must return a trainer.task.Task")
    task: Task = module.build_task(config)
    return task


def checkpoint_bytes(task: Task) -> int:
    """Bytes of a checkpoint of `task`: fp32 weights and buffers, AdamW's two moments, averaged weights if kept. The
    model is laid out on the meta device, so that any size costs nothing."""
    import torch

    with torch.device("meta"):
        model = task.build_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = sum(value.nbytes for name, value in model.state_dict().items() if name not in names)
    return 4 * parameters * (4 if task.config.optim.ema_decay else 3) + buffers
