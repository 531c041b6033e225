"""Training on a volume that fills up or turns read-only: the whole program on a real file system. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trainer
from trainer.checkpoint import commit as commits
from trainer.records import read_records
from trainer.steps import read_counting

pytestmark = pytest.mark.slow
TEMPLATE = Path(trainer.__file__).resolve().parents[1]
PATIENCE_S = 180.0


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 24 MB that turns read-only at an error, as the file systems of disks do."""
    image, mount = tmp_path / "image", tmp_path / "volume"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(24 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-b", "1024", "-m", "0", "-O", "^has_journal", image], check=True)
    subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, mount], check=True)
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


class Run:
    """The launcher and two ranks, with a checkpoint of 1.5 MB every other step."""

    def __init__(self, volume: Path, corpus: Path, *more: str) -> None:
        self.run_dir = volume / "checkpoints" / "run"
        settings = {
            "volume.mount": volume, "checkpoint.dir": volume / "checkpoints", "run.name": "run",
            "checkpoint.every_steps": 2, "checkpoint.retune": "false", "checkpoint.keep_last": 2,
            "data.path": corpus, "data.sequence_length": 32, "data.global_batch": 4, "data.micro_batch": 2,
            "model.layers": 2, "model.width": 64, "model.heads": 2, "train.steps": 1_000_000,
            "train.eval_every_steps": 0, "logging.every_steps": 1, "restart.backoff_s": 0.1,
        }  # fmt: skip
        command = [sys.executable, "-m", "trainer", "launch", "--gpus", "2"]
        self.log, project = volume.parent / "log", volume.parent / "project"
        for package in ("trainer", "tasks"):
            shutil.copytree(TEMPLATE / package, project / package, ignore=shutil.ignore_patterns("__pycache__"))
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *(f"{key}={value}" for key, value in settings.items()), *more],
                cwd=project, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def said(self) -> str:
        return self.log.read_text()

    def step(self) -> int:
        """The newest step that a person was shown."""
        steps = [line for line in self.said().splitlines() if line.startswith("step ")]
        return int(steps[-1].split()[1].split("/")[0]) if steps else 0

    def newest(self) -> int:
        return max((commit.step for commit in commits.complete(self.run_dir)), default=0)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"it ended before {what}: {self.said()}"
            assert time.monotonic() < deadline, f"no {what}: {self.said()}"
            time.sleep(0.02)


@pytest.fixture
def start(volume: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start a run with more settings; it has its first checkpoint."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(bytes(range(32, 127)) * 200)
    runs: list[Run] = []

    def start(*more: str) -> Run:
        runs.append(Run(volume, corpus, *more))
        runs[-1].until(lambda: runs[-1].newest() > 0, "first checkpoint")
        return runs[-1]

    yield start
    for run in runs:
        run.process.terminate()
        run.process.wait(60)


def test_a_disk_that_fills_up_costs_saves_and_nothing_else(start: Callable[..., Run], volume: Path) -> None:
    run = start("checkpoint.max_failed_saves=1000")
    filler = volume / "filler"
    with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    run.until(lambda: "failed (" in run.said(), "failed save")
    kept, seen = run.newest(), run.step()
    assert kept > 0, "it keeps what is complete"
    assert "no room for a checkpoint" in run.said() or "No space left" in run.said()
    run.until(lambda: run.step() >= seen + 12, "twelve steps on a full disk")
    filler.unlink()
    run.until(lambda: run.newest() > kept, "save after there was room again")

    run.process.terminate()
    assert run.process.wait(60) == 75, run.said()
    for commit in commits.complete(run.run_dir):
        commits.verify(commit)
    last = run.newest()
    assert [line.step for line in read_counting(run.run_dir)] == list(range(1, last + 1)), "no line is missing"
    failed = [event for event in read_records(run.run_dir, "ledger") if event["event"] == "save_failed"]
    assert failed and {event["attempt"] for event in failed} == {1}, "what could not be written then is there now"
    assert "restart 1" not in run.said()


def test_a_volume_that_turns_read_only_ends_the_run_with_a_clear_line(start: Callable[..., Run], volume: Path) -> None:
    run = start()
    device = subprocess.run(["findmnt", "-no", "SOURCE", volume], check=True, capture_output=True, text=True).stdout
    Path(f"/sys/fs/ext4/{Path(device.strip()).name}/trigger_fs_error").write_text("a test")
    assert run.process.wait(PATIENCE_S) in (1, 75), run.said()
    assert "Read-only file system" in run.said()
    assert "[launch] crashed: rank " in run.said() and "3 saves in a row failed, the last with: " in run.said()
    complete = commits.complete(run.run_dir)
    assert complete
    for commit in complete:
        commits.verify(commit)
