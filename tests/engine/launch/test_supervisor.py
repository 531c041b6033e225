"""Real launchers over ranks that only pretend to train: exit codes, crashes, notices, stuck steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainer
from trainer.checkpoint.commit import complete
from trainer.processes import alive
from trainer.records import read_records

FAKE = Path(__file__).with_name("fake_ranks.py")
PROJECT = Path(trainer.__file__).resolve().parents[1]


def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """What `condition` returns once it is true; AssertionError naming `what` after `seconds`."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.02)
    return found


class Run:
    """A project directory without settings, and launchers started in it."""

    def __init__(self, project: Path) -> None:
        self.project = project
        self.run_dir = project / "checkpoints" / project.name
        self.launchers: list[subprocess.Popen[str]] = []

    def start(self, *overrides: str, fake: dict[str, Any] | None = None) -> subprocess.Popen[str]:
        log = (self.project / f"log{len(self.launchers)}").open("w")
        launcher = subprocess.Popen(
            [sys.executable, str(FAKE), "launch", "reclaim.notice=none", "restart.backoff_s=0.1", *overrides],
            cwd=self.project,
            env={**os.environ, "FAKE_RANKS": json.dumps(fake or {})},
            stdin=subprocess.DEVNULL,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        self.launchers.append(launcher)
        return launcher

    def code(self, *overrides: str, fake: dict[str, Any] | None = None) -> int:
        return self.start(*overrides, fake=fake).wait(60)

    @property
    def log(self) -> str:
        """Of the newest launcher."""
        return (self.project / f"log{len(self.launchers) - 1}").read_text()

    @property
    def saved(self) -> int:
        return max((found.step for found in complete(self.run_dir)), default=0)

    @property
    def last_line(self) -> int:
        return max((line["step"] for line in read_records(self.run_dir, "metrics")), default=0)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_records(self.run_dir, "ledger") if event["event"] == name]

    def reaches(self, step: int) -> None:
        until(lambda: self.last_line >= step, f"step {step}")

    def starts(self, attempt: int) -> None:
        until(lambda: len(self.events("attempt_started")) == attempt, f"attempt {attempt}")

    def saves_again(self) -> None:
        before = self.saved
        until(lambda: self.saved > before, "a new checkpoint")

    def child(self) -> int:
        """Process id of the newest launcher's ranks."""
        pid = self.launchers[-1].pid
        return int(until((Path(f"/proc/{pid}/task/{pid}/children")).read_text, "ranks").split()[0])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    project = tmp_path / "project"
    project.mkdir()
    found = Run(project)
    yield found
    for launcher in found.launchers:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()


# ---------------------------------------------------------------------------------------------------------------------
# Exit codes


def test_a_finished_run_exits_0_and_does_so_again_without_starting_ranks(run: Run) -> None:
    assert run.code("train.steps=5") == 0
    assert run.saved == run.last_line == 5
    assert [event["reason"] for event in run.events("stopped")] == ["finished"]
    assert run.code("train.steps=5") == 0
    assert len(run.events("attempt_started")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_ends_the_step_saves_it_and_exits_75(run: Run, number: signal.Signals) -> None:
    launcher = run.start("train.steps=100000")
    run.reaches(3)
    launcher.send_signal(number)
    assert launcher.wait(30) == 75
    (stopped,) = run.events("stopped")
    assert run.saved == run.last_line == stopped["step"]
    assert stopped["reason"] == ("interrupted" if number == signal.SIGINT else "reclaimed")
    assert run.events("reclaim_noticed")[0]["source"] == number.name


def test_a_resumed_run_goes_on_from_where_it_stopped(run: Run) -> None:
    launcher = run.start("train.steps=60", fake={"step_s": 0.05})
    run.reaches(3)
    launcher.terminate()
    assert launcher.wait(30) == 75
    stopped = run.saved
    assert run.code("train.steps=60") == 0
    assert [line["step"] for line in read_records(run.run_dir, "metrics")] == list(range(1, 61))
    assert run.events("attempt_started")[1]["step"] == stopped


def test_signals_again_and_again_change_nothing(run: Run) -> None:
    launcher = run.start("train.steps=100000", fake={"save_s": 1.0})
    run.reaches(3)
    for _ in range(20):
        launcher.terminate()
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.01)
    assert launcher.wait(30) == 75
    assert run.saved == run.last_line


