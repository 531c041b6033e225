"""Real ranks that are reclaimed at every kind of moment: exit 75, no step lost, never a deadlock."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.benchmarks.reclaim_storm import Run, storm
from tests.slurm_cluster import until
from trainer.records import read_records

pytestmark = pytest.mark.slow
MakeRun = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    made: list[Run] = []

    def run(ranks: int, *settings: str) -> Run:
        made.append(Run(tmp_path, ranks, settings))
        return made[-1]

    yield run
    for one in made:
        one.kill()


@pytest.mark.parametrize("target", ["rank", "group"])
def test_at_random_moments(make: MakeRun, target: str) -> None:
    assert len(storm(make(4), target, 5, random.Random(1))) == 5


def test_at_random_moments_to_the_launcher_alone(make: MakeRun) -> None:
    assert len(storm(make(2), "launcher", 3, random.Random(2))) == 3


def _reclaimed(run: Run, when: Callable[[], Any], what: str, target: str = "group") -> None:
    before, ends = run.last_line(), len(run.stopped())
    run.start()
    until(when, what, 120)
    run.signal(target, signal.SIGTERM, random.Random(0))
    run.check(run.wait(), before, ends)


def test_during_a_save(make: MakeRun) -> None:
    run = make(2)
    started = lambda: [event for event in read_records(run.run_dir, "ledger") if event["event"] == "save_started"]  # noqa: E731
    _reclaimed(run, started, "a save")


def test_during_an_evaluation(make: MakeRun) -> None:
    """Of which step 1 begins one that takes minutes; SIGTERM comes while it runs, and it is not waited for long."""
    run = make(2, "train.eval_every_steps=1", "train.eval_batches=40")
    _reclaimed(run, lambda: run.launcher and len(_ranks(run)) == 2 and run.last_line() >= 1, "an evaluation")


def test_while_a_checkpoint_is_loaded(make: MakeRun) -> None:
    run = make(2)
    _reclaimed(run, lambda: run.last_line() >= 3, "a first attempt")
    saved = run.saved()
    _reclaimed(run, lambda: len(_ranks(run)) == 2 and _resumed(run) == 1, "the load")
    assert run.saved() >= saved


def _resumed(run: Run) -> int:
    return sum(event["event"] == "resumed" for event in read_records(run.run_dir, "ledger"))


def _ranks(run: Run) -> list[psutil.Process]:
    assert run.launcher is not None
    return list(run.launcher.children())


def test_while_a_rank_hangs_the_machine_is_left_in_time(make: MakeRun) -> None:
    """One rank is stopped, so that the other waits for it in a collective; nobody can end the step."""
    run = make(2, "reclaim.grace_s=8")
    run.start()
    until(lambda: run.last_line() >= 12, "a few steps", 120)
    ranks = _ranks(run)
    ranks[0].suspend()
    began = time.monotonic()
    run.signal("group", signal.SIGTERM, random.Random(0))
    assert run.wait() == 75
    assert time.monotonic() - began < 8
    until(lambda: not any(rank.is_running() for rank in ranks), "the ranks' end", 5)
    assert run.saved() == 10
    assert run.stopped()[-1]["reason"] == "reclaimed"
    # And nothing of it stands in the way of the next start.
    run.command = [word for word in run.command if not word.startswith("reclaim.grace_s=8")]
    _reclaimed(run, lambda: run.last_line() >= 20, "the next attempt")


def test_a_hang_is_found_shown_and_restarted(make: MakeRun) -> None:
    run = make(2, "restart.stuck_after_s=15", "restart.restart_stuck=true", "restart.backoff_s=0")
    run.start()
    until(lambda: run.last_line() >= 12, "a few steps", 120)
    hanging = _ranks(run)[0]
    os.kill(hanging.pid, signal.SIGSTOP)
    until(
        lambda: len([e for e in read_records(run.run_dir, "ledger") if e["event"] == "attempt_started"]) == 2,
        "a restart",
        120,
    )
    until(lambda: run.last_line() >= 20, "steps", 120)
    run.signal("launcher", signal.SIGTERM, random.Random(0))
    assert run.wait() == 75
    assert "most recent call first" in run.log.read_text()
    assert any(event["event"] == "stuck" and event["step"] >= 12 for event in read_records(run.run_dir, "ledger"))
