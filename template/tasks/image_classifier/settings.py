"""The sections `model:` and `data:` of config.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from trainer import task
from trainer.task import Limits, PositiveInt, ShareBelowOne, require

ValidationShare = Annotated[float, Limits("above 0 and below 1", exclusiveMinimum=0, exclusiveMaximum=1)]


@dataclass(frozen=True)
class ModelConfig:
    """The convolutional network of `model.py`."""

    channels: PositiveInt = 32  # of the first block; each further one has as many
    blocks: PositiveInt = 3
    groups: PositiveInt = 8  # of each normalisation
    dropout: ShareBelowOne = 0.1
    classes: PositiveInt = 10

    def __post_init__(self) -> None:
        require(self.channels % self.groups == 0, "groups", f"a divisor of model.channels ({self.channels})")


@dataclass(frozen=True)
class DataConfig(task.DataConfig):
    """Rows of a CSV file: the pixels of a square grey image, then its class."""

    path: str = ""  # empty: the handwritten digits beside this file; else a .csv or .csv.gz
    largest: PositiveInt = 16  # value of a pixel
    shift: bool = True  # move training images by up to a pixel, differently in each epoch
    validation_share: ValidationShare = 0.2
