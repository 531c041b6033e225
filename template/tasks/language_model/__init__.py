"""A language model on bytes of text, or on the tokens of your tokenizer."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from tasks.language_model.data import TokenSamples, open_samples, prepare_corpus
from tasks.language_model.model import Transformer
from trainer.task import Config, Loss, Task


class LanguageModel(Task):
    """Predict each token from those before it."""

    unit = "tokens"
    small: ClassVar = {
        "model.layers": 2, "model.width": 64, "model.heads": 4, "model.feed_forward": 0, "data.sequence_length": 64,
        "data.global_batch": 32, "data.micro_batch": 4, "optim.warmup_steps": 4,
    }  # fmt: skip

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.units_per_sample = config.data.sequence_length

    def prepare(self) -> None:
        prepare_corpus(self.config)

    @cached_property
    def train(self) -> TokenSamples:  # type: ignore[override]
        return open_samples(self.config, validation=False)

    @cached_property
    def validation(self) -> TokenSamples:  # type: ignore[override]
        return open_samples(self.config, validation=True)

    def build_model(self) -> nn.Module:
        config = self.config
        return Transformer(config.model, config.data.sequence_length, config.train.activation_checkpointing)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        """Cross-entropy in fp32; `batch` is int64 [samples, sequence_length + 1]."""
        logits = model(batch[:, :-1])
        losses = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        return Loss(losses, weight=batch[:, 1:].numel())

    def flops_per_unit(self, model: nn.Module) -> float:
        """6 per parameter, and 12·layers·width·sequence for attention (Chowdhery et al. 2022, appendix B)."""
        size, parameters = self.config.model, sum(parameter.numel() for parameter in model.parameters())
        return 6 * parameters + 12 * size.layers * size.width * self.config.data.sequence_length


def build_task(config: Config) -> Task:
    return LanguageModel(config)
