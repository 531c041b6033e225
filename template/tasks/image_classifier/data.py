"""Images by number, from a CSV file."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.task import Config, ConfigError, home

DIGITS = Path(__file__).with_name(
    "digits.csv.gz"
)  # E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI


def read_images(config: Config) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Images (float32 [n, size, size], 0 to 1), their classes (int64 [n]), and what identifies the file.

    Raises:
        ConfigError: no such file, or rows that are no square image and a class.
    """
    path = config.project / home(config.data.path) if config.data.path else DIGITS
    try:
        rows = np.loadtxt(path, delimiter=",", dtype=np.float32, ndmin=2)
        identity = {"data.hash": hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()}
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.path: {path} cannot be read ({error}); it must be a CSV file of numbers") from None
    size, classes = math.isqrt(rows.shape[1] - 1), rows[:, -1].astype(np.int64)
    if size * size != rows.shape[1] - 1 or not 0 <= classes.min() <= classes.max() < config.model.classes:
        raise ConfigError(
            f"data.path: {path} has rows of {rows.shape[1]} numbers and classes up to {classes.max()}; each row must "
            f"be the pixels of a square image and a class from 0 to below model.classes ({config.model.classes})"
        )
    return rows[:, :-1].reshape(-1, size, size) / config.data.largest, classes, identity


class Images:
    """Every image of one part; the parts share none, and each has the classes in the order of the file."""

    def __init__(self, config: Config, *, validation: bool) -> None:
        images, classes, self.identity = read_images(config)
        stride = max(2, round(1 / config.data.validation_share))
        chosen = (np.arange(len(images)) % stride == 0) == validation
        self.images, self.classes = images[chosen], classes[chosen]
        self.shift, self.seed = config.data.shift and not validation, config.data.seed
        if not len(self.images):
            raise ConfigError(f"data.path holds {len(images)} images; that is too few for training and validation")

    def __len__(self) -> int:
        return len(self.images)

    def samples(self, numbers: np.ndarray, epochs: np.ndarray) -> tuple[Tensor, Tensor]:
        """Images, float32 [n, 1, size, size], and classes, int64 [n]."""
        images = self.images[numbers]
        if self.shift:
            images = np.stack([self._moved(*one) for one in zip(images, numbers, epochs, strict=True)])
        return torch.from_numpy(images[:, None].copy()), torch.from_numpy(self.classes[numbers])

    def _moved(self, image: np.ndarray, number: int, epoch: int) -> np.ndarray:
        """By up to a pixel: a function of the seed, the epoch and the number, so it is the same on any rank."""
        down, right = np.random.default_rng((self.seed, int(epoch), int(number))).integers(0, 3, 2)
        moved: np.ndarray = np.pad(image, 1)[down : down + len(image), right : right + len(image)]
        return moved
