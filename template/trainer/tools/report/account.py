"""What interruptions and saves have cost a run: a pure function of its ledger and its metrics.

Where the time went: an attempt trains from the end of its start-up to its last sign of life. Steps that a later
attempt did again are lost work; the time between two attempts is restart, or a pause where a person stopped the run;
a save's stall stands still inside a step. The first step of an attempt may take longer than the others (compilation,
warm-up); what it takes more is start-up too.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from trainer import ledger
from trainer.config.settings import CheckpointConfig
from trainer.interval import IntervalError, compute_interval, format_duration
from trainer.wording import counted

RECLAIMED, KILLED, INTERRUPTED, CRASHED = "reclaimed", ledger.UNINTENDED, "interrupted", "crashed"
KINDS = (RECLAIMED, KILLED, INTERRUPTED, CRASHED)
_BY_A_PERSON = ("interrupted", "finished", "config")  # what follows is a pause, not a restart
_OFF = 1.5  # an assumption is off when the measurement is this factor away

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks. Times are Unix seconds."""

    attempt: int
    start: float  # first sign of life
    trains: float  # start-up is over
    end: float
    reason: str | None  # None: running, or ended without a word
    world_size: int | None
    start_step: int | None  # step of the checkpoint it began from
    last_step: int | None  # None: it made none
    startup_step_s: float  # what its first step took longer than the others


@dataclass(frozen=True)
class Interruption:
    """The end of an attempt that trained and had not finished."""

    attempt: int
    kind: str  # one of KINDS
    time: float
    source: str  # what announced it, where something did
    decision: str  # what the launcher made of the time that was left
    step: int  # last step made
    lost_steps: int  # that had to be done again
    lost_s: float
    recovery_s: float | None  # until the first new step began; None: not yet
    flushed: bool  # nothing was lost: its last step was on disk
    save_in_flight: str | None  # the save under way when it came: committed, lost, or None


@dataclass(frozen=True)
class Save:
    """One save. Seconds are None where the ledger does not say."""

    attempt: int
    step: int | None
    first: bool  # of its attempt
    outcome: str  # committed, failed, lost (its attempt ended), running
    started: float | None = None
    stall_s: float | None = None  # training stood still
    write_s: float | None = None  # in the background
    durable_s: float | None = None  # from the start until committed
    bytes: int | None = None
    reason: str = ""


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
class Badput:
    """Shares of the time that the run was meant to train."""

    stall: float
    lost: float
    restart: float

    @property
    def total(self) -> float:
        return self.stall + self.lost + self.restart


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


@dataclass(frozen=True)
class Throughput:
    """Tokens per second on one number of ranks."""

    world_size: int | None
    steps: int
    tokens_per_s: float  # median


@dataclass(frozen=True)
class Change:
    """One change of the interval during the run."""

    time: float
    attempt: int
    step: int | None  # of the newest save then
    before: int
    every_steps: int
    step_time_s: float | None  # measured, as the others
    save_time_s: float | None
    save_stall_s: float | None
    mtbi_s: float | None
    warning: str


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

    last_step: int
    attempts: tuple[Attempt, ...]
    interruptions: tuple[Interruption, ...]
    saves: tuple[Save, ...]
    seconds: Seconds
    measured: Badput
    promised: Badput  # at the assumed figures and the configured interval
    expected: Badput  # at the measured figures and the current interval
    target: float
    assumptions: tuple[Assumption, ...]
    stall_s: Spread
    write_s: Spread
    durable_s: Spread
    throughput: tuple[Throughput, ...]
    tokens_per_s: float | None  # of the newest steps
    goodput_tokens_per_s: float | None  # tokens that count over the time that the run was meant to train
    configured_steps: int
    current_steps: int
    changes: tuple[Change, ...]
    counted: frozenset[tuple[int, int]]  # (attempt, step) of the lines of the metrics that no later attempt rewound


