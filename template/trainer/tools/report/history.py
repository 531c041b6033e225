"""What happened to a run: its attempts, saves and interruptions, put together from its ledger and its steps.

An attempt trains from the end of its start-up to its last event or step. Its first step may take longer than the others
(compilation, warm-up); what it takes more is start-up too.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainer.ledger import KILLED, Event, Lifetime, lifetimes
from trainer.outcome import Reason
from trainer.steps import Step, counting, starts

RECLAIMED, INTERRUPTED, CRASHED = str(Reason.RECLAIMED), str(Reason.INTERRUPTED), str(Reason.CRASHED)
KINDS = (RECLAIMED, KILLED, INTERRUPTED, CRASHED)
_NAME_LAST_STEP = ("attempt_started", "save_started", "save_committed", "stopped", "finished")
_BY_A_PERSON = (INTERRUPTED, "finished", "config")  # what follows is a pause, not a restart


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks. Times are Unix seconds."""

    attempt: int
    start: float  # first event
    trains: float  # start-up is over
    end: float
    reason: str | None  # None: it is running
    world_size: int | None
    start_step: int | None  # step of the checkpoint it began from
    last_step: int | None  # None: it made none
    startup_step_s: float  # what its first step took longer than the others


@dataclass
class Save:
    """One save. Seconds are None where the ledger does not say."""

    attempt: int
    step: int | None
    first: bool  # of its attempt
    outcome: str = ""  # committed, failed, lost (its attempt ended), running
    started: float | None = None
    stall_s: float | None = None  # training stood still
    write_s: float | None = None  # in the background
    durable_s: float | None = None  # from the start until committed
    bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class End:
    """How an attempt ended and what that cost."""

    attempt: int
    kind: str | None  # an interruption's is one of KINDS
    time: float
    source: str  # what announced it, where something did
    decision: str  # what the launcher made of the time that was left
    step: int  # last step made
    kept_step: int  # the last one that need not be done again
    lost_steps: int  # that a later attempt did again
    lost_s: float
    recovery_s: float | None  # until the first new step began; None: not yet
    paused_s: float  # a person had stopped the run
    save_in_flight: str | None  # the save under way when it came: committed, lost, or None


@dataclass(frozen=True)
class History:
    """A run, each part in its order."""

    events: Sequence[Event]
    steps: Sequence[Step]  # those that were done again too
    counting: list[Step]
    typical_s: float | None  # of a step
    attempts: list[Attempt]
    ends: list[End]  # of all attempts
    saves: list[Save]
    changes: list[Event]  # of the interval: `retuned` with what it was before, and the step of the newest save then

    @property
    def interruptions(self) -> list[End]:
        return [end for end in self.ends if end.kind in KINDS]


@dataclass
class _Part:
    """What the records hold of one attempt."""

    events: list[Event] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)

    def last(self, name: str) -> Event | None:
        return next((event for event in reversed(self.events) if event.event == name), None)


def reconstruct(events: Sequence[Event], steps: Sequence[Step], every_steps: int, alive: bool) -> History:
    """Put a run together, see `account.account`; `every_steps` is the configured interval."""
    found: defaultdict[int, _Part] = defaultdict(_Part)
    for event in events:
        found[event.attempt].events.append(event)
    for step in sorted(steps, key=lambda step: step.step):
        found[step.attempt].steps.append(step)
    parts = dict(sorted(found.items()))
    for part in parts.values():
        part.saves = _saves(part.events)
    attempts = _attempts(parts, lifetimes(events), alive)
    saves = [save for part in parts.values() for save in part.saves]
    running = next((one.attempt for one in attempts[-1:] if one.reason is None), None)
    for save in saves:
        save.outcome = save.outcome or ("running" if save.attempt == running else "lost")
    typical_s = _typical_s(part.steps for part in parts.values())
    return History(
        events=events,
        steps=steps,
        counting=counting(steps, starts(events)),
        typical_s=typical_s,
        attempts=attempts,
        ends=list(_ends(attempts, parts, typical_s or 0.0)),
        saves=saves,
        changes=[change for part in parts.values() for change in _changes(part.events, every_steps)],
    )


def _typical_s(made: Iterable[Sequence[Step]]) -> float | None:
    """Median seconds of a step, the first one of each attempt left out; None where nothing was measured."""
    return median([one.seconds for steps in made for one in (steps[1:] or steps) if one.seconds])


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _saves(events: Iterable[Event]) -> list[Save]:
    """Those of an attempt; the outcome of one that did not end is empty."""
    found: list[Save] = []
    for event in events:
        if event.event not in ("save_started", "save_staged", "save_committed", "save_failed"):
            continue
        # The writer's `save_committed` may come before the trainer's `save_staged`.
        save = next((one for one in found[:-4:-1] if event.step in (None, one.step)), None)
        if save is None or event.event == "save_started":
            save = Save(event.attempt, event.step, first=not found)
            found.append(save)
        match event.event:
            case "save_started":
                save.started = event.time
            case "save_staged":
                save.stall_s = event.stall_s
            case "save_committed":
                save.outcome, save.write_s, save.bytes = "committed", event.write_s, event.bytes
                save.durable_s = event.write_s if save.started is None else event.time - save.started
            case "save_failed":
                save.outcome, save.reason = "failed", event.reason or ""
    return found


