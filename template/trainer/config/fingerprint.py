"""What a checkpoint remembers of the configuration that saved it, and which changes a resume accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.config.settings import Config
from trainer.outcome import ConfigError

_FREE = {"data.workers", "data.prefetch", "optim.fused"}  # of the sections below: how fast, not what
_WARN = {"data.micro_batch", "train.steps"}  # dropout masks and the schedule: may change, but say so


def fingerprint(config: Config) -> dict[str, Any]:
    """What decides the numbers of a run, as `{dotted key: value}`: model, data, optimizer, seed, steps."""
    values = {"task": config.task, "train.steps": config.train.steps}
    for name in ("model", "data", "optim"):
        values |= {f"{name}.{key}": value for key, value in dataclasses.asdict(getattr(config, name)).items()}
    return {key: value for key, value in values.items() if key not in _FREE}


def compare_fingerprints(
    saved: Mapping[str, Any], current: Mapping[str, Any], accepted: Iterable[str] = ()
) -> list[str]:
    """Check that `current` may go on from a checkpoint with the fingerprint `saved`.

    Returns:
        One warning for each change that passes (schedule, dropout masks, keys named in `accepted`).

    Raises:
        ConfigError: changes that need `--accept`, each with its old and new value.
    """
    accepted = set(accepted)
    changed = [key for key in current if key in saved and saved[key] != current[key]]
    if refused := [key for key in changed if key not in _WARN and key not in accepted]:
        what = "; ".join(f"{key} was {saved[key]!r} and is {current[key]!r}" for key in refused)
        raise ConfigError(
            f"the checkpoint was made with another configuration: {what}; "
            f"restore the old value, or accept the new one with --accept {','.join(refused)}"
        )
    return [f"{key} changed from {saved[key]!r} to {current[key]!r}" for key in changed]
