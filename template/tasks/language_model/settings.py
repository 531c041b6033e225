"""The sections `model:` and `data:` of config.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from trainer import task
from trainer.task import Limits, NonNegativeInt, PositiveFloat, PositiveInt, ShareBelowOne, require

ValidationShare = Annotated[float, Limits("above 0 and below 0.5", exclusiveMinimum=0, exclusiveMaximum=0.5)]


@dataclass(frozen=True)
class ModelConfig:
    """The decoder-only transformer of `model.py`."""

    layers: PositiveInt = 4
    width: PositiveInt = 128
    heads: PositiveInt = 4
    vocabulary: PositiveInt = 256  # bytes; set it to your tokenizer's size with a token file
    feed_forward: NonNegativeInt = 0  # hidden width; 0: 8/3 of the width, rounded up to a multiple of 64
    dropout: ShareBelowOne = 0.0
    rope_base: PositiveFloat = 10_000.0

    def __post_init__(self) -> None:
        require(
            self.width % self.heads == 0 and self.width // self.heads % 2 == 0,
            "heads",
            f"a divisor of model.width ({self.width}) that leaves an even width per head",
        )


@dataclass(frozen=True)
class DataConfig(task.DataConfig):
    """Windows of tokens of one long text (`data.py`)."""

    path: str = ""  # empty: the standard library's source; else a text file, a folder of them, or tokens (.bin, .npy)
    token_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"  # of a .bin token file
    sequence_length: PositiveInt = 256  # tokens
    validation_share: ValidationShare = 0.01