def _attempts(parts: Mapping[int, _Part], lives: Mapping[int, Lifetime], alive: bool) -> list[Attempt]:
    has_steps = any(part.steps for part in parts.values())
    found: list[Attempt] = []
    for (number, part), following in itertools.zip_longest(parts.items(), [*parts][1:]):
        before = found[-1].end if found else 0.0
        life = lives.get(number, Lifetime(before, before, KILLED if following else None))
        began, stopped = part.last("attempt_started"), part.last("stopped")
        trains = began.time if began else life.start
        end = max(stopped.time if stopped else life.end, trains)
        if life.reason in (None, KILLED):  # its end was not recorded: it lasted at least for its steps
            stalls = sum(save.stall_s or 0.0 for save in part.saves)
            lived = trains + sum(step.seconds for step in part.steps) + stalls
            latest = lives[following].start if following in lives else math.inf
            end = max(min(max(end, lived), latest), life.end)
        start_step = began.step if began else None
        last_step = part.steps[-1].step if part.steps else None
        if start_step is None and part.steps:
            start_step = part.steps[0].step - 1
        if not has_steps:  # no metrics: what the events say of steps must do
            named = (event.step for event in part.events if event.event in _NAME_LAST_STEP)
            last_step = max((step for step in named if step is not None), default=None)
        typical_s = _typical_s([part.steps])
        found.append(
            Attempt(
                attempt=number,
                start=life.start,
                trains=trains,
                end=end,
                reason=life.reason or (None if alive else KILLED),
                world_size=began.world_size if began else None,
                start_step=start_step,
                last_step=last_step,
                startup_step_s=max(0.0, part.steps[0].seconds - typical_s) if typical_s else 0.0,
            )
        )
    return found


def _ends(attempts: Sequence[Attempt], parts: Mapping[int, _Part], typical_s: float) -> Iterator[End]:
    for index, one in enumerate(attempts, start=1):
        part, made = parts[one.attempt], one.last_step or 0
        untrained = list(itertools.takewhile(lambda each: each.last_step is None, attempts[index:]))
        later = attempts[index : index + len(untrained) + 1]  # to the first one that made a step, if there is one
        kept = _resume_step(one, later, parts)
        said = next((event for each in later if (event := parts[each.attempt].last("resumed"))), None)
        lost_steps, lost_s = (said.lost_steps, said.lost_s) if said and one.last_step is not None else (None, None)
        if lost_steps is None:
            lost_steps = max(0, made - kept)
        if lost_s is None:  # the stall of a save that was not resumed from is lost too
            stalls = [save.stall_s or 0.0 for save in part.saves if (save.step or 0) > kept]
            again = [step.seconds for step in part.steps if step.step > kept]
            lost_s = sum(again) + sum(stalls) if again else lost_steps * typical_s
        recovery_s, paused_s = _gap([one, *later]) if len(later) > len(untrained) else (None, 0.0)
        notice = part.last("reclaim_noticed")
        yield End(
            attempt=one.attempt,
            kind=CRASHED if one.reason == Reason.UNAVAILABLE and one.last_step is not None else one.reason,
            time=one.end,
            source=(notice and notice.source) or "",
            decision=(notice and notice.decision) or "",
            step=max(made, kept + lost_steps),
            kept_step=kept,
            lost_steps=lost_steps,
            lost_s=lost_s if lost_steps else 0.0,
            recovery_s=recovery_s,
            paused_s=paused_s,
            save_in_flight=_in_flight(notice.time if notice else one.end, part.saves),
        )


def _resume_step(one: Attempt, later: Sequence[Attempt], parts: Mapping[int, _Part]) -> int:
    """The step from which one of the attempts `later` went on; before that, the newest that is on disk."""
    if one.last_step is None:
        return one.start_step or 0
    for other in later:
        if other.start_step is not None:
            return other.start_step
    if one.reason in (None, "finished"):
        return one.last_step
    saves = [save for part in parts.values() for save in part.saves if save.outcome == "committed"]
    return max((save.step for save in saves if save.step is not None and save.step <= one.last_step), default=0)


def _gap(chain: Sequence[Attempt]) -> tuple[float, float]:
    """Seconds of restart and of pause between the end of the first attempt and the first new step of the last one."""
    first, last = chain[0], chain[-1]
    restart = max(0.0, last.trains - first.end)
    stops = ((each, after) for each, after in itertools.pairwise(chain) if each.reason in _BY_A_PERSON)
    paused = min(restart, sum(max(0.0, after.start - each.end) for each, after in stops))
    return restart - paused + last.startup_step_s, paused


def _in_flight(moment: float, saves: Sequence[Save]) -> str | None:
    """What became of the one of an attempt's `saves` that was under way at `moment`."""
    for save in reversed(saves):
        if save.started is not None and save.started < moment:
            if save.outcome == "committed" and save.started + (save.durable_s or 0.0) > moment:
                return "committed"
            return "lost" if save.outcome == "lost" else None
    return None


def _changes(events: Iterable[Event], every_steps: int) -> Iterator[Event]:
    """Every change of the interval in an attempt; each begins with the configured one."""
    step = None
    for event in events:
        if event.event == "save_started":
            step = event.step
        if event.event == "retuned" and event.every_steps is not None:
            at, before = step if event.step is None else event.step, event.before or every_steps
            yield replace(event, step=at, before=before, warning=event.warning or "")
            every_steps = event.every_steps
