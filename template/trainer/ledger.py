"""What happened to a run: `ledger.jsonl`, one event a line.

Who writes what: the launcher of node 0 `reclaim_noticed`, `heartbeat`, `stopped` and `finished`; rank 0 the rest; the
checkpoint daemon `save_committed`. A trainer without a launcher writes `started`, `stopped` and `finished` itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.outcome import Reason
from trainer.records import Records, parse, read_records

log = logging.getLogger(__name__)

# Events after which a segment is uploaded: what the next start or a report needs to know.
_UPLOADED_AFTER = {"attempt_started", "save_committed", "save_failed", "reclaim_noticed", "stopped", "finished"}
KILLED = "killed"  # the reason of an attempt whose end was not recorded


class Ledger:
    """Writes events of one attempt; a disk that refuses them is reported once and never stops training."""

    def __init__(self, run_dir: Path, attempt: int, append: bool | None = None) -> None:
        self.attempt = attempt
        self._records = Records(run_dir, "ledger", attempt, append)
        self._warned = False

    def record(self, event: str, **fields: Any) -> None:
        """Append `event` with the time (Unix seconds), the attempt and `fields`."""
        try:
            self._records.write({"time": time.time(), "attempt": self.attempt, "event": event, **fields})
            if event in _UPLOADED_AFTER:
                self._records.upload()
        except (OSError, TypeError, ValueError) as error:
            if not self._warned:
                log.warning("the ledger %s cannot be written (%s); training goes on", self._records.path, error)
            self._warned = True

    def record_end(self, reason: str, step: int, message: str = "") -> None:
        """The attempt has ended after `step`."""
        self.record("stopped", step=step, reason=reason, **({"message": message} if message else {}))
        if reason == Reason.FINISHED:
            self.record("finished", step=step)

    def close(self) -> None:
        try:
            self._records.close()
        except OSError as error:
            log.warning("the ledger %s could not be closed (%s)", self._records.path, error)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the ledger; what its kind of event does not have is None."""

    time: float  # Unix seconds
    attempt: int
    event: str  # its kind
    step: int | None = None
    world_size: int | None = None
    unit: str | None = None  # what the task counts
    reason: str | None = None
    source: str | None = None
    decision: str | None = None
    warning: str | None = None
    stall_s: float | None = None
    write_s: float | None = None
    bytes: int | None = None
    lost_steps: int | None = None
    lost_s: float | None = None
    load_s: float | None = None
    every_steps: int | None = None
    before: int | None = None
    step_time_s: float | None = None
    save_time_s: float | None = None
    save_stall_s: float | None = None
    slowdown: float | None = None
    mtbi_s: float | None = None


def read_events(run_dir: Path) -> list[Event]:
    """All events of a run, attempt by attempt in the order of their time (clocks of two machines may differ).

    Lines that are not events (written by hand, damaged) are skipped.
    """
    events = (parse(Event, record) for record in read_records(run_dir, "ledger"))
    return sorted(filter(None, events), key=lambda event: (event.attempt, event.time))


@dataclass
class Lifetime:
    """The time of an attempt's first and last event, and why it ended."""

    start: float  # Unix seconds
    end: float
    reason: str | None = None  # of its `stopped`; `killed` where there is none; None: it may still be running


def lifetimes(events: Iterable[Event]) -> dict[int, Lifetime]:
    """By attempt, in their order. Only the newest attempt may still be running."""
    found: dict[int, Lifetime] = {}
    for event in events:
        one = found.setdefault(event.attempt, Lifetime(event.time, event.time))
        one.start, one.end = min(one.start, event.time), max(one.end, event.time)
        if event.event in ("stopped", "finished"):
            one.reason = event.reason if event.event == "stopped" else "finished"
    newest = max(found, default=0)
    for number, one in found.items():
        if one.reason is None and number != newest:
            one.reason = KILLED
    return dict(sorted(found.items()))


def mtbi_s(events: Iterable[Event]) -> float | None:
    """Mean time between interruptions in seconds of running, or None before there were three.

    Reclaims and kills count; Ctrl-C, a finish, a crash of the program or a changed configuration do not.
    """
    ended = lifetimes(events).values()
    interruptions = sum(one.reason in (Reason.RECLAIMED, KILLED) for one in ended)
    return sum(one.end - one.start for one in ended) / interruptions if interruptions >= 3 else None


def save_time_s(events: Iterable[Event], newest: int = 5) -> float | None:
    """Seconds from `save_started` until `save_committed`: the largest of the `newest` saves, None before the first."""
    started: dict[tuple[int, int | None], float] = {}
    took: list[float] = []
    for event in events:
        key = event.attempt, event.step
        if event.event == "save_started":
            started[key] = event.time
        elif event.event == "save_committed" and key in started:
            took.append(event.time - started[key])
    return max(took[-newest:], default=None)
