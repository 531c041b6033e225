"""The picture of a run: loss over steps with interruptions and checkpoints marked, and where the time went."""

from __future__ import annotations

import operator
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.steps import Step
from trainer.tools.report.account import Account
from trainer.wording import percent, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"reclaimed": "#e07b00", "killed": "#c62828", "interrupted": "#6a6a6a", "crashed": "#7b1fa2"}
OTHER = "evaluation, first start, last save"
_PARTS = (
    ("productive", "#2e7d32", "productive steps"),
    ("stall", "#fbc02d", "stalled by saves"),
    ("lost", "#c62828", "lost work"),
    ("restart", "#e07b00", "restarts"),
    ("other", "#b0bec5", OTHER),
    ("paused", "#eceff1", "paused"),
)


def draw(found: Account, title: str, path: Path) -> None:
    """Write the picture to `path`, .png or .svg. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(5, 1))
    figure.suptitle(title, fontsize=12)
    _draw_loss(above, found)
    _draw_time(below, found)
    figure.savefig(path, dpi=150)


def _draw_loss(axes: Axes, found: Account) -> None:
    """One curve of what counts; the steps of each attempt that were done again apart."""
    run = found.run
    kept = {(step.attempt, step.step) for step in run.counting}
    again: defaultdict[int, list[Step]] = defaultdict(list)
    for step in run.steps:
        if (step.attempt, step.step) not in kept:
            again[step.attempt].append(step)
    curves = [(points, "#ef9a9a", 3.0, "loss of steps done again") for points in again.values()]
    curves.append((run.counting, "#1565c0", 1.2 if len(run.counting) < 1000 else 0.7, "loss"))
    for points, colour, width, label in filter(operator.itemgetter(0), curves):
        named = label in axes.get_legend_handles_labels()[1]
        steps, losses = [one.step for one in points], [one.loss for one in points]
        axes.plot(steps, losses, color=colour, linewidth=width, zorder=2, label=None if named else label)
    if committed := [save.step for save in run.saves if save.outcome == "committed" and save.step is not None]:
        few = len(committed) <= 50
        axes.plot(
            committed, [0.02] * len(committed), "^" if few else "|", transform=axes.get_xaxis_transform(),
            color="#2e7d32", markersize=6 if few else 8, linestyle="none", zorder=4, label="checkpoint", clip_on=False,
        )  # fmt: skip
    for kind, colour in _COLOURS.items():
        if steps := [one.step for one in run.interruptions if one.kind == kind]:
            axes.vlines(
                steps, 0, 1, transform=axes.get_xaxis_transform(), label=kind, color=colour, linestyle="--",
                linewidth=1.2 if len(run.interruptions) <= 50 else 0.5, zorder=1,
            )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)
    axes.margins(x=0.02)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=7, fontsize=9, frameon=False)
    else:
        axes.text(0.5, 0.5, "no step recorded yet", transform=axes.transAxes, ha="center", color="#6a6a6a")


def _draw_time(axes: Axes, found: Account) -> None:
    elapsed, left = found.seconds.elapsed, 0.0
    unit, divisor = ("hours", 3600) if elapsed > 7200 else ("minutes", 60) if elapsed > 120 else ("seconds", 1)
    for name, colour, label in _PARTS:
        part = getattr(found.seconds, name)
        if part > 0:
            label = f"{label} {span(part)} ({percent(part / elapsed)})"
            axes.barh(0, part / divisor, left=left / divisor, color=colour, label=label)
            left += part
    axes.set_yticks([])
    axes.set_xlim(0, left / divisor or 1)
    axes.set_ylim(-0.4, 0.4)
    axes.set_xlabel(f"{unit} since the first start, by what they were spent on")
    axes.spines[["top", "left", "right"]].set_visible(False)
    if left:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9, frameon=False)
