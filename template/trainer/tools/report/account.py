"""What interruptions and saves have cost a run: where its time went, and its assumptions beside what it measured.

Steps that a later attempt did again are lost work; the time between two attempts is restart, or a pause where a person
stopped the run; while a save is copied training stands still, between two steps.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer import ledger
from trainer.checkpoint.commit import complete
from trainer.config.settings import CheckpointConfig, Config
from trainer.interval import Badput, badput
from trainer.ledger import KILLED, Event, read_events
from trainer.steps import Step, read_steps
from trainer.tools.report.history import INTERRUPTED, RECLAIMED, History, Save, median, reconstruct
from trainer.wording import counted

_OFF = 1.5  # an assumption is off when the measurement is this factor away


@dataclass(frozen=True)
class Spread:
    """Figures of one latency, in seconds; None where there is nothing to measure."""

    count: int
    median: float | None
    p95: float | None
    largest: float | None
    first: float | None  # median over the first saves of the attempts
    steady: float | None  # median over the others


@dataclass(frozen=True)
class Seconds:
    """Where the time went; the parts add up to `elapsed`."""

    productive: float
    stall: float
    lost: float
    restart: float
    paused: float  # stopped by a person
    other: float  # evaluation, the first start, the last save
    elapsed: float

    @property
    def meant(self) -> float:
        """The run was meant to train."""
        return self.elapsed - self.paused

    def share(self, part: float) -> float:
        return part / self.meant if self.meant else 0.0


@dataclass(frozen=True)
class Assumption:
    """A figure of the startup config beside what the run measured."""

    key: str
    assumed: float
    measured: float | None
    over: str  # what it was measured over
    off: bool


@dataclass(frozen=True)
class Account:
    """Everything that a report says."""

    run: History
    last_step: int
    seconds: Seconds
    badput: dict[str, Badput]  # measured; promised: assumed figures, configured interval; expected: measured, current
    assumptions: list[Assumption]
    stall_s: Spread
    write_s: Spread
    durable_s: Spread
    throughput: list[dict[str, Any]]  # world_size, steps made on that many ranks, units_per_s (median)
    unit: str  # of what the task counts
    units_per_s: float | None  # of the newest steps
    goodput_units_per_s: float | None  # units that count over the time that the run was meant to train
    current_steps: int  # between two saves


def read_account(config: Config, alive: bool = True) -> Account:
    """The account of the run that `config` names, see `account`."""
    # An override of the sequence length is in the checkpoints, not in the files.
    newest = next(iter(complete(config.run_dir)), None)
    given = getattr(config.data, "sequence_length", 0)
    length = newest.fingerprint.get("data.sequence_length", given) if newest else given
    steps = read_steps(config.run_dir, length)
    return account(read_events(config.run_dir), steps, config.checkpoint, alive=alive)


def account(
    events: Sequence[Event], steps: Sequence[Step], settings: CheckpointConfig, *, alive: bool = True
) -> Account:
    """Add up a run.

    Args:
        events: of the ledger, attempt by attempt.
        steps: of the metrics, including those that a later attempt repeated.
        alive: whether an attempt whose end was not recorded may still be running.
    """
    run = reconstruct(events, steps, settings.every_steps, alive)
    seconds = _seconds(run)
    current_steps = _current_interval(run) or settings.every_steps
    assumptions = _assumptions(run, settings, seconds)
    best_known = (one.assumed if one.measured is None else one.measured for one in assumptions)
    units = sum(one.units_per_s * one.seconds for one in run.counting)
    return Account(
        run=run,
        last_step=max((one.step for one in run.counting[-1:] or run.ends), default=0),
        seconds=seconds,
        badput={
            "measured": Badput(*map(seconds.share, (seconds.stall, seconds.lost, seconds.restart))),
            "promised": badput(settings.every_steps, *(one.assumed for one in assumptions)),
            "expected": badput(current_steps, *best_known),
        },
        assumptions=assumptions,
        stall_s=spread(run.saves, "stall_s"),
        write_s=spread(run.saves, "write_s"),
        durable_s=spread(run.saves, "durable_s"),
        throughput=_throughput(run),
        unit=next((event.unit for event in reversed(events) if event.unit), "tokens"),
        units_per_s=median([one.units_per_s for one in run.counting[-20:]]),
        goodput_units_per_s=units / seconds.meant if seconds.meant and units else None,
        current_steps=current_steps,
    )


def _seconds(run: History) -> Seconds:
    elapsed = max(one.end for one in run.attempts) - run.attempts[0].start if run.attempts else 0.0
    trained = [(one, end) for one, end in zip(run.attempts, run.ends, strict=True) if one.last_step is not None]
    lost = sum(end.lost_s for _, end in trained)
    restart = sum(end.recovery_s or 0.0 for _, end in trained)
    paused = sum(end.paused_s for _, end in trained)
    kept = {end.attempt: end.kept_step for _, end in trained}
    # A stall before work that was lost is lost work.
    stall = sum(save.stall_s or 0.0 for save in run.saves if (save.step or 0) <= kept.get(save.attempt, math.inf))
    if run.typical_s is not None:
        productive = sum(one.seconds for one in run.counting) - sum(one.startup_step_s for one in run.attempts)
    else:
        productive = sum(one.end - one.trains for one, _ in trained) - stall - lost
    left = max(0.0, elapsed - stall - lost - restart - paused)
    productive = min(max(0.0, productive), left)
    parts = (productive, stall, lost, restart, paused, left - productive)
    return Seconds(*parts, elapsed=sum(parts))


def spread(saves: Iterable[Save], name: str) -> Spread:
    """The figures of one latency (`stall_s`, `write_s`, `durable_s`) over all saves that have it."""
    measured = [(value, save.first) for save in saves if (value := getattr(save, name)) is not None]
    values = [value for value, _ in measured]
    return Spread(
        count=len(values),
        median=median(values),
        p95=statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else median(values),
        largest=max(values, default=None),
        first=median([value for value, first in measured if first]),
        steady=median([value for value, first in measured if not first]),
    )


def _current_interval(run: History) -> int | None:
    """The newest attempt's interval: what it was retuned to, else the distance of its saves, where that is known."""
    newest = max((one.attempt for one in run.attempts if one.last_step is not None), default=0)
    if mine := [change for change in run.changes if change.attempt == newest]:
        return mine[-1].every_steps
    steps = [save.step for save in run.saves if save.attempt == newest and save.step is not None]
    distances = [after - before for before, after in itertools.pairwise(steps) if after > before]
    return Counter(distances).most_common(1)[0][0] if len(distances) >= 2 else None


