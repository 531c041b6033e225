"""The model of a checkpoint as one safetensors file, for use without this repo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import torch
from torch import Tensor

from trainer.checkpoint.save import load_tensors
from trainer.config.load import load_config
from trainer.config.settings import Config
from trainer.outcome import ConfigError


def load_weights(config: Config, step: int | None, averaged: bool = False) -> tuple[dict[str, Tensor], int]:
    """Weights of a verified checkpoint by parameter name, on the CPU, and its step; no process group is needed.

    Raises:
        ConfigError: there is no such checkpoint, or none with averaged weights.
    """
    tensors, step = load_tensors(config.run_dir, step, prefixes=("model.", "ema.") if averaged else ("model.",))
    weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    if averaged:
        means = {name.removeprefix("ema."): value for name, value in tensors.items() if name.startswith("ema.")}
        if not means:
            raise ConfigError(f"step {step} has no averaged weights; train with optim.ema_decay above 0 to keep some")
        weights |= means
    return weights, step


def export(overrides: Sequence[str], output: Path, *, step: int | None, averaged: bool) -> int:
    """Write the weights to `output`, which must not exist yet. Returns the exit code."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if output.exists():
        raise ConfigError(f"{output} is there already; name a file that is not")
    weights, step = load_weights(load_config(overrides), step, averaged)
    temporary = output.with_name(f".{output.name}.tmp")
    tensors = {name: value.contiguous() for name, value in weights.items()}
    try:
        save_file(tensors, temporary, metadata={"step": str(step)})
        temporary.replace(output)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{output} cannot be written ({error})") from None
    count = sum(value.numel() for value in weights.values() if isinstance(value, torch.Tensor))
    click.echo(f"wrote {output}: {len(weights)} tensors, {count:,} numbers, after step {step}")
    return 0
