"""What a line of metrics.jsonl holds, and what a person sees of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.language_model import LanguageModel
from trainer.config.load import load_config
from trainer.metrics import Metrics
from trainer.records import read_records

VALUES = {"loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "samples": 8, "batch_hash": "aa"}


def test_each_step_is_a_line_and_a_person_sees_some_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config([f"checkpoint.dir={tmp_path}", "run.name=run", "train.steps=30", "logging.tensorboard=false"])
    config.run_dir.mkdir()
    task = LanguageModel(config)
    device = torch.device("cpu")
    metrics = Metrics(config, 3, task, task.build_model(), first_step=5, device=device, ranks=1)
    for step in range(5, 31):
        values = VALUES | {"accuracy": 0.25} | ({"val_loss": 1.5} if step == 12 else {})
        metrics.step(step, values, moment=metrics.before + 0.5)
    metrics.close()
    lines = read_records(config.run_dir, "metrics")
    assert [line["step"] for line in lines] == list(range(5, 31))
    assert lines[0].keys() == {"step", *VALUES, "accuracy", "seconds", "units_per_s", "attempt"}
    assert {line["seconds"] for line in lines} == {0.5}
    assert lines[0]["units_per_s"] == config.data.global_batch * config.data.sequence_length / 0.5
    assert lines[7]["val_loss"] == 1.5
    shown = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in shown] == [5, 10, 12, 20, 30]
    assert "validation 1.5000" in shown[2]
    assert all("accuracy 0.2500" in line and "tokens/s" in line for line in shown)
    assert " left" in shown[1] and " left" not in shown[-1]
