"""The report on synthetic runs whose answers are known."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from trainer.cli import main
from trainer.config.settings import CheckpointConfig
from trainer.interval import badput, compute_interval
from trainer.ledger import read_events
from trainer.steps import read_steps
from trainer.tools.report.account import Account, account
from trainer.tools.report.advice import suggestions

UNITS = 32 * 256  # of a step
ASSUMED = CheckpointConfig(
    mtbi_s=200, step_time_s=1, save_time_s=4, save_stall_s=0.5, restart_time_s=45, every_steps=50
)
SETTINGS = [
    f"checkpoint.{name}={getattr(ASSUMED, name)}"
    for name in ("mtbi_s", "step_time_s", "save_time_s", "save_stall_s", "restart_time_s", "every_steps")
]


class Run:
    """Writes the two records of a run, with a clock of its own."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.now, self.attempt = 1000.0, 0
        run_dir.mkdir(parents=True, exist_ok=True)

    def event(self, event: str, **fields: Any) -> None:
        self.write("ledger", {"time": self.now, "attempt": self.attempt, "event": event, **fields})

    def write(self, name: str, record: Any) -> None:
        text = record if isinstance(record, str) else json.dumps(record) + "\n"
        with (self.run_dir / f"{name}.jsonl").open("a") as file:
            file.write(text)

    def start(self, after_s: float, step: int, world_size: int, **resumed: Any) -> None:
        self.now, self.attempt = self.now + after_s, self.attempt + 1
        if resumed:
            self.event("resumed", step=step, **resumed)
        checkpoint = f"step_{step:08d}" if step else None
        self.event("attempt_started", step=step, world_size=world_size, checkpoint=checkpoint, unit="images")

    def train(
        self, first: int, last: int, seconds: float = 1.0, stall_s: float = 0.0, first_s: float | None = None
    ) -> None:
        """Steps `first` to `last` after a stall; `first_s` is what the first of them takes, where that is another."""
        self.now += stall_s
        for step in range(first, last + 1):
            took = first_s if first_s is not None and step == first else seconds
            self.now += took
            line = {"step": step, "loss": 5 / step**0.3, "lr": 1e-3, "grad_norm": 1.0, "samples": step * 32}
            self.write("metrics", line | {"seconds": took, "units_per_s": UNITS / took, "attempt": self.attempt})

    def save(self, step: int, stall_s: float = 0.5, write_s: float = 3.5, committed: bool = True) -> None:
        started = self.now
        self.event("save_started", step=step)
        self.event("save_staged", step=step, stall_s=stall_s)
        if committed:
            self.now = started + stall_s + write_s
            self.event("save_committed", step=step, write_s=write_s, bytes=1_000_000)
            self.now = started


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "demo")


def interrupted_twice(run: Run) -> None:
    """1135 s to step 135 on 8 ranks, killed; 35 steps again on 4 ranks, reclaimed at 160; finished at 200.

    Starts at 1000. Saves after 50 and 100 stall the next step for half a second each.
    """
    run.start(0, step=0, world_size=8)
    run.train(1, 50)
    run.save(50)
    run.train(51, 100, stall_s=0.5)
    run.save(100)
    run.train(101, 135, stall_s=0.5)  # ends at 1136
    run.start(60, step=100, world_size=4)
    run.train(101, 160, seconds=2)  # ends at 1316
    run.now -= 1
    run.event("reclaim_noticed", source="SIGTERM", deadline_s=30)
    run.now += 1
    run.save(160)
    run.now += 4
    run.event("stopped", step=160, reason="reclaimed")  # at 1320
    run.start(30, step=160, world_size=8)
    run.train(161, 200)  # ends at 1390
    run.save(200)
    run.now += 5
    run.event("stopped", step=200, reason="finished")
    run.event("finished", step=200)


def read(run: Run, settings: CheckpointConfig = ASSUMED, alive: bool = False) -> Account:
    return account(read_events(run.run_dir), read_steps(run.run_dir), settings, alive=alive)


