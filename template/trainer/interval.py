"""How many steps to train between two saves: a floor, an optimum, a ceiling, and what the choice costs.

Times are seconds: T of a step, S until a save is durable, sigma that a save holds up the training loop, M between two
interruptions (MTBI), R from an interruption to the first new step. b is the share of time that saves and lost work may
cost (the badput target), N the steps between two saves. Sources:

- ceiling: a save costs S and an interruption loses half an interval on average, so badput ~ (S + N*T/2) / M <= b;
- optimum: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974;
- floor: one save at a time.

The questions of `scaffold new` carry the same arithmetic as Jinja, in the same order of operations; a test holds them
together. Pure standard library, no imports from the package.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_TOLERANCE = 1e-9  # of floors and ceilings: 0.3 / 0.1 is 3, not 2


class IntervalError(ValueError):
    """Input from which no interval follows. The text is one line and says what would work."""


class Badput(NamedTuple):
    """Shares of the time that a run is meant to train."""

    stall: float  # training stands still while a save is copied: sigma / (N*T + sigma)
    lost: float  # work that is done again: (S + N*T/2) / M, the figure that badput_target bounds
    restart: float  # R / M

    @property
    def total(self) -> float:
        return self.lost + self.stall + self.restart


class Interval(NamedTuple):
    """The interval and its reasons; the fields are the keys of the JSON output."""

    floor_steps: int
    optimum_steps: int
    ceiling_steps: int
    save_interval_steps: int
    badput: float  # `Badput.lost`
    badput_stall: float
    badput_restart: float
    badput_total: float
    mtbi_s: float
    step_time_s: float
    save_time_s: float
    save_stall_s: float
    restart_time_s: float
    badput_target: float


class Retuned(NamedTuple):
    """An interval recomputed from measurements; `warning` is set where none meets the target."""

    every_steps: int
    floor_steps: int
    optimum_steps: int
    ceiling_steps: int
    warning: str = ""


def compute_interval(
    mtbi_s: float,
    step_time_s: float,
    save_time_s: float,
    save_stall_s: float | None = None,
    restart_time_s: float = 300.0,
    badput_target: float = 0.05,
) -> Interval:
    """The number of steps between two saves: the optimum, held between floor and ceiling.

    Args:
        save_stall_s: how long a save holds up the training loop; `None`: a tenth of `save_time_s`, until measured.

    Raises:
        IntervalError: a value is out of range, or no interval meets the target; then the text says which of MTBI,
            target or save time would have to change, and to what.
    """
    if save_stall_s is None:
        save_stall_s = save_time_s / 10
    positive = {"MTBI": mtbi_s, "step time": step_time_s, "save time": save_time_s}
    for name, value in (positive | {"save stall": save_stall_s, "restart time": restart_time_s}).items():
        least, right = (1e-12, "above 0") if name in positive else (0.0, "0 or more")
        if not least <= value <= 1e15:  # false for NaN too
            raise IntervalError(f"{name} is {value!r} s; it must be {right}, in seconds")
    if not 0 < badput_target < 1:
        raise IntervalError(f"badput target is {badput_target!r}; it must be a share above 0 and below 1, such as 0.05")

    figures = (mtbi_s, step_time_s, save_time_s, save_stall_s, restart_time_s, badput_target)
    floor_steps, optimum_steps, ceiling_steps = _bounds(mtbi_s, step_time_s, save_time_s, save_stall_s, badput_target)
    if restart_time_s >= mtbi_s or badput_target * mtbi_s <= save_time_s or ceiling_steps < floor_steps:
        raise IntervalError(_refusal(mtbi_s, step_time_s, save_time_s, restart_time_s, badput_target, floor_steps))
    steps = min(max(optimum_steps, floor_steps), ceiling_steps)
    cost = badput(steps, *figures[:-1])
    shares = (cost.lost, cost.stall, cost.restart, cost.total)
    return Interval(floor_steps, optimum_steps, ceiling_steps, steps, *shares, *map(float, figures))


def lost_per_interruption_s(steps: float, step_time_s: float, save_time_s: float) -> float:
    """Seconds of work that an interruption costs on average, S + N*T/2: the save under way and half an interval."""
    return save_time_s + steps * step_time_s / 2


def badput(
    steps: float, mtbi_s: float, step_time_s: float, save_time_s: float, save_stall_s: float, restart_time_s: float
) -> Badput:
    """What a save each `steps` steps costs, for any interval."""
    return Badput(
        stall=save_stall_s / (steps * step_time_s + save_stall_s),
        lost=lost_per_interruption_s(steps, step_time_s, save_time_s) / mtbi_s,
        restart=restart_time_s / mtbi_s,
    )


def retuned(
    *, mtbi_s: float, step_time_s: float, save_time_s: float, save_stall_s: float, slowdown: float, badput_target: float
) -> Retuned:
    """The interval from what a run measured; never refused, since a run that has started goes on.

    The floor keeps a quarter of the time between saves free. The stall also counts what writing costs the steps
    meanwhile, (slowdown - 1) * S. Where no interval meets the target the floor is taken, with a warning: saving as
    often as possible loses least.

    Args:
        slowdown: step time while a save is being written over step time without, 1.0 or more.
    """
    stall_s = save_stall_s + max(0.0, slowdown - 1.0) * save_time_s
    floor, optimum, ceiling = _bounds(mtbi_s, step_time_s, save_time_s, stall_s, badput_target, headroom=1.25)
    if ceiling < floor:
        share = lost_per_interruption_s(floor, step_time_s, save_time_s) / mtbi_s
        warning = (
            f"no interval keeps badput at {_percent(badput_target)}: saves take {format_duration(save_time_s)}, steps "
            f"{format_duration(step_time_s)}, interruptions come every {format_duration(mtbi_s)}; saving as often as "
            f"possible, every {floor} steps, costs about {_percent(share)}"
        )
        return Retuned(floor, floor, optimum, ceiling, warning)
    return Retuned(min(max(optimum, floor), ceiling), floor, optimum, ceiling)


def format_duration(seconds: float) -> str:
    """`seconds` as a person writes it (`4h`, `1m30.5s`, `800ms`), to a millisecond, or a nanosecond below a second."""
    if seconds < 0.9995:
        return _decimal(f"{seconds * 1000:.6f}") + "ms" if seconds else "0s"
    left = round(seconds * 1000)
    text = ""
    for unit, milliseconds in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        if left >= milliseconds:
            text += f"{left // milliseconds}{unit}"
            left %= milliseconds
    return text + _decimal(f"{left / 1000:.3f}") + "s" if left else text


def table(interval: Interval) -> str:
    """The interval as text: floor, optimum, ceiling, what was chosen, and what it is expected to cost."""
    steps = interval.save_interval_steps
    if steps == interval.ceiling_steps and steps != interval.optimum_steps:
        chosen = "the ceiling: the badput target allows no more"
    elif steps == interval.floor_steps and steps != interval.optimum_steps:
        chosen = "the floor: one save at a time allows no less"
    else:
        chosen = "the optimum"
    rows = [
        ("floor", interval.floor_steps, "one save at a time"),
        ("optimum", interval.optimum_steps, "Young 1974: stalls against lost work"),
        ("ceiling", interval.ceiling_steps, f"badput {_percent(interval.badput_target)} or less"),
        ("chosen", steps, chosen),
    ]
    width = max(len(f"{count:,}") for _, count, _ in rows)
    lines = [
        f"Save interval for an interruption every {format_duration(interval.mtbi_s)}, "
        f"steps of {format_duration(interval.step_time_s)}, saves of {format_duration(interval.save_time_s)}:"
    ]
    for name, count, why in rows:
        seconds = count * interval.step_time_s
        lasts = format_duration(float(round(seconds)) if seconds >= 60 else seconds)
        lines.append(f"  {name:<8} {count:>{width},} steps  {lasts:<10} {why}")
    lines.append(
        f"  expected badput {_percent(interval.badput)} from saves and lost work (target "
        f"{_percent(interval.badput_target)}), {_percent(interval.badput_total)} with stalls "
        f"({_percent(interval.badput_stall)}) and restarts ({_percent(interval.badput_restart)})"
    )
    return "\n".join(lines)


def _bounds(
    mtbi_s: float, step_time_s: float, save_time_s: float, save_stall_s: float, target: float, headroom: float = 1.0
) -> tuple[int, int, int]:
    """Floor, optimum and ceiling in steps; the floor is `headroom` times the duration of a save."""
    floor = headroom * save_time_s / step_time_s
    optimum = (2 * save_stall_s * mtbi_s) ** 0.5 / step_time_s
    ceiling = 2 * (target * mtbi_s - save_time_s) / step_time_s
    return (
        max(1, math.ceil(floor - _TOLERANCE * max(1.0, floor))),
        max(1, round(optimum)),
        math.floor(ceiling + _TOLERANCE * max(1.0, ceiling)),
    )


def _refusal(
    mtbi_s: float, step_time_s: float, save_time_s: float, restart_time_s: float, target: float, floor_steps: int
) -> str:
    """One line: why no interval fits, and the least change of MTBI, target or save time that makes one fit."""
    least = lost_per_interruption_s(floor_steps, step_time_s, save_time_s)
    mtbi_needed_s = least / target
    if restart_time_s >= mtbi_s:
        return (
            f"no interval fits: an interruption every {format_duration(mtbi_s)} (MTBI) and "
            f"{format_duration(restart_time_s)} to restart leave no time to train; the MTBI would have to be "
            f"{format_duration(_rounded_up(max(mtbi_needed_s, restart_time_s * 1.01)))} or more"
        )
    ways = [f"MTBI {format_duration(_rounded_up(mtbi_needed_s))} or more"]
    target_needed = math.ceil(least / mtbi_s * 10_000 * (1 - 1e-10)) / 10_000
    if target_needed < 1:
        ways.append(f"target {_percent(target_needed)} or more")
    # The largest save time that fits is k steps or a part of one step more, for the k whose floor still fits.
    whole = math.floor(2 * target * mtbi_s / (3 * step_time_s))
    save_time_needed_s = _rounded_down(
        max(whole * step_time_s, target * mtbi_s - (whole + 1) * step_time_s / 2) * (1 - 1e-10)
    )
    if save_time_needed_s > 0:
        ways.append(f"save time {format_duration(save_time_needed_s)} or less")
    return (
        f"no interval fits: with a save of {format_duration(save_time_s)} and steps of {format_duration(step_time_s)}, "
        f"saving as often as possible costs {_percent(least / mtbi_s)} of an MTBI of {format_duration(mtbi_s)}, more "
        f"than the target of {_percent(target)}; one of these would have to change: {', '.join(ways)}"
    )


def _grain(seconds: float) -> float:
    """Units per second that a suggestion is rounded to: seconds, milliseconds, microseconds."""
    return 1.0 if seconds >= 100 else 1000.0 if seconds >= 0.1 else 1_000_000.0


def _rounded_up(seconds: float) -> float:
    grain = _grain(seconds)
    return math.ceil(seconds * grain * (1 - 1e-10)) / grain


def _rounded_down(seconds: float) -> float:
    grain = _grain(seconds)
    return math.floor(seconds * grain * (1 + 1e-9)) / grain


def _percent(share: float) -> str:
    return _decimal(f"{share * 100:.2f}") + "%"


def _decimal(text: str) -> str:
    return text.rstrip("0").rstrip(".")
