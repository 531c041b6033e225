"""What happened to a run: its attempts, saves and interruptions, put together from its ledger and its steps.

An attempt trains from the end of its start-up to its last sign of life. Its first step may take longer than the others
(compilation, warm-up); what it takes more is start-up too.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.ledger import KILLED, Event, Lifetime, lifetimes
from trainer.outcome import Reason
from trainer.steps import Step, counting, starts

RECLAIMED, INTERRUPTED, CRASHED = str(Reason.RECLAIMED), str(Reason.INTERRUPTED), str(Reason.CRASHED)
KINDS = (RECLAIMED, KILLED, INTERRUPTED, CRASHED)
_BY_A_PERSON = (INTERRUPTED, "finished", "config")  # what follows is a pause, not a restart


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks. Times are Unix seconds."""

    attempt: int
    start: float  # first sign of life
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

    steps: list[Step]  # those that were done again too
    counting: list[Step]
    attempts: list[Attempt]
    ends: list[End]  # of all attempts
    saves: list[Save]
    changes: list[Event]  # of the interval: `retuned` with what it was before, and the step of the newest save then

    @property
    def interruptions(self) -> list[End]:
        return [end for end in self.ends if end.kind in KINDS]


def reconstruct(events: Sequence[Event], steps: Sequence[Step], every_steps: int, alive: bool) -> History:
    """Put a run together.

    Args:
        events: of the ledger, attempt by attempt.
        steps: of the metrics, those that a later attempt did again too.
        every_steps: the configured interval.
        alive: whether an attempt whose end nobody recorded may still be running.
    """
    made = by_attempt(steps)
    lives = lifetimes(events)
    newest = max(lives.keys() | made.keys(), default=0)
    running = newest if alive and (newest not in lives or lives[newest].reason is None) else None
    saves = _saves(events, running)
    attempts = _attempts(events, lives, made, saves, running)
    return History(
        steps=list(steps),
        counting=counting(steps, starts(events)),
        attempts=attempts,
        ends=list(_ends(events, attempts, saves, made)),
        saves=[save for mine in saves.values() for save in mine],
        changes=list(_changes(events, every_steps)),
    )


def by_attempt(steps: Iterable[Step]) -> dict[int, list[Step]]:
    """The steps of each attempt, in their order."""
    found: dict[int, list[Step]] = {}
    for one in sorted(steps, key=lambda one: (one.attempt, one.step)):
        found.setdefault(one.attempt, []).append(one)
    return found


def typical_s(made: Iterable[Sequence[Step]]) -> float | None:
    """Median seconds of a step, the first one of each attempt left out; None where nothing was measured."""
    return median([one.seconds for steps in made for one in (steps[1:] or steps) if one.seconds])


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _saves(events: Iterable[Event], running: int | None) -> dict[int, list[Save]]:
    """By attempt."""
    found: dict[int, list[Save]] = {}
    for event in events:
        if event.event not in ("save_started", "save_staged", "save_committed", "save_failed"):
            continue
        mine = found.setdefault(event.attempt, [])
        # The writer's `save_committed` may come before the trainer's `save_staged`.
        save = next((one for one in mine[:-4:-1] if event.step in (None, one.step)), None)
        if save is None or event.event == "save_started":
            save = Save(event.attempt, event.step, first=not mine)
            mine.append(save)
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
    for save in (save for mine in found.values() for save in mine):
        save.outcome = save.outcome or ("running" if save.attempt == running else "lost")
    return found


def _attempts(
    events: Sequence[Event],
    lives: Mapping[int, Lifetime],
    made: Mapping[int, Sequence[Step]],
    saves: Mapping[int, Iterable[Save]],
    running: int | None,
) -> list[Attempt]:
    began = {event.attempt: event for event in events if event.event == "attempt_started"}
    stopped = {event.attempt: event.time for event in events if event.event == "stopped"}
    last = {number: steps[-1].step for number, steps in made.items()} or _last_steps(events)
    start_steps = {number: steps[0].step - 1 for number, steps in made.items()} | starts(began.values())
    numbers = sorted(lives.keys() | made.keys())
    found: list[Attempt] = []
    for number, following in itertools.zip_longest(numbers, numbers[1:]):
        before = found[-1].end if found else 0.0
        life = lives.get(number, Lifetime(before, before, None if following is None else KILLED))
        steps = made.get(number, [])
        trains = began[number].time if number in began else life.start
        end = max(stopped.get(number, life.end), trains)
        if life.reason in (None, KILLED):  # nobody wrote down when: it lived at least for its steps
            stalls = sum(save.stall_s or 0.0 for save in saves.get(number, ()))
            lived = trains + sum(one.seconds for one in steps) + stalls
            latest = lives[following].start if following is not None and following in lives else math.inf
            end = max(min(max(end, lived), latest), life.end)
        typical = typical_s([steps])
        found.append(
            Attempt(
                attempt=number,
                start=life.start,
                trains=trains,
                end=end,
                reason=life.reason or (None if number == running else KILLED),
                world_size=began[number].world_size if number in began else None,
                start_step=start_steps.get(number),
                last_step=last.get(number),
                startup_step_s=max(0.0, steps[0].seconds - typical) if typical else 0.0,
            )
        )
    return found


