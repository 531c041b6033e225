"""The drill fails on an engine with a planted fault; that it passes on a sound one is a test of every project."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import trainer
from trainer.outcome import ConfigError
from trainer.steps import Step
from trainer.tools import drill
from trainer.tools.drill import FP32, compare_lines

PROJECT = Path(trainer.__file__).resolve().parents[1]
STEPS = 12


@dataclass(frozen=True)
class Project:
    """A copy of the engine and its task, to be broken at will."""

    folder: Path

    def plant(self, file: str, sound: str, fault: str) -> None:
        path = self.folder / "trainer" / file
        text = path.read_text()
        assert text.count(sound) == 1, f"{file} no longer holds {sound!r} once"
        path.write_text(text.replace(sound, fault))

    def drill(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "trainer", "drill", "--steps", str(STEPS), *arguments, "data.path=text.txt"],
            cwd=self.folder, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip

    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "drill" / "drill.json").read_text())
        return found

    def failed(self) -> set[str]:
        return {check["name"] for check in self.verdict()["checks"] if not check["passed"]}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    for package in ("trainer", "tasks"):
        shutil.copytree(PROJECT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}. " for n in range(2000)))
    return Project(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "sound", "fault", "found"),
    [
        ("data/loader.py", "SampleOrder(len(samples), seed)", "SampleOrder(len(samples), seed + bool(consumed))",
         "samples of each batch"),
        ("run.py", "set_learning_rate(optimizer, rate)",
         "set_learning_rate(optimizer, rate * (1.2 if 'resumed' in vars(self.state) else 1))", "loss"),
        ("optim.py", "    if step <= config.warmup_steps:",
         "    import os\n\n    step += int(os.environ['WORLD_SIZE']) - 2\n    if step <= config.warmup_steps:",
         "learning rate"),
        ("state.py", "self.optimizer.state[parameter][field] = value", "value.zero_()  # ", "optimizer state"),
        ("run.py", "self.step + 1, self._batch.index)", "self.step + 1, self.world.rank)", "loss"),
    ],
    ids=["shuffled order", "wrong rate applied", "wrong rate", "dropped optimizer state", "dropout masks by rank"],
)  # fmt: skip
def test_a_planted_fault_fails(project: Project, file: str, sound: str, fault: str, found: str) -> None:
    if "'resumed'" in fault:
        project.plant(
            "state.py", "self.optimizer.state.clear()", "self.optimizer.state.clear()\n        self.resumed = 1"
        )
    project.plant(file, sound, fault)
    done = project.drill("--save-ranks", "2", "--resume-ranks", "1", "model.dropout=0.1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout
    assert found in project.failed()
    assert list((project.folder / "drill").glob("runs-*/interrupted/step_*"))  # kept, to be looked at


@pytest.mark.slow
def test_a_run_that_does_not_get_to_its_end_says_why(project: Project) -> None:
    project.plant("optim.py", "    norms = ", "    raise RuntimeError('no luck today')\n    norms = ")
    done = project.drill("--save-ranks", "1", "--resume-ranks", "1")
    assert done.returncode == 1
    assert "no luck today" in project.verdict()["error"]
    assert "uninterrupted.log" in done.stdout


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drill, "count_gpus", lambda: 2)
    with pytest.raises(ConfigError, match="this machine has 2 GPUs"):
        drill.drill([], save_ranks=8, resume_ranks=4, steps=12, output=tmp_path)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# The verdict on its own


def _lines(steps: int = 6) -> list[Step]:
    return [
        Step(1, n, loss=4.0 / n, grad_norm=1.0, lr=0.1 * n, samples=8 * n, batch_hash=f"{n:x}")
        for n in range(1, steps + 1)
    ]


def _failed(found: Sequence[Step]) -> set[str]:
    return {check.name for check in compare_lines(_lines(), found, 6, FP32) if not check.passed}


def test_equal_runs_pass() -> None:
    assert _failed(_lines()) == set()


@pytest.mark.parametrize(
    ("name", "change", "check"),
    [
        ("loss", 1 + 1e-4, "loss"),
        ("loss", float("nan"), "loss"),
        ("grad_norm", 1.01, "gradient norm"),
        ("lr", 1 + 1e-15, "learning rate"),
        ("samples", 2, "samples consumed"),
        ("batch_hash", 2, "samples of each batch"),
    ],
)
def test_one_number_that_is_off_at_one_step_fails_its_check(name: str, change: float, check: str) -> None:
    found = _lines()
    found[4] = replace(found[4], **{name: getattr(found[4], name) * change})
    assert _failed(found) == {check}


def test_a_missing_step_and_a_step_too_many_fail() -> None:
    assert "every step once" in _failed(_lines()[:-1])
    assert "every step once" in _failed([*_lines(), _lines()[2]])
