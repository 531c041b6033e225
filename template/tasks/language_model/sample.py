"""Let a checkpoint write text, byte by byte."""

from __future__ import annotations

from collections.abc import Sequence

import click
import torch

from tasks.language_model.model import build_model
from trainer.config.load import load_config
from trainer.outcome import ConfigError
from trainer.tools.export import load_weights


@torch.no_grad()
def sample(overrides: Sequence[str], prompt: str, *, tokens: int, temperature: float, step: int | None) -> int:
    """Print `prompt` and `tokens` bytes that the model continues it with. Returns the exit code."""
    config = load_config(overrides)
    if config.data.path.endswith((".bin", ".npy")):
        raise ConfigError(f"data.path is {config.data.path!r}; sample knows bytes, not the tokens of such a file")
    if not prompt:
        raise ConfigError("--prompt is empty; give the model something to continue")
    weights, step = load_weights(config, step)
    model = build_model(config)
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        line = str(error).splitlines()[-1].strip()
        raise ConfigError(
            f"step {step} is of another model ({line}); give the model.* settings it was trained with"
        ) from None
    model.eval()
    text = list(prompt.encode())
    for _ in range(tokens):
        logits = model(torch.tensor([text[-config.data.sequence_length :]]))[0, -1, :256].float()
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1)))
    click.echo(bytes(text).decode(errors="replace"))
    return 0