def account(
    events: Sequence[Record],
    lines: Sequence[Record],
    settings: CheckpointConfig,
    *,
    sequence_length: int,
    alive: bool = True,
) -> Account:
    """Add up a run.

    Args:
        events: of the ledger, attempt by attempt.
        lines: of the metrics, those that a later attempt rewound too.
        sequence_length: tokens of a sample.
        alive: whether an attempt whose end nobody recorded may still be running.
    """
    events = [event for event in events if _is_number(event.get("attempt")) and _is_number(event.get("time"))]
    steps = _Steps(lines, sequence_length)
    attempts = _attempts(events, steps, alive)
    saves = _saves(events, {one.attempt: one for one in attempts}, alive)
    losses = _losses(events, attempts, saves, steps)
    interruptions = _interruptions(events, attempts, saves, losses)
    changes = tuple(_changes(events, settings.every_steps))
    seconds = _seconds(attempts, saves, losses, steps)
    current_steps = _current_interval(attempts, saves, changes) or settings.every_steps
    stall_s, write_s, durable_s = (spread(saves, name) for name in ("stall_s", "write_s", "durable_s"))
    recoveries = [one.recovery_s for one in interruptions if one.recovery_s is not None and one.kind != INTERRUPTED]
    assumptions = _assumptions(events, settings, steps, stall_s, durable_s, recoveries, seconds)
    found = {one.key: one.measured if one.measured is not None else one.assumed for one in assumptions}
    meant = seconds.elapsed - seconds.paused
    good_tokens = sum(steps.tokens[key] for key in steps.counted)
    made = [one.last_step for one in attempts if one.last_step is not None]
    return Account(
        last_step=max((step for _, step in steps.counted), default=max(made, default=0)),
        attempts=tuple(attempts),
        interruptions=tuple(interruptions),
        saves=tuple(saves),
        seconds=seconds,
        measured=Badput(*(part / meant if meant else 0.0 for part in (seconds.stall, seconds.lost, seconds.restart))),
        promised=predicted(
            settings.every_steps, settings.mtbi_s, settings.step_time_s, settings.save_time_s, settings.save_stall_s,
            settings.restart_time_s,
        ),
        expected=predicted(
            current_steps, found["checkpoint.mtbi_s"], found["checkpoint.step_time_s"],
            found["checkpoint.save_time_s"], found["checkpoint.save_stall_s"], found["checkpoint.restart_time_s"],
        ),
        target=settings.badput_target,
        assumptions=tuple(assumptions),
        stall_s=stall_s,
        write_s=write_s,
        durable_s=durable_s,
        throughput=tuple(_throughput(attempts, steps)),
        tokens_per_s=_median([steps.speed[key] for key in steps.counted[-20:]]),
        goodput_tokens_per_s=good_tokens / meant if meant and good_tokens else None,
        configured_steps=settings.every_steps,
        current_steps=current_steps,
        changes=changes,
        counted=frozenset(steps.counted),
    )  # fmt: skip


def predicted(
    every_steps: int, mtbi_s: float, step_time_s: float, save_time_s: float, save_stall_s: float, restart_time_s: float
) -> Badput:
    """What a save each `every_steps` steps costs by the formulas of `interval.py`, for any interval."""
    return Badput(
        stall=save_stall_s / (every_steps * step_time_s + save_stall_s),
        lost=(save_time_s + every_steps * step_time_s / 2) / mtbi_s,
        restart=restart_time_s / mtbi_s,
    )