def invoke(run: Run, *arguments: str) -> Any:
    place = [f"checkpoint.dir={run.run_dir.parent}", f"run.name={run.run_dir.name}", "train.steps=200", *SETTINGS]
    return CliRunner().invoke(main, ["report", *arguments, *place])


def test_every_interruption_is_listed_with_what_it_cost(run: Run) -> None:
    interrupted_twice(run)
    killed, reclaimed = read(run).run.interruptions
    assert (killed.kind, killed.step, killed.lost_steps, killed.save_in_flight) == ("killed", 135, 35, None)
    assert killed.lost_s == pytest.approx(35)
    assert killed.recovery_s == pytest.approx(60)
    assert (reclaimed.kind, reclaimed.step, reclaimed.lost_steps, reclaimed.save_in_flight) == (
        "reclaimed",
        160,
        0,
        None,
    )
    assert reclaimed.recovery_s == pytest.approx(30)


def test_the_seconds_add_up_to_the_time_since_the_first_start(run: Run) -> None:
    interrupted_twice(run)
    seconds = read(run).seconds
    assert seconds.elapsed == pytest.approx(1395 - 1000)
    assert seconds.productive == pytest.approx(100 + 2 * 60 + 40)
    assert seconds.stall == pytest.approx(4 * 0.5)
    assert seconds.lost == pytest.approx(35)
    assert seconds.restart == pytest.approx(90)
    assert seconds.paused == 0
    assert seconds.other == pytest.approx(395 - 260 - 2 - 35 - 90)  # the last saves


def test_badput_is_measured_in_the_terms_in_which_it_was_promised(run: Run) -> None:
    interrupted_twice(run)
    found = read(run)
    assert found.badput["measured"].lost == pytest.approx(35 / 395)
    assert found.badput["measured"].restart == pytest.approx(90 / 395)
    assert found.badput["measured"].stall == pytest.approx(2 / 395)
    assert found.badput["measured"].total == pytest.approx(127 / 395)
    plan = compute_interval(14_400, 0.8, 30, 3, 300)
    same = badput(plan.save_interval_steps, 14_400, 0.8, 30, 3, 300)
    assert (same.lost, same.stall, same.restart) == (plan.badput, plan.badput_stall, plan.badput_restart)
    assert same.total == pytest.approx(plan.badput_total)


def test_latencies_tell_the_first_save_of_an_attempt_from_the_others(run: Run) -> None:
    run.start(0, step=0, world_size=2)
    for number, (stall_s, write_s) in enumerate([(4.0, 9.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)], start=1):
        run.save(10 * number, stall_s, write_s)
        run.now += 20
    found = read(run)
    assert (found.stall_s.first, found.stall_s.steady, found.stall_s.median) == (4.0, 2.0, 2.5)
    assert found.stall_s.largest == 4.0
    assert found.stall_s.p95 == pytest.approx(3.85)
    assert found.durable_s.first == pytest.approx(13.0)
    assert found.write_s.count == 4


def test_a_save_may_be_committed_before_it_is_said_to_be_staged(run: Run) -> None:
    run.start(0, step=0, world_size=1)
    run.event("save_started", step=10)
    run.now += 1
    run.event("save_committed", step=10, write_s=1.0, bytes=1)
    run.now += 0.1
    run.event("save_staged", step=10, stall_s=0.2)
    (save,) = read(run).run.saves
    assert (save.outcome, save.stall_s, save.durable_s) == ("committed", 0.2, 1.0)


def test_failed_lost_and_running_saves_are_told_apart(run: Run) -> None:
    run.start(0, step=0, world_size=1)
    run.event("save_started", step=10)
    run.event("save_failed", step=10, reason="No space left on device")
    run.save(20, committed=False)
    run.start(5, step=0, world_size=1)
    run.save(10, committed=False)
    assert [save.outcome for save in read(run, alive=True).run.saves] == ["failed", "lost", "running"]
    assert [save.outcome for save in read(run, alive=False).run.saves] == ["failed", "lost", "lost"]
    assert "No space left on device" in invoke(run).output


