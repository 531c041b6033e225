"""The append-only record of everything that happened to a run: `ledger.jsonl`, one JSON object a line.

Who writes what: the launcher of node 0 `reclaim_noticed`, `heartbeat`, `stopped` and `finished`; rank 0 the rest; the
checkpoint daemon `save_committed`. (A trainer without a launcher writes `stopped` and `finished` itself.) Every line
is one O_APPEND write, so that several processes never mix their lines. Object-store mounts cannot append: there each
writer keeps a local file and uploads it whole as `ledger.<attempt>.<writer>.jsonl` when something worth keeping
happened. `metrics.jsonl` works the same way through `Records`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.storage import mount

log = logging.getLogger(__name__)

# Events after which a segment is uploaded: what the next start or a report needs to know.
_UPLOADED_AFTER = {"attempt_started", "save_committed", "save_failed", "reclaim_noticed", "stopped", "finished"}
_MOST_WAITING = 10_000  # lines
UNINTENDED = "killed"  # how an attempt ended that nobody recorded the end of


class Records:
    """One writer's end of `<run_dir>/<name>.jsonl`. Lines that the volume refuses are kept, and written once it can.

    Args:
        append: whether the mount can append; None looks at it.
    """

    def __init__(self, run_dir: Path, name: str, attempt: int, append: bool | None = None) -> None:
        self.path = run_dir / f"{name}.jsonl"
        self._append = mount.inspect(run_dir).appends if append is None else append
        self._segment = run_dir / f"{name}.{attempt:08d}.{os.getpid()}.jsonl"
        self._descriptor: int | None = None
        self.waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._torn = False  # the file may end in a piece of a line
        self._local = None if self._append else Path(tempfile.mkdtemp(prefix="records_")) / self._segment.name

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line, after those that wait. Raises OSError: it waits too."""
        self.waiting.append(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._write_waiting()

    def _write_waiting(self) -> None:
        if self._descriptor is None:
            self._descriptor = self._open()
        while self.waiting:
            line = b"\n" * self._torn + self.waiting[0]
            written = os.write(self._descriptor, line)
            self._torn = written < len(line)
            if self._torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._local or self.path))
            self.waiting.popleft()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._local or self.path, flags, 0o644)
        size = os.fstat(descriptor).st_size
        self._torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # keep it apart from the next line
        return descriptor

    def upload(self) -> None:
        """Where the mount cannot append: put the whole segment there. Raises OSError."""
        if self._local is None or not self._local.exists():
            return
        temporary = self._segment.with_suffix(".tmp")
        temporary.write_bytes(self._local.read_bytes())
        temporary.replace(self._segment)

    def close(self) -> None:
        """Write and upload what is left, and close. Raises OSError."""
        try:
            if self.waiting:
                self._write_waiting()
            self.upload()
        finally:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def read_records(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Every record of `<name>.jsonl` and its segments; lines that are torn are skipped."""
    records: list[dict[str, Any]] = []
    for path in [run_dir / f"{name}.jsonl", *sorted(run_dir.glob(f"{name}.[0-9]*.jsonl"))]:
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
    return records


class Ledger:
    """Writes events of one attempt; a disk that refuses them is said once and never stops training."""

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

    def close(self) -> None:
        try:
            self._records.close()
        except OSError as error:
            log.warning("the ledger %s could not be closed (%s)", self._records.path, error)


def read_ledger(run_dir: Path) -> list[dict[str, Any]]:
    """All events of a run, attempt by attempt in the order of their time (clocks of two machines may differ).

    What has no attempt, time or name, or a step that is none (written by hand, damaged), is no event.
    """
    events = [
        event
        for event in read_records(run_dir, "ledger")
        if isinstance(event.get("attempt"), int)
        and isinstance(event.get("time"), int | float)
        and isinstance(event.get("event"), str)
        and isinstance(event.get("step"), int | None)
    ]
    return sorted(events, key=lambda event: (event["attempt"], event["time"]))


def attempts(events: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Each attempt's `start` and `end` (Unix seconds) and why it ended.

    `reason` is that of its `stopped` event; `killed` where there is none although a later attempt began; None for
    the attempt that may still be running.
    """
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        number, moment = event.get("attempt"), event.get("time")
        if not isinstance(number, int) or not isinstance(moment, int | float):
            continue
        one = found.setdefault(number, {"start": moment, "end": moment, "reason": None})
        one["start"], one["end"] = min(one["start"], moment), max(one["end"], moment)
        if event.get("event") == "stopped":
            one["reason"] = event.get("reason")
        elif event.get("event") == "finished":
            one["reason"] = "finished"
    newest = max(found, default=0)
    for number, one in found.items():
        if one["reason"] is None and number != newest:
            one["reason"] = UNINTENDED
    return dict(sorted(found.items()))


def mtbi_s(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean time between interruptions in seconds of running, or None before there were three.

    Reclaims and kills count; Ctrl-C, a finish, a crash of the program or a changed configuration do not.
    """
    ended = attempts(events)
    interruptions = sum(one["reason"] in ("reclaimed", UNINTENDED) for one in ended.values())
    if interruptions < 3:
        return None
    return float(sum(one["end"] - one["start"] for one in ended.values()) / interruptions)


def save_time_s(events: Iterable[Mapping[str, Any]], newest: int = 5) -> float | None:
    """Seconds from `save_started` until `save_committed`: the largest of the `newest` saves, None before the first."""
    started: dict[tuple[Any, Any], float] = {}
    took: list[float] = []
    for event in events:
        key = (event.get("attempt"), event.get("step"))
        if event.get("event") == "save_started":
            started[key] = event["time"]
        elif event.get("event") == "save_committed" and key in started:
            took.append(event["time"] - started[key])
    return max(took[-newest:], default=None)