def _last_steps(events: Iterable[Event]) -> dict[int, int]:
    """The last step that the events of each attempt name: all there is to say where there are no metrics."""
    last: dict[int, int] = {}
    names = ("attempt_started", "save_started", "save_committed", "stopped", "finished")
    for event in events:
        if event.event in names and event.step is not None:
            last[event.attempt] = max(last.get(event.attempt, 0), event.step)
    return last


def _ends(
    events: Sequence[Event],
    attempts: Sequence[Attempt],
    saves: Mapping[int, Sequence[Save]],
    made: Mapping[int, Sequence[Step]],
) -> Iterator[End]:
    notices = {event.attempt: event for event in events if event.event == "reclaim_noticed"}
    resumed: dict[int, Event] = {}
    for event in events:
        if event.event == "resumed":
            resumed.setdefault(event.attempt, event)
    typical = typical_s(made.values()) or 0.0
    for index, one in enumerate(attempts):
        trained = (place for place in range(index + 1, len(attempts)) if attempts[place].last_step is not None)
        next_trained = next(trained, None)
        later = attempts[index + 1 : None if next_trained is None else next_trained + 1]
        kept = _resume_step(one, later, saves)
        said = next((resumed[each.attempt] for each in later if each.attempt in resumed), None)
        lost_steps, lost_s = (said.lost_steps, said.lost_s) if said and one.last_step is not None else (None, None)
        if lost_steps is None:
            lost_steps = max(0, (one.last_step or 0) - kept)
        if lost_s is None:  # the stall of a save that was not resumed from is lost too
            stalls = [save.stall_s or 0.0 for save in saves.get(one.attempt, ()) if (save.step or 0) > kept]
            again = [step.seconds for step in made.get(one.attempt, ()) if step.step > kept]
            lost_s = sum(again) + sum(stalls) if again else lost_steps * typical
        recovery_s, paused_s = (None, 0.0) if next_trained is None else _gap([one, *later])
        notice = notices.get(one.attempt)
        yield End(
            attempt=one.attempt,
            kind=CRASHED if one.reason == Reason.UNAVAILABLE and one.last_step is not None else one.reason,
            time=one.end,
            source=notice.source or "" if notice else "",
            decision=notice.decision or "" if notice else "",
            step=max(one.last_step or 0, kept + lost_steps),
            kept_step=kept,
            lost_steps=lost_steps,
            lost_s=lost_s if lost_steps else 0.0,
            recovery_s=recovery_s,
            paused_s=paused_s,
            save_in_flight=_in_flight(notice.time if notice else one.end, saves.get(one.attempt, ())),
        )


def _resume_step(one: Attempt, later: Sequence[Attempt], saves: Mapping[int, Sequence[Save]]) -> int:
    """The step from which one of the attempts `later` went on; before that, the newest that is on disk."""
    if one.last_step is None:
        return one.start_step or 0
    for other in later:
        if other.start_step is not None:
            return other.start_step
    if one.reason in (None, "finished"):
        return one.last_step
    committed = [save.step or 0 for mine in saves.values() for save in mine if save.outcome == "committed"]
    return max((step for step in committed if step <= one.last_step), default=0)


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
    """Every change of the interval; each attempt begins with the configured one."""
    attempt, before, step = None, every_steps, None
    for event in events:
        if event.attempt != attempt:
            attempt, before, step = event.attempt, every_steps, None
        if event.event == "save_started":
            step = event.step
        if event.event == "retuned" and event.every_steps is not None:
            at, was = step if event.step is None else event.step, before if event.before is None else event.before
            yield replace(event, step=at, before=was)
            before = event.every_steps
