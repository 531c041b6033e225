"""Which lines of metrics.jsonl count after interruptions, and what a line holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainer.config.load import load_config
from trainer.metrics import Metrics, read_metrics

VALUES = {"loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "samples": 8, "batch_hash": "aa"}


def _write(run_dir: Path, name: str, *records: dict[str, object]) -> None:
    run_dir.mkdir(exist_ok=True)
    with (run_dir / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def _steps(run_dir: Path) -> list[tuple[int, int]]:
    return [(line["step"], line["attempt"]) for line in read_metrics(run_dir)]


def test_steps_that_a_later_attempt_did_again_count_once(tmp_path: Path) -> None:
    _write(tmp_path, "metrics", *({"step": step, "attempt": 1} for step in range(1, 11)))
    _write(tmp_path, "metrics", *({"step": step, "attempt": 2} for step in range(8, 10)))
    assert _steps(tmp_path) == [(step, 1) for step in range(1, 8)] + [(8, 2), (9, 2)]


def test_an_attempt_that_died_before_its_first_line_rewinds_too(tmp_path: Path) -> None:
    _write(tmp_path, "metrics", *({"step": step, "attempt": 1} for step in range(1, 11)))
    _write(tmp_path, "ledger", {"time": 1.0, "attempt": 2, "event": "attempt_started", "step": 4})
    assert _steps(tmp_path) == [(step, 1) for step in range(1, 5)]


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    _write(tmp_path, "metrics", {"step": 1, "attempt": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "att')
    assert _steps(tmp_path) == [(1, 1)]


def test_each_step_is_a_line_and_a_person_sees_some_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config([f"checkpoint.dir={tmp_path}", "run.name=run", "train.steps=30", "logging.tensorboard=false"])
    config.run_dir.mkdir()
    metrics = Metrics(config, 3, first_step=5, flops_per_token=1.0, device=torch.device("cpu"), ranks=1)
    for step in range(5, 31):
        metrics.step(step, VALUES | ({"val_loss": 1.5} if step == 12 else {}), moment=metrics.before + 0.5)
    metrics.close()
    lines = read_metrics(config.run_dir)
    assert [line["step"] for line in lines] == list(range(5, 31))
    assert lines[0].keys() == {"step", *VALUES, "tokens_per_s", "attempt"}
    assert lines[7]["val_loss"] == 1.5
    shown = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in shown] == [5, 10, 12, 20, 30]
    assert "validation 1.5000" in shown[2]
    assert " left" in shown[1] and " left" not in shown[-1]