def suggestions(found: Account, settings: CheckpointConfig, grace_s: float) -> list[str]:
    """What to change in the startup config, one line each; nothing where the assumptions hold."""
    lines = []
    off = [one for one in found.assumptions if one.off and one.measured is not None]
    values = {one.key.partition(".")[2]: one.assumed for one in found.assumptions}
    for one in off:
        value = float(f"{one.measured:.2g}")
        lines.append(f"{one.key}: {_plain(value)} instead of {_plain(one.assumed)} (measured over {one.over})")
        values[one.key.partition(".")[2]] = value
    if off:
        try:
            steps = compute_interval(**values, badput_target=settings.badput_target).save_interval_steps
        except IntervalError as error:
            lines.append(f"with what was measured {error}")
        else:
            if steps != settings.every_steps:
                lines.append(f"checkpoint.every_steps: {steps} instead of {settings.every_steps} follows from that")
            answers = [name for name in values if values[name] != getattr(settings, name)]
            data = " ".join(f"--data {name.removesuffix('_s')}={format_duration(values[name])}" for name in answers)
            lines.append(f"all of that at once: copier update --vcs-ref=:current: {data}")
    unsaved = [one for one in found.interruptions if one.kind == RECLAIMED and not one.flushed]
    if unsaved:
        took, lost = found.durable_s.median, sum(one.lost_steps for one in unsaved)
        lines.append(
            f"reclaim.grace_s: {counted(len(unsaved), 'reclaim')} lost {counted(lost, 'step')}; "
            + (f"a save takes {took:.1f} s, " if took else "")
            + f"the grace period is {grace_s:g} s: raise it on the platform and here where that is possible"
        )
    if failed := sum(save.outcome == "failed" for save in found.saves):
        lines.append(
            f"{failed} saves failed: their reasons are above, the disk and `python -m trainer doctor` know more"
        )
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Steps


class _Steps:
    """The lines of the metrics by (attempt, step), and which of them count."""

    def __init__(self, lines: Iterable[Record], sequence_length: int) -> None:
        self.tokens: dict[tuple[int, int], float] = {}
        self.speed: dict[tuple[int, int], float] = {}
        for line in lines:
            step, speed, samples = line.get("step"), line.get("tokens_per_s"), line.get("samples")
            if not (_is_number(line.get("attempt")) and _is_number(step) and step > 0):
                continue
            key = int(line["attempt"]), int(step)
            self.tokens[key] = samples / step * sequence_length if _is_number(samples) else 0.0
            self.speed[key] = speed if _is_number(speed) and speed > 0 else 0.0
        self.by_attempt: dict[int, list[int]] = {}
        for attempt, step in sorted(self.tokens):
            self.by_attempt.setdefault(attempt, []).append(step)
        self.counted: list[tuple[int, int]] = []  # in the order of steps; `rewind` decides
        self.rewound: set[tuple[int, int]] = set()

    def seconds(self, key: tuple[int, int]) -> float:
        return self.tokens[key] / self.speed[key] if self.speed[key] else 0.0

    def typical_s(self, attempt: int | None = None) -> float | None:
        """Median seconds of a step, the first one of each attempt left out."""
        keys = [
            (one, step)
            for one, steps in self.by_attempt.items()
            if attempt in (None, one)
            for step in (steps[1:] or steps)
        ]
        return _median([seconds for key in keys if (seconds := self.seconds(key))])

    def rewind(self, starts: Mapping[int, int]) -> None:
        """Find the lines that count: those after whose step no later attempt started (attempt -> its start step)."""
        end = math.inf
        counted = []
        for attempt in sorted(starts.keys() | self.by_attempt.keys(), reverse=True):
            steps = self.by_attempt.get(attempt, [])
            counted += [(attempt, step) for step in steps if step <= end]
            end = min(end, starts.get(attempt, math.inf), (steps[0] - 1) if steps else math.inf)
        self.counted = sorted(counted, key=lambda key: key[1])
        self.rewound = self.tokens.keys() - set(counted)


