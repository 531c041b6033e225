"""The save interval from what people write, and drawn; the arithmetic is the template's own `trainer/interval.py`."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any


def _load() -> ModuleType:
    """The template's module, from the checkout beside this package or, in a wheel, from the copy in it."""
    here = Path(__file__).resolve().parent
    in_checkout = here.parent / "template/trainer/interval.py"
    file = in_checkout if in_checkout.is_file() else here / "_interval.py"
    spec = importlib.util.spec_from_file_location("scaffold._interval", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from trainer import interval as calculator
    from trainer.interval import Interval, IntervalError
else:
    calculator = _load()
    IntervalError = calculator.IntervalError

__all__ = ["IntervalError", "calculator", "from_answers", "mtbi_from_log", "parse_duration", "parse_share", "plot"]

_NUMBER = r"(?:[0-9]{1,9}(?:[.][0-9]{0,9})?|[.][0-9]{1,9})"
_DURATION = re.compile("".join(rf"(?:{_NUMBER}{unit})?" for unit in ("d", "h", "m", "s", "ms")))
_BARE = re.compile(_NUMBER)
_PART = re.compile(r"([0-9.]+)(ms|d|h|m|s|)")
_MILLISECONDS = {"d": 86_400_000.0, "h": 3_600_000.0, "m": 60_000.0, "s": 1000.0, "ms": 1.0, "": 1000.0}
_TIMES = ("mtbi", "step_time", "save_time", "save_stall", "restart_time")


def parse_duration(text: str) -> float:
    """Seconds of `4h`, `800ms`, `0.05s`, `1d12h`; a bare number is seconds.

    Raises:
        IntervalError: `text` is none of these.
    """
    stripped = str(text).strip()
    if not stripped or not (_DURATION.fullmatch(stripped) or _BARE.fullmatch(stripped)):
        raise IntervalError(f"{text!r} is not a duration; write it like 4h, 800ms, 0.05s, 1d12h or 90 (seconds)")
    return sum((float(number) * _MILLISECONDS[unit] for number, unit in _PART.findall(stripped)), 0.0) / 1000


def parse_share(text: str) -> float:
    """The share that `5%` or `0.05` means, above 0 and below 1. A bare number of 1 or more is refused: is 5 a percent?

    Raises:
        IntervalError: `text` is not such a share.
    """
    stripped = str(text).strip()
    number = stripped.removesuffix("%").rstrip()
    if _BARE.fullmatch(number):
        value = float(number) / 100 if stripped.endswith("%") else float(number)
        if 0 < value < 1:
            return value
    raise IntervalError(f"{text!r} is not a share above 0 and below 1; write it like 5% or 0.05")


def mtbi_from_log(path: Path | str) -> float:
    """Mean time between the interruptions of a log: one a line, beginning with its time.

    A time is Unix seconds or ISO 8601 (UTC where it names no zone); what follows it on the line, empty lines and lines
    that begin with `#` do not matter, nor does the order.

    Returns:
        Seconds between two interruptions, (last - first) / (number - 1).

    Raises:
        IntervalError: the file cannot be read, a line has no time, or there are fewer than two different times.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise IntervalError(f"{path}: cannot be read ({error})") from None
    times = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        time = _time(words[0]) if len(words) == 1 else _time(" ".join(words[:2])) or _time(words[0])
        if time is None:
            raise IntervalError(f"{path} line {number}: {words[0]!r} is not a time; write Unix seconds or ISO 8601")
        times.append(time)
    if len(set(times)) < 2:
        raise IntervalError(f"{path}: {len(times)} interruptions; an MTBI takes at least two, at different times")
    return (max(times) - min(times)) / (len(times) - 1)


def _time(text: str) -> float | None:
    try:
        seconds = float(text)
        return seconds if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def from_answers(answers: Mapping[str, Any]) -> Interval | None:
    """The interval of a project's answers; None for a template that does not ask for it. Raises `IntervalError`."""
    if not {*_TIMES, "badput_target"} <= answers.keys():
        return None
    mtbi, step, save, stall, restart = (parse_duration(str(answers[key])) for key in _TIMES)
    target = parse_share(str(answers["badput_target"]))
    return calculator.compute_interval(mtbi, step, save, stall, restart, target)


def plot(interval: Interval, file: Path) -> None:
    """Draw badput over the interval, with floor, optimum and ceiling marked, as PNG or SVG. Raises `OSError`."""
    from matplotlib.figure import Figure

    duration = calculator.format_duration
    first, last = 1, max(2, round(interval.ceiling_steps * 1.25), interval.optimum_steps * 2)
    grid = [first * (last / first) ** (k / 400) for k in range(401)]
    stalls, restarts = interval.save_stall_s, interval.restart_time_s
    costs = [
        calculator.badput(steps, interval.mtbi_s, interval.step_time_s, interval.save_time_s, stalls, restarts)
        for steps in grid
    ]

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(grid, [100 * cost.total for cost in costs], color="black", label="all badput (with restarts)")
    axes.plot(grid, [100 * cost.lost for cost in costs], color="tab:blue", label="saves and lost work")
    axes.plot(grid, [100 * cost.stall for cost in costs], color="tab:orange", label="stalls of the training loop")
    axes.axhline(100 * interval.badput_target, color="tab:blue", linestyle=":", label="target of saves and lost work")
    marks = (
        ("floor", interval.floor_steps, "tab:gray"),
        ("optimum", interval.optimum_steps, "tab:green"),
        ("ceiling", interval.ceiling_steps, "tab:red"),
    )
    for name, steps, color in marks:
        axes.axvline(steps, color=color, linestyle="--", label=f"{name}: {steps:,} steps")
    steps = interval.save_interval_steps
    axes.plot([steps], [100 * interval.badput_total], "o", color="black", label=f"chosen: {steps:,} steps")
    axes.set_xscale("log")
    axes.set_xlim(first, last)
    axes.set_ylim(0, 100 * min(1.0, 3 * max(interval.badput_total, interval.badput_target)))
    axes.set_xlabel("steps between two saves")
    axes.set_ylabel("badput, % of the time")
    axes.set_title(
        f"an interruption every {duration(interval.mtbi_s)}, steps of {duration(interval.step_time_s)}, "
        f"saves of {duration(interval.save_time_s)}"
    )
    axes.legend(fontsize="small")
    figure.savefig(file, format=file.suffix[1:].lower())
