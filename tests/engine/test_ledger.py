"""The record of a run: lines never mix or vanish, and what is worked out from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainer
from trainer.ledger import Event, Ledger, lifetimes, mtbi_s, read_events, save_time_s
from trainer.records import Records, read_records

PROJECT = Path(trainer.__file__).resolve().parents[1]


def test_an_event_has_its_time_and_attempt(tmp_path: Path) -> None:
    Ledger(tmp_path, 3).record("save_started", step=10)
    (event,) = read_events(tmp_path)
    assert (event.event, event.attempt, event.step, event.stall_s) == ("save_started", 3, 10, None)
    assert event.time > 1e9


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from trainer.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), int(sys.argv[2]))
for number in range(300):
    ledger.record("step_time", number=number, padding="x" * 500)
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(one)], cwd=PROJECT) for one in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    events = read_events(tmp_path)
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == len(events) == 900


def test_a_torn_last_line_is_skipped_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    Ledger(tmp_path, 1).record("heartbeat")
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"time": 12345, "att')
    Ledger(tmp_path, 2).record("heartbeat")
    assert [event.attempt for event in read_events(tmp_path)] == [1, 2]


def test_a_disk_that_refuses_is_said_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = Ledger(tmp_path / "missing", 1, append=True)
    broken.record("heartbeat")
    broken.record("heartbeat")
    assert len(caplog.records) == 1 and "training goes on" in caplog.text


def test_without_append_each_writer_uploads_a_segment_that_readers_see(tmp_path: Path) -> None:
    Ledger(tmp_path, 1, append=True).record("heartbeat")
    segment = Ledger(tmp_path, 2, append=False)
    segment.record("step_time")
    assert len(read_events(tmp_path)) == 1
    segment.record("save_committed", step=5)
    assert [event.event for event in read_events(tmp_path)] == ["heartbeat", "step_time", "save_committed"]
    segment.record("step_time")
    segment.close()
    assert len(read_events(tmp_path)) == 4
    assert (tmp_path / "ledger.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize(
    "odd",
    [
        {"attempt": 1, "time": 1},
        {"attempt": 1, "time": 1, "event": "x", "step": [1]},
        {"attempt": 1, "time": 1, "event": "x", "step": True},
        {"attempt": None, "time": 1, "event": "x"},
        {"attempt": 1, "time": float("nan"), "event": "x"},
        {"attempt": "1", "time": 1, "event": "x"},
    ],
)
def test_what_is_no_event_is_passed_over(tmp_path: Path, odd: dict[str, Any]) -> None:
    Ledger(tmp_path, 1, append=True).record("save_started", step=5)
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write(json.dumps(odd) + "\n")
    assert [event.step for event in read_events(tmp_path)] == [5]


def test_records_are_lines_of_json(tmp_path: Path) -> None:
    records = Records(tmp_path, "metrics", 1)
    records.write({"step": 1, "loss": 0.5})
    records.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 0.5}
    assert read_records(tmp_path, "metrics") == [{"step": 1, "loss": 0.5}]


def _attempt(number: int, start: float, end: float, reason: str | None) -> list[Event]:
    last = Event(end, number, "stopped" if reason else "heartbeat", reason=reason)
    return [Event(start, number, "attempt_started"), last]


def test_an_attempt_without_an_end_was_killed_unless_it_is_the_newest() -> None:
    events = _attempt(1, 0, 100, None) + _attempt(2, 200, 250, "reclaimed") + _attempt(3, 300, 310, None)
    assert [one.reason for one in lifetimes(events).values()] == ["killed", "reclaimed", None]


def test_mean_time_between_interruptions_counts_reclaims_and_kills_only() -> None:
    two = _attempt(1, 0, 100, None) + _attempt(2, 1000, 1200, "reclaimed")
    assert mtbi_s(two) is None
    others = _attempt(3, 2000, 2050, "interrupted") + _attempt(4, 3000, 3050, "crashed")
    assert mtbi_s(two + others) is None
    three = two + others + _attempt(5, 4000, 4200, "reclaimed") + _attempt(6, 5000, 5100, "finished")
    assert mtbi_s(three) == pytest.approx((100 + 200 + 50 + 50 + 200 + 100) / 3)


def test_the_time_of_a_save_is_the_longest_of_the_newest() -> None:
    events = []
    for number, took in enumerate([50, 1, 2, 3, 2, 1]):
        events += [
            Event(100 * number, 1, "save_started", step=number),
            Event(100 * number + took, 1, "save_committed", step=number),
        ]
    assert save_time_s(events) == 3
    assert save_time_s(events[:1]) is None