def _assumptions(run: History, settings: CheckpointConfig, seconds: Seconds) -> list[Assumption]:
    """MTBI, step time, save time, stall and restart time, in the order in which `interval.badput` takes them."""
    interruptions = sum(one.reason in (RECLAIMED, KILLED) for one in ledger.lifetimes(run.events).values())
    mtbi_s, mtbi_over = ledger.mtbi_s(run.events), counted(interruptions, "interruption")
    trained_s = seconds.meant - seconds.restart
    if interruptions == 0 and trained_s > 3 * settings.mtbi_s:  # by chance in one of 20 runs
        mtbi_s, mtbi_over = trained_s, "a run without one: at least that"
    stall_s, durable_s = spread(run.saves, "stall_s"), spread(run.saves, "durable_s")
    stalled_s = stall_s.median if stall_s.steady is None else stall_s.steady
    if stalled_s is not None and durable_s.median is not None:  # as the run itself reckons, see `interval.retuned`
        slowdown = next((event.slowdown for event in reversed(run.events) if event.slowdown is not None), 1.0)
        stalled_s += max(0.0, slowdown - 1) * durable_s.median
    restarts = [one.recovery_s for one in run.interruptions if one.recovery_s is not None and one.kind != INTERRUPTED]
    # A stall or restart so short that no interval depends on it is no reason to edit a file.
    short_s = 0.01 * settings.mtbi_s
    short_stall_s = min(short_s, 0.1 * (run.typical_s or settings.step_time_s))
    found = []
    for name, measured, over, matters_s in (
        ("mtbi_s", mtbi_s, mtbi_over, 0.0),
        ("step_time_s", run.typical_s, counted(len(run.steps), "step"), 0.0),
        ("save_time_s", durable_s.median, counted(durable_s.count, "save"), 0.0),
        ("save_stall_s", stalled_s, counted(stall_s.count, "save"), short_stall_s),
        ("restart_time_s", median(restarts), counted(len(restarts), "restart"), short_s),
    ):
        assumed = getattr(settings, name)
        near = measured is None or assumed / _OFF <= measured <= assumed * _OFF
        off = not near and max(assumed, measured) > matters_s
        found.append(Assumption(f"checkpoint.{name}", assumed, measured, over, off))
    return found


def _throughput(run: History) -> list[dict[str, Any]]:
    sizes = {one.attempt: one.world_size for one in run.attempts}
    speeds: defaultdict[int | None, list[float]] = defaultdict(list)
    for step in run.counting:
        if step.units_per_s:
            speeds[sizes.get(step.attempt)].append(step.units_per_s)
    return [
        {"world_size": size, "steps": len(values), "units_per_s": statistics.median(values)}
        for size, values in speeds.items()
    ]