def _attempts(events: Sequence[Record], steps: _Steps, alive: bool) -> list[Attempt]:
    began = {event["attempt"]: event for event in events if event.get("event") == "attempt_started"}
    starts = {number: int(event["step"]) for number, event in began.items() if _is_number(event.get("step"))}
    for number, made in steps.by_attempt.items():
        starts.setdefault(number, made[0] - 1)
    steps.rewind(starts)
    ended = ledger.attempts(events)
    stopped = {event["attempt"]: event["time"] for event in events if event.get("event") == "stopped"}
    newest = max(ended.keys() | steps.by_attempt.keys(), default=0)
    found: list[Attempt] = []
    for number in sorted(ended.keys() | steps.by_attempt.keys()):
        before = found[-1].end if found else 0.0
        span = ended.get(number, {"start": before, "end": before, "reason": None if number == newest else KILLED})
        made = steps.by_attempt.get(number, [])
        trains = began[number]["time"] if number in began else span["start"]
        end = max(stopped.get(number, span["end"]), trains)
        if span["reason"] in (None, KILLED):  # nobody wrote down when: it lived at least for its steps
            end = max(end, trains + sum(steps.seconds((number, step)) for step in made))
            following = min((one["start"] for other, one in ended.items() if other > number), default=math.inf)
            end = max(min(end, following), span["end"])
        reason = span["reason"]
        if reason is None and not alive:
            reason = KILLED
        typical = steps.typical_s(number)
        found.append(
            Attempt(
                attempt=number,
                start=span["start"],
                trains=trains,
                end=end,
                reason=reason,
                world_size=began[number].get("world_size") if number in began else None,
                start_step=starts.get(number),
                last_step=made[-1] if made else None,
                startup_step_s=max(0.0, steps.seconds((number, made[0])) - typical) if made and typical else 0.0,
            )
        )
    if not steps.by_attempt:  # a ledger alone: what it says of steps must do
        last = _last_steps(events)
        found = [Attempt(**{**asdict(one), "last_step": last.get(one.attempt)}) for one in found]
    return found


def _last_steps(events: Iterable[Record]) -> dict[int, int]:
    """Attempt -> the last step that its events name."""
    last: dict[int, int] = {}
    names = ("attempt_started", "save_started", "save_committed", "stopped", "finished")
    for event in events:
        if event.get("event") in names and _is_number(event.get("step")):
            last[event["attempt"]] = max(last.get(event["attempt"], 0), int(event["step"]))
    return last


# ---------------------------------------------------------------------------------------------------------------------
# Saves


def _saves(events: Sequence[Record], attempts: Mapping[int, Attempt], alive: bool) -> list[Save]:
    """Every save of the ledger, in its order."""
    found: list[dict[str, Any]] = []
    seen: dict[int, list[dict[str, Any]]] = {}  # attempt -> its saves
    for event in events:
        name = event.get("event")
        if name not in ("save_started", "save_staged", "save_committed", "save_failed"):
            continue
        attempt, step, time = event["attempt"], event.get("step"), event["time"]
        mine = seen.setdefault(attempt, [])
        # The writer's `save_committed` may come before the trainer's `save_staged`.
        same = next((one for one in mine[:-4:-1] if step in (None, one["step"])), None)
        if name == "save_started" or same is None:
            save = {"attempt": attempt, "step": step, "first": not mine, "outcome": None}
            found.append(save)
            mine.append(save)
        else:
            save = same
        if name == "save_started":
            save["started"] = time
        elif name == "save_staged":
            save["stall_s"] = _number(event.get("stall_s"))
        elif name == "save_committed":
            save["outcome"] = "committed"
            save["write_s"], save["bytes"] = _number(event.get("write_s")), event.get("bytes")
            save["durable_s"] = time - save["started"] if "started" in save else save["write_s"]
        else:
            save["outcome"], save["reason"] = "failed", str(event.get("reason", ""))
    newest = max(attempts, default=0)
    for save in found:
        ended = save["attempt"] != newest or not alive or attempts[newest].reason is not None
        save["outcome"] = save["outcome"] or ("lost" if ended else "running")
    return [Save(**save) for save in found]


def _by_attempt(saves: Iterable[Save]) -> dict[int, list[Save]]:
    found: dict[int, list[Save]] = {}
    for save in saves:
        found.setdefault(save.attempt, []).append(save)
    return found


