"""Generate text from a checkpoint, byte by byte: `python -m tasks.language_model.sample --prompt "def "`."""

from __future__ import annotations

import sys

import click
import torch

from trainer.run import load_trained
from trainer.task import ConfigError, load_config


@torch.no_grad()
def sample(overrides: tuple[str, ...], prompt: str, tokens: int, temperature: float, step: int | None) -> str:
    """`prompt`, and the `tokens` bytes with which the model of the newest complete checkpoint (or `step`) continues it.

    Raises:
        ConfigError: no such checkpoint, one of another model, or tokens that are not bytes.
    """
    config = load_config(overrides)
    if config.data.path.endswith((".bin", ".npy")):
        raise ConfigError(f"data.path is {config.data.path!r}; sample works on bytes, not on the tokens of such a file")
    if not prompt:
        raise ConfigError("--prompt is empty; give the model something to continue")
    model, _ = load_trained(config, step)
    model.eval()
    text = list(prompt.encode())
    for _ in range(tokens):
        logits = model(torch.tensor([text[-config.data.sequence_length :]]))[0, -1, :256].float()
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1)))
    return bytes(text).decode(errors="replace")


@click.command()
@click.option("--prompt", default="def ", show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.8, show_default=True)
@click.option("--step", type=int, help="Which checkpoint; default: the newest complete one.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def main(overrides: tuple[str, ...], prompt: str, tokens: int, temperature: float, step: int | None) -> None:
    """Generate text from the newest checkpoint."""
    try:
        click.echo(sample(overrides, prompt, tokens, temperature, step))
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(78)


if __name__ == "__main__":
    main()
