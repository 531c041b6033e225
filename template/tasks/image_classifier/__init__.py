"""Which of some classes an image shows. The smallest task: copy it to make your own."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from tasks.image_classifier.data import Images
from tasks.image_classifier.model import Classifier
from trainer.task import Config, Loss, Task


class ImageClassifier(Task):
    """Cross-entropy over the classes, and how many are right."""

    unit = "images"
    small: ClassVar = {"model.channels": 16, "data.global_batch": 32, "data.micro_batch": 4, "optim.warmup_steps": 4}

    @cached_property
    def train(self) -> Images:  # type: ignore[override]
        return Images(self.config, validation=False)

    @cached_property
    def validation(self) -> Images:  # type: ignore[override]
        return Images(self.config, validation=True)

    def build_model(self) -> nn.Module:
        return Classifier(self.config.model)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        images, classes = batch
        logits = model(images).float()
        right = (logits.argmax(dim=1) == classes).sum()
        loss = F.cross_entropy(logits, classes, reduction="sum")
        return Loss(loss, weight=len(classes), metrics={"accuracy": right})


def build_task(config: Config) -> Task:
    return ImageClassifier(config)