def spread(saves: Iterable[Save], name: str) -> Spread:
    """The figures of one latency (`stall_s`, `write_s`, `durable_s`) over all saves that have it."""
    measured = [(value, save.first) for save in saves if (value := getattr(save, name)) is not None]
    values = [value for value, _ in measured]
    return Spread(
        count=len(values),
        median=_median(values),
        p95=quantile(values, 0.95),
        largest=max(values, default=None),
        first=_median([value for value, first in measured if first]),
        steady=_median([value for value, first in measured if not first]),
    )


def _current_interval(attempts: Sequence[Attempt], saves: Iterable[Save], changes: Sequence[Change]) -> int | None:
    """The newest attempt's interval: what it was retuned to, else the distance of its saves, where that is known."""
    newest = max((one.attempt for one in attempts if one.last_step is not None), default=0)
    if mine := [change for change in changes if change.attempt == newest]:
        return mine[-1].every_steps
    steps = [save.step for save in saves if save.attempt == newest and save.step is not None]
    distances = [after - before for before, after in itertools.pairwise(steps) if after > before]
    return Counter(distances).most_common(1)[0][0] if len(distances) >= 2 else None


# ---------------------------------------------------------------------------------------------------------------------
# Interruptions


@dataclass(frozen=True)
class _Loss:
    kept: int  # the last step that need not be done again
    steps: int
    seconds: float
    next: Attempt | None  # the attempt that trained next


def _losses(
    events: Sequence[Record], attempts: Sequence[Attempt], saves: Sequence[Save], steps: _Steps
) -> dict[int, _Loss]:
    """What the end of each attempt that trained cost: work that a later attempt did again."""
    resumed: dict[int, Record] = {}
    for event in events:
        if event.get("event") == "resumed":
            resumed.setdefault(event["attempt"], event)
    by_attempt = _by_attempt(saves)
    trained = [one for one in attempts if one.last_step is not None]
    losses = {}
    for index, one in enumerate(trained):
        assert one.last_step is not None
        after = trained[index + 1] if index + 1 < len(trained) else None
        later = [other for other in attempts if other.attempt > one.attempt]
        later = [other for other in later if after is None or other.attempt <= after.attempt]
        said = next((resumed[other.attempt] for other in later if other.attempt in resumed), {})
        start = next((other.start_step for other in later if other.start_step is not None), None)
        if start is None:  # nobody went on yet: it will be from the newest step that is on disk
            done = [save.step for save in saves if save.outcome == "committed" and save.step is not None]
            ended = one.reason not in (None, "finished")
            start = max((step for step in done if step <= one.last_step), default=0) if ended else one.last_step
        said_steps, lost_s = _number(said.get("lost_steps")), _number(said.get("lost_s"))
        lost_steps = max(0, one.last_step - start) if said_steps is None else int(said_steps)
        again = [
            key for key in ((one.attempt, step) for step in steps.by_attempt.get(one.attempt, [])) if key[1] > start
        ]
        if lost_s is None and again:
            # The save at `start` was worth it: its stall, inside the first step that was lost, is not lost work.
            worth = sum(save.stall_s or 0.0 for save in by_attempt.get(one.attempt, ()) if save.step == start)
            lost_s = sum(steps.seconds(key) for key in again) - worth
        if lost_s is None:
            lost_s = lost_steps * (steps.typical_s() or _step_time(events) or 0.0)
        losses[one.attempt] = _Loss(start, lost_steps, max(0.0, lost_s) if lost_steps else 0.0, after)
    return losses


