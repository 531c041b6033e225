"""The steps of a run as `metrics.jsonl` has them, and the rule of which of them count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.ledger import Event, read_events
from trainer.records import parse, read_records


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the metrics."""

    attempt: int
    step: int  # completed optimizer steps, so from 1 on
    seconds: float = 0.0  # the step took; 0: not known
    units_per_s: float = 0.0  # of what the task counts
    samples: int = 0  # consumed so far
    loss: float = math.nan
    lr: float = math.nan
    grad_norm: float = math.nan
    batch_hash: str = ""


def read_steps(run_dir: Path, units_per_sample: float = 0.0) -> list[Step]:
    """Every step that was recorded, including those that a later attempt repeated.

    Args:
        units_per_sample: of a run whose lines have no `seconds`.
    """
    lines = (_dated(record, units_per_sample) for record in read_records(run_dir, "metrics"))
    return [step for line in lines if (step := parse(Step, line)) is not None and step.step > 0]


def _dated(record: Mapping[str, Any], units_per_sample: float) -> Mapping[str, Any]:
    """A line of an earlier version, which has `tokens_per_s` alone, with the fields of today.

    Its seconds contain the stall of a save and an evaluation, which today's leave out.
    """
    if "tokens_per_s" not in record or "seconds" in record:
        return record
    try:
        speed = float(record["tokens_per_s"])
        seconds = record["samples"] / record["step"] * units_per_sample / speed
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return record
    return {**record, "units_per_s": speed, "seconds": seconds}


def counting(steps: Iterable[Step], starts: Mapping[int, int]) -> list[Step]:
    """The steps that count, in their order: those after which no later attempt started at a lower step.

    Args:
        starts: attempt -> the step it started from; for other attempts it follows from their steps.
    """
    steps, starts = list(steps), dict(starts)
    for one in steps:
        starts[one.attempt] = min(one.step - 1, starts.get(one.attempt, one.step))
    last: dict[int, float] = {}  # attempt -> the last step of it that counts
    end = math.inf
    for attempt in sorted(starts, reverse=True):
        last[attempt] = end
        end = min(end, starts[attempt])
    return sorted((one for one in steps if one.step <= last[one.attempt]), key=lambda one: one.step)


def starts(events: Iterable[Event]) -> dict[int, int]:
    """Attempt -> the step it started from, of those whose events say so."""
    named = (one for one in events if one.event in ("resumed", "attempt_started"))
    return {one.attempt: one.step for one in named if one.step is not None}


def read_counting(run_dir: Path, units_per_sample: float = 0.0) -> list[Step]:
    """The steps of a run that count, in their order."""
    return counting(read_steps(run_dir, units_per_sample), starts(read_events(run_dir)))