def test_a_signal_to_the_ranks_alone_stops_them_too(run: Run) -> None:
    launcher = run.start("train.steps=100000")
    run.reaches(3)
    os.kill(run.child(), signal.SIGTERM)
    assert launcher.wait(30) == 75
    assert run.saved == run.last_line
    assert "SIGTERM" in run.events("reclaim_noticed")[0]["source"]


def test_a_signal_to_the_whole_process_group_stops_cleanly(run: Run) -> None:
    launcher = run.start("train.steps=100000")
    run.reaches(3)
    os.killpg(launcher.pid, signal.SIGTERM)
    os.killpg(run.child(), signal.SIGTERM)
    assert launcher.wait(30) == 75
    assert run.saved == run.last_line


def test_a_signal_before_the_first_step_exits_at_once_and_saves_nothing(run: Run) -> None:
    launcher = run.start("train.steps=100000", fake={"load_s": 50})
    run.child()
    launcher.terminate()
    assert launcher.wait(30) == 75
    assert run.saved == 0
    assert "before a new step" in run.log


def test_a_wrong_configuration_is_never_retried(run: Run) -> None:
    assert run.code("train.steps=5", fake={"refuse": "model.width is 3; it must be even"}) == 78
    assert run.log.count("model.width is 3; it must be even") == 1
    assert len(run.events("stopped")) == 1


def test_an_unknown_key_exits_78_before_anything_is_made(run: Run) -> None:
    assert run.code("train.stepz=5") == 78
    assert "train.steps" in run.log
    assert not run.run_dir.exists()


def test_a_volume_that_fails_is_one_line_and_another_start_may_find_it_mended(run: Run) -> None:
    (run.run_dir / ".lease.lock").mkdir(parents=True)
    assert run.code("train.steps=5") == 75
    assert "Traceback" not in run.log and "Is a directory" in run.log


def test_a_start_that_is_stopped_early_claims_no_steps_of_an_earlier_one(run: Run) -> None:
    first = run.start("checkpoint.every_steps=5", "train.steps=100000")
    run.reaches(12)
    first.kill()
    first.wait()
    saved = until(lambda: run.saved, "a checkpoint")
    launcher = run.start("train.steps=100000", fake={"load_s": 50})
    run.child()
    launcher.terminate()
    assert launcher.wait(30) == 75
    assert run.events("stopped")[-1]["step"] == saved == run.saved


def test_the_code_for_start_me_again_is_configurable(run: Run) -> None:
    launcher = run.start("train.steps=100000", "restart.exit_reclaimed=143")
    run.reaches(3)
    launcher.terminate()
    assert launcher.wait(30) == 143


# ---------------------------------------------------------------------------------------------------------------------
# Crashes


def test_a_crash_is_restarted_from_the_newest_checkpoint(run: Run) -> None:
    assert run.code("train.steps=20", "checkpoint.every_steps=5", fake={"crash_at": 12, "crash_once": True}) == 0
    assert [event["step"] for event in run.events("attempt_started")] == [0, 10]
    assert [event["reason"] for event in run.events("stopped")] == ["crashed", "finished"]


def test_a_crash_at_the_same_step_stops_early_with_the_traceback_at_the_end(run: Run) -> None:
    assert run.code("restart.max_crash_restarts=9", fake={"crash_at": 7, "crash_words": "no such file"}) == 1
    assert len(run.events("attempt_started")) == 2
    traceback, last_line = run.log.strip().rsplit("\n", 1)
    assert traceback.endswith("RuntimeError: no such file")
    assert "same step" in last_line