def _interruptions(
    events: Sequence[Record], attempts: Sequence[Attempt], saves: Sequence[Save], losses: Mapping[int, _Loss]
) -> list[Interruption]:
    notices = {event["attempt"]: event for event in events if event.get("event") == "reclaim_noticed"}
    by_attempt = _by_attempt(saves)
    found = []
    for one in attempts:
        kind = CRASHED if one.reason == "unavailable" and one.last_step is not None else one.reason
        if kind not in KINDS:
            continue
        reached = one.last_step if one.last_step is not None else one.start_step or 0
        loss = losses.get(one.attempt) or _Loss(reached, 0, 0.0, _next_that_trained(one, attempts))
        notice = notices.get(one.attempt, {})
        found.append(
            Interruption(
                attempt=one.attempt,
                kind=kind,
                time=one.end,
                source=str(notice.get("source") or ""),
                decision=str(notice.get("decision") or ""),
                step=max(reached, loss.kept + loss.steps),
                lost_steps=loss.steps,
                lost_s=loss.seconds,
                recovery_s=_gap(one, loss.next, attempts)[0] if loss.next else None,
                flushed=loss.steps == 0,
                save_in_flight=_in_flight(notice.get("time", one.end), by_attempt.get(one.attempt, ())),
            )
        )
    return found


def _next_that_trained(one: Attempt, attempts: Sequence[Attempt]) -> Attempt | None:
    return next((other for other in attempts if other.attempt > one.attempt and other.last_step is not None), None)


def _gap(one: Attempt, after: Attempt, attempts: Sequence[Attempt]) -> tuple[float, float]:
    """Seconds of restart and of pause between the end of `one` and the first new step of `after`."""
    restart = max(0.0, after.trains - one.end)
    chain = [each for each in attempts if one.attempt <= each.attempt <= after.attempt]
    waits = [
        max(0.0, later.start - each.end) for each, later in itertools.pairwise(chain) if each.reason in _BY_A_PERSON
    ]
    paused = min(restart, sum(waits))
    return restart - paused + after.startup_step_s, paused


def _in_flight(moment: float, saves: Sequence[Save]) -> str | None:
    """What became of the one of an attempt's `saves` that was under way at `moment`."""
    for save in reversed([save for save in saves if save.started is not None]):
        assert save.started is not None
        if save.started < moment:
            if save.outcome == "lost":
                return "lost"
            durable = save.started + (save.durable_s or 0.0)
            return "committed" if save.outcome == "committed" and durable > moment else None
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Totals


def _seconds(attempts: Sequence[Attempt], saves: Sequence[Save], losses: Mapping[int, _Loss], steps: _Steps) -> Seconds:
    if not attempts:
        return Seconds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    elapsed = max(one.end for one in attempts) - attempts[0].start
    restart = paused = 0.0
    trained = [one for one in attempts if one.last_step is not None]
    for one, after in itertools.pairwise(trained):
        again, idle = _gap(one, after, attempts)
        restart, paused = restart + again, paused + idle
    lost = sum(loss.seconds for loss in losses.values())
    kept_steps = set(steps.counted)
    # A stall inside work that was lost is lost work.
    kept = [save for save in saves if save.attempt not in losses or (save.step or 0) <= losses[save.attempt].kept]
    stall = sum(save.stall_s or 0.0 for save in kept)
    if steps.tokens:
        # The step after a save contains its stall; after the last step of an attempt there is none.
        inside = sum(save.stall_s or 0.0 for save in kept if (save.attempt, (save.step or 0) + 1) in kept_steps)
        starting = sum(one.startup_step_s for one in attempts)
        productive = sum(steps.seconds(key) for key in kept_steps) - inside - starting
    else:
        productive = sum(one.end - one.trains for one in trained) - stall - lost
    productive = min(max(0.0, productive), max(0.0, elapsed - stall - lost - restart - paused))
    other = max(0.0, elapsed - productive - stall - lost - restart - paused)
    return Seconds(
        productive, stall, lost, restart, paused, other, productive + stall + lost + restart + paused + other
    )