def test_a_save_under_way_at_the_end_was_committed_or_lost(run: Run) -> None:
    run.start(0, step=0, world_size=1)
    run.train(1, 10)
    run.save(10, write_s=30)
    run.train(11, 15)
    run.event("reclaim_noticed", source="file", deadline_s=10)
    run.now += 30
    run.event("stopped", step=15, reason="reclaimed")
    run.start(5, step=10, world_size=1)
    run.train(11, 20)
    run.save(20, committed=False)
    run.train(21, 22)
    run.start(5, step=10, world_size=1)
    run.train(11, 12)
    committed, lost, _ = read(run).run.interruptions
    assert (committed.save_in_flight, committed.lost_steps) == ("committed", 5)
    assert (lost.save_in_flight, lost.lost_steps) == ("lost", 12)


def test_what_the_ledger_says_of_a_loss_wins_and_is_counted_once(run: Run) -> None:
    run.start(0, step=0, world_size=1)
    run.train(1, 30)
    run.start(10, step=20, world_size=1, lost_steps=10, lost_s=12.5, load_s=1.0)  # killed before its first step
    run.start(10, step=20, world_size=1, lost_steps=10, lost_s=12.5, load_s=1.0)
    run.train(21, 40)
    found = read(run, alive=True)
    assert [(one.kind, one.lost_steps, one.lost_s) for one in found.run.interruptions] == [
        ("killed", 10, 12.5),
        ("killed", 0, 0.0),
    ]
    assert [one.recovery_s for one in found.run.interruptions] == [20.0, 10.0]
    assert found.seconds.restart == pytest.approx(20)  # not 30: the second restart is part of the first
    assert found.seconds.lost == 12.5


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_pause_by_a_person_is_no_badput(run: Run, refused: int) -> None:
    """Nor do starts that were refused meanwhile end it."""
    run.start(0, step=0, world_size=1)
    run.train(1, 10)
    run.event("stopped", step=10, reason="interrupted")
    for _ in range(refused):
        run.now, run.attempt = run.now + 100, run.attempt + 1
        run.event("stopped", step=10, reason="config")
    run.now += 3600
    run.attempt += 1
    run.event("heartbeat")
    run.attempt -= 1
    run.start(15, step=10, world_size=1)
    run.train(11, 20)
    found = read(run, alive=True)
    assert found.seconds.paused == pytest.approx(3600 + 100 * refused)
    assert found.seconds.restart == pytest.approx(15)
    assert found.run.interruptions[0].recovery_s == pytest.approx(15)
    assert found.badput["measured"].restart == pytest.approx(15 / 35)


def test_a_slow_first_step_belongs_to_the_restart(run: Run) -> None:
    run.start(0, step=0, world_size=1)
    run.train(1, 10)
    run.event("stopped", step=10, reason="reclaimed")
    run.start(20, step=10, world_size=1)
    run.train(11, 20, first_s=10)  # compiling
    assert read(run, alive=True).run.interruptions[0].recovery_s == pytest.approx(29)


def test_the_end_of_a_killed_attempt_is_not_before_its_last_step(run: Run) -> None:
    run.start(0, step=0, world_size=1)
    run.train(1, 100)
    run.start(10, step=0, world_size=1)
    run.train(1, 5)
    assert read(run, alive=True).run.interruptions[0].recovery_s == pytest.approx(10)


