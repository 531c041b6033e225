"""The picture of a run: loss over steps with interruptions and checkpoints marked, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.steps import Step
from trainer.tools.report.account import Account
from trainer.wording import percent, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"reclaimed": "#e07b00", "killed": "#c62828", "interrupted": "#6a6a6a", "crashed": "#7b1fa2"}
_PARTS = (
    ("productive", "#2e7d32", "productive steps"),
    ("stall", "#fbc02d", "stalled by saves"),
    ("lost", "#c62828", "lost work"),
    ("restart", "#e07b00", "restarts"),
    ("other", "#b0bec5", "evaluation, first start, last save"),
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
    again: dict[int, list[Step]] = {}
    kept = {(step.attempt, step.step) for step in run.counting}
    for step in run.steps:
        if (step.attempt, step.step) not in kept:
            again.setdefault(step.attempt, []).append(step)
    label: str | None = "loss of steps done again"
    for points in again.values():
        axes.plot(*_curve(points), color="#ef9a9a", linewidth=3.0, zorder=2, label=label)
        label = None
    if run.counting:
        width = 1.2 if len(run.counting) < 1000 else 0.7
        axes.plot(*_curve(run.counting), color="#1565c0", linewidth=width, zorder=3, label="loss")
    committed = [save.step for save in run.saves if save.outcome == "committed" and save.step is not None]
    if committed:
        few = len(committed) <= 50
        axes.plot(
            committed, [0.02] * len(committed), "^" if few else "|", transform=axes.get_xaxis_transform(),
            color="#2e7d32", markersize=6 if few else 8, linestyle="none", zorder=4, label="checkpoint", clip_on=False,
        )  # fmt: skip
    interruptions = run.interruptions
    width = 1.2 if len(interruptions) <= 50 else 0.5
    for kind, colour in _COLOURS.items():
        for number, one in enumerate(one for one in interruptions if one.kind == kind):
            name = kind if number == 0 else None
            axes.axvline(one.step, color=colour, linestyle="--", linewidth=width, zorder=1, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)
    axes.margins(x=0.02)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=7, fontsize=9, frameon=False)
    else:
        axes.text(0.5, 0.5, "no step recorded yet", transform=axes.transAxes, ha="center", color="#6a6a6a")


def _curve(steps: Sequence[Step]) -> tuple[list[int], list[float]]:
    return [one.step for one in steps], [one.loss for one in steps]


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
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    if left:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9, frameon=False)
