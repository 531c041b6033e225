"""The save interval, shown: the arithmetic itself is the template's own `trainer/interval.py`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
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
    from trainer.interval import Interval
else:
    calculator = _load()

__all__ = ["calculator", "from_answers", "plot"]

_TIMES = ("mtbi", "step_time", "save_time", "save_stall", "restart_time")


def from_answers(answers: Mapping[str, Any]) -> Interval | None:
    """The interval of a project's answers; None for a template that does not ask for it. Raises `IntervalError`."""
    if not {*_TIMES, "badput_target"} <= answers.keys():
        return None
    mtbi, step, save, stall, restart = (calculator.parse_duration(str(answers[key])) for key in _TIMES)
    return calculator.compute_interval(
        mtbi, step, save, stall, restart, calculator.parse_share(str(answers["badput_target"]))
    )


def plot(interval: Interval, file: Path) -> None:
    """Draw badput over the interval, with floor, optimum and ceiling marked, as PNG or SVG. Raises `OSError`."""
    from matplotlib.figure import Figure

    duration = calculator.format_duration
    first, last = 1, max(2, round(interval.ceiling_steps * 1.25), interval.optimum_steps * 2)
    grid = [first * (last / first) ** (k / 400) for k in range(401)]

    def saves_and_lost_work(steps: float) -> float:
        return (interval.save_time_s + steps * interval.step_time_s / 2) / interval.mtbi_s

    def stalls(steps: float) -> float:
        return interval.save_stall_s / (steps * interval.step_time_s + interval.save_stall_s)

    def total(steps: float) -> float:
        return saves_and_lost_work(steps) + stalls(steps) + interval.badput_restart

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(grid, [100 * total(n) for n in grid], color="black", label="all badput (with restarts)")
    axes.plot(grid, [100 * saves_and_lost_work(n) for n in grid], color="tab:blue", label="saves and lost work")
    axes.plot(grid, [100 * stalls(n) for n in grid], color="tab:orange", label="stalls of the training loop")
    axes.axhline(100 * interval.badput_target, color="tab:blue", linestyle=":", label="target of saves and lost work")
    marks = (
        ("floor", interval.floor_steps, "tab:gray"),
        ("optimum", interval.optimum_steps, "tab:green"),
        ("ceiling", interval.ceiling_steps, "tab:red"),
    )
    for name, steps, color in marks:
        axes.axvline(steps, color=color, linestyle="--", label=f"{name}: {steps:,} steps")
    steps = interval.save_interval_steps
    axes.plot([steps], [100 * total(steps)], "o", color="black", label=f"chosen: {steps:,} steps")
    axes.set_xscale("log")
    axes.set_xlim(first, last)
    axes.set_ylim(0, 100 * min(1.0, 3 * max(total(steps), interval.badput_target)))
    axes.set_xlabel("steps between two saves")
    axes.set_ylabel("badput, % of the time")
    axes.set_title(
        f"an interruption every {duration(interval.mtbi_s)}, steps of {duration(interval.step_time_s)}, "
        f"saves of {duration(interval.save_time_s)}"
    )
    axes.legend(fontsize="small")
    figure.savefig(file, format=file.suffix[1:].lower())
