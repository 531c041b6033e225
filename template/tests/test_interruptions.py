"""What interrupts a run costs steps that are done again and nothing else; real processes are signalled and killed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import psutil
from conftest import Project

from trainer.checkpoint import commit
from trainer.records import read_records

PATIENCE_S = 300.0


def _wait(project: Project, process: psutil.Popen, event: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not event():
        assert process.poll() is None and time.monotonic() < give_up, (project.folder / "log").read_text()
        time.sleep(0.02)


def _last_step(project: Project) -> int:
    return max((line["step"] for line in read_records(project.run_dir, "metrics")), default=0)


def test_sigterm_means_75_with_the_last_step_saved_and_the_next_start_carries_on(project: Project) -> None:
    restart = ["./restart.sh", "checkpoint.every_steps=1000"]
    first = project.start(*restart, "--gpus", "2", "train.steps=1000000")
    _wait(project, first, lambda: _last_step(project) >= 3)
    first.terminate()
    assert first.wait(PATIENCE_S) == 75, (project.folder / "log").read_text()
    step = _last_step(project)
    assert [found.step for found in commit.complete(project.run_dir)] == [step]
    [stopped] = [event for event in read_records(project.run_dir, "ledger") if event["event"] == "stopped"]
    assert (stopped["step"], stopped["reason"]) == (step, "reclaimed")

    assert project.start(*restart, "--gpus", "1", f"train.steps={step + 2}").wait(PATIENCE_S) == 0
    lines = [line["step"] for line in read_records(project.run_dir, "metrics")]
    assert lines == list(range(1, step + 3))
    assert commit.complete(project.run_dir)[0].step == step + 2


def test_after_kill_9_the_run_goes_on_as_if_nothing_had_happened(project: Project) -> None:
    words = [sys.executable, "-m", "trainer", "drill", "--steps", "12", "--save-ranks", "2", "--resume-ranks", "1"]
    done = project.start(*words)
    code, text = done.wait(2 * PATIENCE_S), (project.folder / "log").read_text()
    assert code == 0 and "PASSED" in text, text
    verdict = json.loads((project.folder / "drill" / "drill.json").read_text())
    assert verdict["passed"]
    assert [check["name"] for check in verdict["checks"]] == [
        "every step once", "samples of each batch", "samples consumed", "learning rate", "loss", "gradient norm",
        "weights", "optimizer state",
    ]  # fmt: skip
    recovery = verdict["recovery"]
    assert 0 < recovery["resumed_from_step"] <= recovery["killed_after_step"] < 12
    assert 0 < recovery["load_s"] < recovery["start_s"] < recovery["first_step_s"]
    assert min(recovery["units_per_s_before"], recovery["units_per_s_after"]) > 0
    assert sorted(path.name for path in (project.folder / "drill").iterdir()) == ["drill.json", "drill.png"]
    assert not (project.folder / "checkpoints").exists()  # where the real run would be