def test_a_ledger_alone_is_enough(run: Run) -> None:
    """Made by hand, without metrics: what it says of steps must do."""
    run.start(0, step=0, world_size=2)
    run.now = 1100
    run.save(100)
    run.now = 1150
    run.event("heartbeat")
    run.now = 1150
    run.start(40, step=100, world_size=2, lost_steps=45, lost_s=45.0, load_s=2.0)
    run.now = 1300
    run.event("stopped", step=200, reason="finished")
    found = read(run)
    (one,) = found.run.interruptions
    assert (one.kind, one.step, one.lost_steps, one.lost_s, one.recovery_s) == ("killed", 145, 45, 45.0, 40.0)
    seconds = found.seconds
    assert (seconds.elapsed, seconds.lost, seconds.restart, seconds.stall) == (300.0, 45.0, 40.0, 0.5)
    assert seconds.productive == pytest.approx(150 + 110 - 45 - 0.5)


def test_mtbi_counts_reclaims_and_kills_and_needs_three(run: Run) -> None:
    for _ in range(2):
        run.start(0, step=0, world_size=1)
        run.train(1, 100)
        run.event("stopped", step=100, reason="reclaimed")
    run.start(0, step=0, world_size=1)
    run.train(1, 100)
    run.event("stopped", step=100, reason="interrupted")
    mtbi, *_ = read(run).assumptions
    assert mtbi.measured is None
    run.start(0, step=0, world_size=1)
    run.train(1, 100)
    run.event("heartbeat")
    run.start(0, step=0, world_size=1)
    mtbi, *_ = read(run, alive=True).assumptions
    assert mtbi.measured == pytest.approx(400 / 3)


def test_suggestions_name_the_keys_and_the_values(run: Run) -> None:
    assumed = dataclasses.replace(ASSUMED, step_time_s=0.25, save_time_s=40, restart_time_s=45)
    interrupted_twice(run)
    lines = suggestions(read(run, assumed), assumed, grace_s=30)
    assert any(line.startswith("checkpoint.step_time_s: 1 instead of 0.25") for line in lines)
    assert any(line.startswith("checkpoint.save_time_s: 4 instead of 40") for line in lines)
    assert any(line.startswith("checkpoint.every_steps: ") for line in lines)
    assert not any(line.startswith("checkpoint.restart_time_s") for line in lines)
    assert lines[-1].endswith("copier update --vcs-ref=:current: --data step_time=1s --data save_time=4s")


def test_no_suggestion_where_the_assumptions_hold(run: Run) -> None:
    interrupted_twice(run)
    assert suggestions(read(run), ASSUMED, grace_s=30) == []


def test_measurements_that_no_interval_fits_are_said_to_be(run: Run) -> None:
    assumed = dataclasses.replace(ASSUMED, save_time_s=1.0, badput_target=0.02)
    interrupted_twice(run)
    assert any("no interval fits" in line for line in suggestions(read(run, assumed), assumed, grace_s=30))


def test_a_reclaim_that_lost_steps_points_at_the_grace_period(run: Run) -> None:
    run.start(0, step=0, world_size=1)
    run.train(1, 10)
    run.save(10, write_s=30)
    run.train(11, 50)
    run.event("stopped", step=50, reason="reclaimed")
    run.start(5, step=10, world_size=1)
    run.train(11, 12)
    lines = suggestions(read(run, alive=True), ASSUMED, grace_s=8)
    assert any(line.startswith("reclaim.grace_s: 1 reclaim lost 40 steps") and "8 s" in line for line in lines)


def test_retuning_is_shown_with_what_it_changed(run: Run) -> None:
    run.start(0, step=0, world_size=1)
    run.train(1, 30)
    run.save(30)
    run.event("retuned", every_steps=12, before=50, step_time_s=1.0, save_time_s=4.0, save_stall_s=0.5, mtbi_s=200)
    run.event("retuned", step=60, every_steps=14, warning="no interval keeps badput at 5%")
    found = read(run, alive=True)
    assert found.current_steps == 14
    text = invoke(run).output
    assert "attempt 1, step 30: 50 -> 12 (step 1.00 s, save 4.00 s, stall 500 ms, MTBI 3.33 min)" in text
    assert "attempt 1, step 60: 12 -> 14 (no interval keeps" in text
    run.start(5, step=30, world_size=1)
    run.train(31, 32)
    assert read(run, alive=True).current_steps == 50  # each attempt measures anew


