"""`Run` under a loop of one's own: a model, an optimizer and data that the engine knows nothing of."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.load import load_config
from trainer.outcome import ConfigError, Reason
from trainer.records import read_records
from trainer.run import Run

STEPS, SAMPLES = 9, 40


def _settings(folder: Path, name: str) -> list[str]:
    return [
        f"checkpoint.dir={folder}", f"run.name={name}", "checkpoint.every_steps=3", "volume.allow_ephemeral=true",
        "data.global_batch=7", "data.micro_batch=2", f"train.steps={STEPS}", "train.eval_every_steps=4",
        "logging.tensorboard=false",
    ]  # fmt: skip


def _data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(dim=1, keepdim=True).sin()


def my_loop(settings: Sequence[str], stop_after: int | None, samples: int = SAMPLES) -> tuple[Reason, int, str]:
    """The loop of the docstring of run.py, with a rate of its own."""
    inputs, targets = _data()
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        with Run(load_config(settings), model, optimizer, dataset_length=samples) as run:
            for step in run:
                if step == stop_after and run.world.rank == run.world.size - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 / step
                for numbers in run.micro_batches():
                    loss = ((run.model(inputs[numbers]) - targets[numbers]) ** 2).sum()
                    run.backward(loss, len(numbers))
                if run.update().evaluate:
                    run.record({"val_mine": 0.5})
    except ConfigError as error:
        return Reason.CONFIG, 0, str(error)
    assert run.exit_code == (0 if run.reason is Reason.FINISHED else 75)
    return run.reason, run.step, ""


def test_a_loop_of_ones_own_is_stopped_and_resumed_on_any_ranks(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    whole, cut = _settings(tmp_path, "whole"), _settings(tmp_path, "cut")
    assert ranks(1, my_loop, whole, None) == [(Reason.FINISHED, STEPS, "")]
    assert ranks(1, my_loop, cut, 4) == [(Reason.RECLAIMED, 4, "")]
    [(reason, _, message)] = ranks(1, my_loop, cut, None, SAMPLES + 1)
    assert reason is Reason.CONFIG and "data.length was 40 and is 41" in message
    assert ranks(2, my_loop, cut, None) == [(Reason.FINISHED, STEPS, "")] * 2

    expected, found = (read_records(tmp_path / name, "metrics") for name in ("whole", "cut"))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for name in ("samples", "batch_hash", "lr", "loss", "grad_norm"):
        assert [line[name] for line in found] == [line[name] for line in expected]
    assert [line["lr"] for line in found] == [0.1 / step for step in range(1, STEPS + 1)]
    assert expected[-1]["loss"] < expected[0]["loss"]
    assert [line["step"] for line in expected if line.get("val_mine") == 0.5] == [4, 8]
    saved: dict[str, list[int]] = {name: [] for name in ("whole", "cut")}
    for name, steps in saved.items():
        steps += [
            event["step"] for event in read_records(tmp_path / name, "ledger") if event["event"] == "save_committed"
        ]
    assert saved == {"whole": [3, 6, 9], "cut": [3, 4, 6, 9]}