def test_crashes_end_after_the_restarts_that_are_allowed(run: Run) -> None:
    """Killed from outside each time, so that nothing says the next try would end alike."""
    launcher = run.start("restart.max_crash_restarts=2", "train.steps=100000")
    for attempt in (1, 2, 3):
        run.starts(attempt)
        run.reaches(1)
        os.kill(run.child(), signal.SIGKILL)
    assert launcher.wait(30) == 1
    assert "max_crash_restarts is 2" in run.log


def test_progress_refills_the_crash_budget(run: Run) -> None:
    launcher = run.start("restart.max_crash_restarts=1", "checkpoint.every_steps=2", "train.steps=100000")
    for attempt in (1, 2, 3, 4):
        run.starts(attempt)
        run.saves_again()
        os.kill(run.child(), signal.SIGKILL)
    run.starts(5)
    launcher.terminate()
    assert launcher.wait(30) == 75


def test_a_signal_during_the_pause_before_a_restart_exits_75(run: Run) -> None:
    launcher = run.start("restart.backoff_s=50", fake={"crash_at": 2})
    until(lambda: run.events("stopped"), "the crash")
    launcher.terminate()
    assert launcher.wait(10) == 75


def test_a_launcher_that_is_killed_leaves_no_ranks_behind(run: Run) -> None:
    launcher = run.start("train.steps=100000")
    run.reaches(3)
    ranks = run.child()
    launcher.kill()
    launcher.wait()
    until(lambda: not alive(ranks), "the ranks' end", 5)


# ---------------------------------------------------------------------------------------------------------------------
# Grace, notices, stuck steps


def test_too_little_time_for_a_save_stops_without_one(run: Run) -> None:
    launcher = run.start("train.steps=100000", "reclaim.grace_s=3", "checkpoint.every_steps=2", fake={"save_s": 3.0})
    until(lambda: run.saved == 2, "a save that is measured")
    run.reaches(3)
    began = time.monotonic()
    launcher.terminate()
    assert launcher.wait(30) == 75
    assert time.monotonic() - began < 3
    assert "stopping without" in run.log
    assert "lost" in run.log


def test_ranks_that_do_not_stop_are_ended_before_the_platform_does_it(run: Run) -> None:
    launcher = run.start("train.steps=100000", "reclaim.grace_s=10", fake={"hang_at": 4})
    run.reaches(3)
    ranks = run.child()
    began = time.monotonic()
    launcher.terminate()
    assert launcher.wait(30) == 75
    assert time.monotonic() - began < 10
    assert not alive(ranks)


def test_a_file_that_appears_is_a_notice(run: Run) -> None:
    launcher = run.start("train.steps=100000", "reclaim.notice=file:going-away")
    run.reaches(3)
    (run.project / "going-away").touch()
    assert launcher.wait(30) == 75
    assert run.saved == run.last_line
    assert "going-away" in run.events("reclaim_noticed")[0]["source"]


def test_a_command_that_succeeds_is_a_notice(run: Run) -> None:
    launcher = run.start("train.steps=100000", "reclaim.notice=command:test -e going-away")
    run.reaches(3)
    (run.project / "going-away").touch()
    assert launcher.wait(30) == 75


def test_a_stuck_step_shows_every_stack_and_is_restarted_if_set(run: Run) -> None:
    fake = {"hang_at": 4}
    launcher = run.start("restart.stuck_after_s=1", "restart.restart_stuck=true", "train.steps=9", fake=fake)
    until(lambda: len(run.events("stuck")) == 2, "stuck twice")
    launcher.terminate()
    launcher.wait(30)
    assert "all stacks" in run.log
    assert 'fake_ranks.py", line' in run.log and " in train" in run.log


def test_a_second_launcher_is_refused_while_the_first_lives(run: Run) -> None:
    first = run.start("train.steps=100000")
    run.reaches(3)
    assert run.code("train.steps=100000") == 75
    assert f"process {first.pid}" in run.log


def test_the_launcher_imports_no_torch() -> None:
    code = (
        "import sys, trainer.cli, trainer.launch.supervisor, trainer.reclaim.notices; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0
