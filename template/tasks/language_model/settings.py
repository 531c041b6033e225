"""The sections `model:` and `data:` of config.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer import task
from trainer.task import at_least, require


@dataclass(frozen=True)
class ModelConfig:
    """The decoder-only transformer of `model.py`."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    vocabulary: int = 256  # bytes; set it to your tokenizer's size with a token file
    feed_forward: int = 0  # hidden width; 0: 8/3 of the width, rounded up to a multiple of 64
    dropout: float = 0.0
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        at_least(self, 1, "layers", "width", "heads", "vocabulary")
        at_least(self, 0, "feed_forward")
        require(
            self.width % self.heads == 0 and self.width // self.heads % 2 == 0,
            "heads",
            f"a divisor of model.width ({self.width}) that leaves an even width per head",
        )
        require(0 <= self.dropout < 1, "dropout", "at least 0 and below 1")


@dataclass(frozen=True)
class DataConfig(task.DataConfig):
    """Windows of tokens of one long text (`data.py`)."""

    path: str = ""  # empty: the standard library's source; else a text file, a folder of them, or tokens (.bin, .npy)
    token_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"  # of a .bin token file
    sequence_length: int = 256  # tokens
    validation_share: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "sequence_length")
        require(0 < self.validation_share < 0.5, "validation_share", "above 0 and below 0.5")