def _assumptions(
    events: Sequence[Record],
    settings: CheckpointConfig,
    steps: _Steps,
    stall_s: Spread,
    durable_s: Spread,
    recoveries: Sequence[float],
    seconds: Seconds,
) -> list[Assumption]:
    ends = [one["reason"] for one in ledger.attempts(events).values()]
    interruptions = sum(reason in (RECLAIMED, KILLED) for reason in ends)
    mtbi_s, over = ledger.mtbi_s(events), counted(interruptions, "interruption")
    trained_s = seconds.elapsed - seconds.paused - seconds.restart
    quiet = interruptions == 0 and trained_s > 3 * settings.mtbi_s  # by chance in one of 20 runs
    if quiet:
        mtbi_s, over = trained_s, "a run without one: at least that"
    step_s = steps.typical_s() or _step_time(events)
    timed = len(steps.tokens) or sum(event.get("event") == "step_time" for event in events)
    stalled_s = stall_s.steady if stall_s.steady is not None else stall_s.median
    if stalled_s is not None and durable_s.median is not None:  # as the run itself reckons, see `interval.retuned`
        stalled_s += (_slowdown(events) - 1) * durable_s.median
    rows: list[tuple[str, float | None, str]] = [
        ("mtbi_s", mtbi_s, over),
        ("step_time_s", step_s, counted(timed, "step")),
        ("save_time_s", durable_s.median, counted(durable_s.count, "save")),
        ("save_stall_s", stalled_s, counted(stall_s.count, "save")),
        ("restart_time_s", _median(recoveries), counted(len(recoveries), "restart")),
    ]
    found = []
    for name, measured, text in rows:
        assumed = getattr(settings, name)
        off = measured is not None and not assumed / _OFF <= measured <= assumed * _OFF
        # A saving so small that no interval depends on it is no reason to edit a file.
        if (
            off
            and name in ("save_stall_s", "restart_time_s")
            and max(assumed, measured or 0.0) < 0.01 * settings.mtbi_s
        ):
            off = name == "save_stall_s" and max(assumed, measured or 0.0) > 0.1 * (step_s or settings.step_time_s)
        found.append(Assumption(f"checkpoint.{name}", assumed, measured, text, off))
    return found


def _slowdown(events: Sequence[Record]) -> float:
    """Step time while a save is written over step time without, as measured last; 1 where nobody did."""
    measured = [value for event in events if (value := _number(event.get("slowdown"))) is not None]
    return max(1.0, measured[-1]) if measured else 1.0


def _step_time(events: Iterable[Record]) -> float | None:
    """Median seconds of a step by the ledger alone."""
    values = (_number(event.get("step_time_s")) for event in events if event.get("event") == "step_time")
    return _median([value for value in values if value is not None])


def _throughput(attempts: Sequence[Attempt], steps: _Steps) -> list[Throughput]:
    sizes = {one.attempt: one.world_size for one in attempts}
    speeds: dict[int | None, list[float]] = {}
    for key in steps.counted:
        if steps.speed[key]:
            speeds.setdefault(sizes.get(key[0]), []).append(steps.speed[key])
    return [Throughput(size, len(values), statistics.median(values)) for size, values in speeds.items()]


def _changes(events: Iterable[Record], configured: int) -> Iterator[Change]:
    """Every change of the interval; each attempt begins with the configured one."""
    attempt, before, step = None, configured, None
    for event in events:
        if event["attempt"] != attempt:
            attempt, before, step = event["attempt"], configured, None
        if event.get("event") == "save_started" and _is_number(event.get("step")):
            step = int(event["step"])
        if event.get("event") == "retuned" and _is_number(event.get("every_steps")):
            stated, at = _number(event.get("before")), _number(event.get("step"))
            change = Change(
                time=event["time"],
                attempt=event["attempt"],
                step=step if at is None else int(at),
                before=before if stated is None else int(stated),
                every_steps=int(event["every_steps"]),
                step_time_s=_number(event.get("step_time_s")),
                save_time_s=_number(event.get("save_time_s")),
                save_stall_s=_number(event.get("save_stall_s")),
                mtbi_s=_number(event.get("mtbi_s")),
                warning=str(event.get("warning") or ""),
            )
            before = change.every_steps
            yield change


def quantile(values: Sequence[float], share: float) -> float | None:
    """The `share` quantile by linear interpolation, None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) else None


def _plain(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") if value < 1e15 else f"{value:g}"