def test_the_stall_counts_what_a_write_costs_the_steps_meanwhile(run: Run) -> None:
    run.start(0, step=0, world_size=1)
    run.train(1, 30)
    run.save(30, write_s=4)
    stall = {one.key: one for one in read(run, alive=True).assumptions}["checkpoint.save_stall_s"].measured
    run.event("retuned", every_steps=12, slowdown=1.5)
    found = read(run, alive=True)
    slowed = {one.key: one for one in found.assumptions}["checkpoint.save_stall_s"].measured
    assert stall is not None and found.durable_s.median is not None
    assert slowed == pytest.approx(stall + 0.5 * found.durable_s.median)


def test_torn_lines_and_strange_ones_are_skipped(run: Run) -> None:
    interrupted_twice(run)
    whole = invoke(run, "--json").output
    for strange in ('{"time": 5', "[1, 2]", "null", '"text"', '{"event": "stopped"}', '{"attempt": null, "time": 3}'):
        run.write("ledger", strange + "\n")
        run.write("metrics", strange + "\n")
    run.write("metrics", '{"attempt": 3, "step": "x", "loss": 1.0}\n{"attempt": 3, "step": 0}\n{"step": 2, "lo')
    assert invoke(run, "--json").output == whole


def test_an_empty_run_is_said_in_one_line(run: Run) -> None:
    result = invoke(run)
    assert result.exit_code == 1
    assert result.output.startswith("nothing recorded yet: ")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("part", ["started", "metrics", "ledger"])
def test_a_run_that_has_only_begun_is_reported(run: Run, part: str, tmp_path: Path) -> None:
    run.start(0, step=0, world_size=1)
    if part != "started":
        run.train(1, 1)
        run.save(1, committed=False)
    if part == "metrics":
        (run.run_dir / "ledger.jsonl").unlink()
    if part == "ledger":
        (run.run_dir / "metrics.jsonl").unlink()
    result = invoke(run, "--plot", str(tmp_path / "run.png"))
    assert result.exit_code == 0, result.output
    assert "running" in result.output
    assert "nan" not in result.output


