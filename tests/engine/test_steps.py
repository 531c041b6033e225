"""Which steps count after interruptions, and how a line of the metrics is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainer.steps import read_counting, read_steps


def _write(run_dir: Path, name: str, *records: Mapping[str, object]) -> None:
    run_dir.mkdir(exist_ok=True)
    with (run_dir / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def _steps(run_dir: Path) -> list[tuple[int, int]]:
    return [(step.step, step.attempt) for step in read_counting(run_dir)]


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


def test_an_attempt_that_died_while_it_loaded_rewinds_too(tmp_path: Path) -> None:
    _write(tmp_path, "metrics", *({"step": step, "attempt": 1} for step in range(1, 11)))
    _write(tmp_path, "ledger", {"time": 1.0, "attempt": 2, "event": "resumed", "step": 4})
    assert _steps(tmp_path) == [(step, 1) for step in range(1, 5)]


def test_a_line_of_an_earlier_version_has_its_seconds_and_its_speed(tmp_path: Path) -> None:
    """It has tokens_per_s alone: 8 samples of 256 tokens a step."""
    _write(tmp_path, "metrics", {"step": 2, "attempt": 1, "samples": 16, "tokens_per_s": 1024})
    _write(tmp_path, "metrics", {"step": 3, "attempt": 1, "samples": 24, "units_per_s": 1024, "seconds": 0.5})
    assert [(step.seconds, step.units_per_s) for step in read_steps(tmp_path, 256)] == [(2, 1024), (0.5, 1024)]
    assert [step.seconds for step in read_steps(tmp_path)] == [0, 0.5]


@pytest.mark.parametrize("speed", [0, None, "fast", float("nan")])
def test_a_speed_that_is_none_leaves_the_seconds_unknown(tmp_path: Path, speed: object) -> None:
    _write(tmp_path, "metrics", {"step": 2, "attempt": 1, "samples": 16, "tokens_per_s": speed})
    assert [step.seconds for step in read_steps(tmp_path, 256)] == [0]


def test_a_loss_that_is_no_number_is_read_and_a_line_without_a_step_is_not(tmp_path: Path) -> None:
    _write(tmp_path, "metrics", {"step": 1, "attempt": 1, "loss": float("nan")}, {"attempt": 1, "loss": 2.0})
    _write(tmp_path, "metrics", {"step": "2", "attempt": 1}, {"step": 0, "attempt": 1})
    (one,) = read_steps(tmp_path)
    assert math.isnan(one.loss)
