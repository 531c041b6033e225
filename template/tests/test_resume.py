"""A run that was stopped and resumed on other numbers of ranks is the run that was never stopped, to the bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from toy import Toy

from trainer.checkpoint.dcp.reader import load_tensors
from trainer.config.settings import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    VolumeConfig,
)
from trainer.data.order import SampleOrder, batch_checksum, batch_hash
from trainer.outcome import ConfigError, Reason
from trainer.records import read_records
from trainer.train import train

BATCH, STEPS = 7, 14  # more than two epochs of the toy's samples


def _config(folder: Path, name: str) -> Config:
    return Config(
        task="toy",
        data=DataConfig(global_batch=BATCH, micro_batch=2),
        optim=OptimConfig(lr=0.02, warmup_steps=4, ema_decay=0.9),
        train=TrainConfig(steps=STEPS, eval_every_steps=7),
        logging=LoggingConfig(tensorboard=False),
        run=RunConfig(name=name),
        volume=VolumeConfig(allow_ephemeral=True),
        checkpoint=CheckpointConfig(dir=str(folder), every_steps=4, retune=False, keep_last=9),
    )


class _Stopped(Toy):
    """The toy on a machine that is taken away: SIGTERM comes to one rank while it makes step `stop_at`."""

    stop_at: int | None = None

    def learning_rate(self, step: int) -> float | None:
        if step + 1 == self.stop_at and os.environ["RANK"] == "0":
            self.stop_at = None
            os.kill(os.getpid(), signal.SIGTERM)
        return super().learning_rate(step)


def session(config: Config, stop_at: int | None) -> tuple[Reason, int, str]:
    """On each rank: train from where the run is to its end, or until it is told to stop in step `stop_at`."""
    task = _Stopped(config)
    task.stop_at = stop_at
    try:
        return *train(config, task), ""
    except ConfigError as error:
        return Reason.CONFIG, 0, str(error)


def test_a_resumed_run_is_the_run_that_was_never_stopped(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    whole, cut = _config(tmp_path, "whole"), _config(tmp_path, "cut")
    assert ranks(1, session, whole, None) == [(Reason.FINISHED, STEPS, "")]
    assert ranks(3, session, cut, 5) == [(Reason.RECLAIMED, 5, "")] * 3
    other = replace(cut, optim=replace(cut.optim, lr=0.03))
    [(reason, _, message)] = ranks(1, session, other, None)
    assert reason is Reason.CONFIG and "optim.lr was 0.02 and is 0.03" in message
    assert ranks(2, session, cut, None) == [(Reason.FINISHED, STEPS, "")] * 2

    expected, found = (read_records(config.run_dir, "metrics") for config in (whole, cut))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "lr", "samples", "batch_hash", "close", "val_loss", "val_close"):
        assert [line.get(name) for line in found] == [line.get(name) for line in expected], name
    assert {line["step"] for line in found if "val_loss" in line} == {7, 14}
    (one, _), (two, _) = (load_tensors(config.run_dir) for config in (whole, cut))
    compared = {name for name in one if not name.startswith("rng.")}  # streams that belong to ranks
    assert compared == {name for name in two if not name.startswith("rng.")}
    assert [name for name in compared if not torch.equal(one[name], two[name])] == []

    # The samples of each step: those of the order, which knows nothing of ranks.
    order = SampleOrder(len(Toy(whole).train), whole.data.seed)
    numbers = [order.global_batch(step * BATCH, BATCH)[0] for step in range(STEPS)]
    hashes = [batch_hash(*batch_checksum(np.arange(BATCH), batch)) for batch in numbers]
    assert [line["batch_hash"] for line in found] == hashes
    assert sorted(np.concatenate(numbers)[: order.length]) == list(range(order.length))  # each once an epoch