def test_json_has_keys_that_stay(run: Run) -> None:
    interrupted_twice(run)
    result = invoke(run, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert set(found) == {
        "run", "directory", "state", "last_step", "steps", "attempts", "interruptions", "mtbi", "seconds", "badput",
        "saves", "throughput", "interval", "assumptions", "quarantined", "suggestions",
    }  # fmt: skip
    assert found["state"] == "finished"
    assert found["last_step"] == 200
    assert found["interruptions"]["by_kind"]["killed"] == {
        "count": 1, "lost_steps": 35, "lost_s": pytest.approx(35), "recovery_s": pytest.approx(60), "flushed": 0,
    }  # fmt: skip
    assert set(found["interruptions"]["by_kind"]) == {"reclaimed", "killed", "interrupted", "crashed"}
    assert set(found["badput"]) == {"measured", "promised", "expected", "target"}
    assert set(found["badput"]["measured"]) == {"stall", "lost", "restart", "total"}
    assert found["mtbi"] == {"measured_s": None, "assumed_s": 200.0, "over": "2 interruptions"}
    assert found["saves"]["committed"] == 4
    assert {one["world_size"]: one["units_per_s"] for one in found["throughput"]["by_world_size"]} == {
        8: pytest.approx(UNITS), 4: pytest.approx(UNITS / 2),
    }  # fmt: skip


def test_the_table_can_be_read(run: Run) -> None:
    interrupted_twice(run)
    result = invoke(run)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "demo: finished; step 200 of 200, 3 attempts, 6.58 min from the first start"
    assert "killed             1          35     35.0 s    60.0 s        0 of 1" in lines
    assert max(map(len, lines)) <= 120


def test_many_attempts_are_summed_up(run: Run) -> None:
    for number in range(300):
        run.start(5, step=number * 2, world_size=1)
        run.train(number * 2 + 1, number * 2 + 4)
        run.save(number * 2 + 2)
    found = read(run, alive=True)
    assert len(found.run.interruptions) == 299
    assert sum(one.lost_steps for one in found.run.interruptions) == 299 * 2
    text = invoke(run).output
    assert "and 287 earlier ones" in text
    assert len(text.splitlines()) < 70


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_drawn(run: Run, suffix: str, tmp_path: Path) -> None:
    interrupted_twice(run)
    path = tmp_path / f"run{suffix}"
    result = invoke(run, "--plot", str(path))
    assert result.exit_code == 0, result.output
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in content


@pytest.mark.parametrize("name", ["run.pdf", "run", "missing/run.png"])
def test_a_picture_that_cannot_be_drawn_is_one_line(run: Run, name: str, tmp_path: Path) -> None:
    interrupted_twice(run)
    result = invoke(run, "--plot", str(tmp_path / name))
    assert result.exit_code == 78
    assert "--plot" in result.output.splitlines()[-1]


def test_the_seconds_of_an_earlier_version_follow_from_the_sequence_length_of_its_checkpoints(run: Run) -> None:
    from trainer.checkpoint import commit

    directory = run.run_dir / "step_00000050"
    directory.mkdir()
    (directory / ".metadata").write_bytes(b"m")
    sums = {".metadata": commit.FileSum(1, commit.ALGORITHM, "0")}
    made = commit.Commit(directory, 50, 1600, 1, 8, 0.0, {"data.sequence_length": 512}, "2.13.0", "", sums)
    (directory / commit.COMMIT).write_bytes(commit.encode(made))
    run.start(0, step=0, world_size=8)
    for step in range(1, 51):
        line = {"step": step, "loss": 2.0, "samples": step * 32, "tokens_per_s": 32 * 256, "attempt": 1}
        run.write("metrics", line)
    found = json.loads(invoke(run, "--json").output)
    assert next(one for one in found["assumptions"] if one["key"] == "checkpoint.step_time_s")["measured"] == 2.0


def train(settings: list[str]) -> object:
    """`python -m trainer train`. Returns its exit code."""
    try:
        main(["train", *settings])
    except SystemExit as end:
        return end.code
    return None


def test_a_run_without_a_launcher_that_ends_well_is_not_killed(
    ranks: Callable[..., list[object]], tmp_path: Path
) -> None:
    """Two starts of a small run by `train`, each exit 0."""
    settings = [
        f"checkpoint.dir={tmp_path}", "run.name=alone", "volume.allow_ephemeral=true", "model.layers=1",
        "model.width=16", "model.heads=2", "data.sequence_length=8", "data.global_batch=2", "data.micro_batch=2",
        f"data.path={tmp_path / 'tokens.npy'}", "train.eval_every_steps=0", "logging.tensorboard=false",
    ]  # fmt: skip
    np.save(tmp_path / "tokens.npy", np.arange(400, dtype=np.uint8) % 40)
    for steps in (2, 4):
        assert ranks(1, train, [*settings, f"train.steps={steps}"]) == [0]
    result = CliRunner().invoke(main, ["report", "--json", *settings, "train.steps=4"])
    found = json.loads(result.output)
    assert (found["state"], found["last_step"]) == ("finished", 4)
    assert found["interruptions"]["count"] == 0
    assert found["mtbi"]["measured_s"] is None
    assert [one["reason"] for one in found["attempts"]] == ["finished", "finished"]
    events = [event.event for event in read_events(tmp_path / "alone")]
    assert events[0] == "started" and events[-2:] == ["stopped", "finished"]
