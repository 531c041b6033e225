"""What a line of metrics.jsonl holds, and what a person sees of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.config.load import load_config
from trainer.metrics import Metrics
from trainer.records import read_records

VALUES = {"loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "samples": 8, "batch_hash": "aa"}


def test_each_step_is_a_line_and_a_person_sees_some_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config([f"checkpoint.dir={tmp_path}", "run.name=run", "train.steps=30", "logging.tensorboard=false"])
    config.run_dir.mkdir()
    metrics = Metrics(config, 3, first_step=5, flops_per_token=1.0, device=torch.device("cpu"), ranks=1)
    for step in range(5, 31):
        metrics.step(step, VALUES | ({"val_loss": 1.5} if step == 12 else {}), moment=metrics.before + 0.5)
    metrics.close()
    lines = read_records(config.run_dir, "metrics")
    assert [line["step"] for line in lines] == list(range(5, 31))
    assert lines[0].keys() == {"step", *VALUES, "tokens_per_s", "attempt"}
    assert lines[7]["val_loss"] == 1.5
    shown = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in shown] == [5, 10, 12, 20, 30]
    assert "validation 1.5000" in shown[2]
    assert " left" in shown[1] and " left" not in shown[-1]
