"""The model of a checkpoint as one safetensors file, for use without this repo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from trainer.config.load import load_config
from trainer.outcome import ConfigError
from trainer.run import load_weights


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
    count = sum(value.numel() for value in tensors.values())
    click.echo(f"wrote {output}: {len(weights)} tensors, {count:,} numbers, after step {step}")
    return 0
