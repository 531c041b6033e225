"""`python -m trainer report`: what interruptions and saves have cost this run, as a table, JSON and a picture.

The figures are those of `accounting.py`; here they are found, worded and drawn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainer.config.load import load_config
from trainer.config.settings import Config
from trainer.ledger import read_ledger, read_records
from trainer.outcome import ConfigError
from trainer.tools.report.account import KINDS, Account, Interruption, Spread, account, suggestions
from trainer.wording import counted, percent, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ALIVE_S = 60.0  # a run whose newest sign of life is older than this has ended
_SHOWN = 12  # interruptions and changes listed; JSON has all


def report(overrides: Sequence[str], as_json: bool = False, plot: Path | None = None) -> int:
    """Print the report of the run that the configuration names. Returns the exit code: 1 if there is nothing yet.

    Raises:
        ConfigError: the picture's name is neither .png nor .svg, or it cannot be written.
    """
    config = load_config(overrides)
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"command line: --plot is {str(plot)!r}; it must end in .png or .svg")
    run_dir = config.run_dir
    events, lines = read_ledger(run_dir), read_records(run_dir, "metrics")
    if not events and not lines:
        click.echo(
            f"nothing recorded yet: {run_dir} has no ledger and no metrics; ./restart.sh starts the run", err=True
        )
        return 1
    age_s = time.time() - _sign_of_life(run_dir)
    found = account(
        events,
        lines,
        config.checkpoint,
        sequence_length=_sequence_length(config),
        alive=age_s < _ALIVE_S,
    )
    state = describe_state(found, age_s)
    advice = suggestions(found, config.checkpoint, config.reclaim.grace_s)
    if as_json:
        click.echo(json.dumps(to_json(found, config, state, advice), indent=2))
    else:
        click.echo("\n".join(to_text(found, config, state, advice)))
    if plot is not None:
        try:
            draw(found, lines, f"{config.run_name}: {state}", plot)
        except OSError as error:
            raise ConfigError(f"command line: --plot {plot} cannot be written ({error.strerror})") from None
        click.echo(f"drawn: {plot}", err=as_json)
    return 0


def _sign_of_life(run_dir: Path) -> float:
    """Unix seconds of the newest write of a record or of the lease's heartbeat."""
    paths = [run_dir / "lease.json", *run_dir.glob("ledger*.jsonl"), *run_dir.glob("metrics*.jsonl")]
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def _sequence_length(config: Config) -> int:
    """Of the samples that were trained on: an override of that start is in the checkpoints, not in the files."""
    from trainer.checkpoint.commit import complete

    newest = next(iter(complete(config.run_dir)), None)
    return int((newest.fingerprint if newest else {}).get("data.sequence_length", config.data.sequence_length))


def describe_state(found: Account, age_s: float) -> str:
    """One clause: running, finished, or how the newest attempt ended."""
    newest = found.attempts[-1] if found.attempts else None
    if newest is None or newest.reason is None:
        return f"running, last sign of life {span(max(0.0, age_s))} ago"
    if newest.reason == "finished":
        return "finished"
    if newest.reason == "killed":
        return f"stopped without a word {span(max(0.0, age_s))} ago"
    return f"stopped ({newest.reason})"


# ---------------------------------------------------------------------------------------------------------------------
# JSON


def to_json(found: Account, config: Config, state: str, advice: Sequence[str]) -> dict[str, Any]:
    """The report with keys that stay; seconds, shares of 1, Unix times. null: nothing was measured."""
    committed = [save for save in found.saves if save.outcome == "committed"]
    mtbi, *_ = found.assumptions
    return {
        "run": config.run_name,
        "directory": str(config.run_dir),
        "state": state,
        "last_step": found.last_step,
        "steps": config.train.steps,
        "attempts": [asdict(one) for one in found.attempts],
        "interruptions": {
            "count": len(found.interruptions),
            "by_kind": {kind: asdict(total) for kind, total in totals(found.interruptions).items()},
            "list": [asdict(one) for one in found.interruptions],
        },
        "mtbi": {"measured_s": mtbi.measured, "assumed_s": mtbi.assumed, "over": mtbi.over},
        "seconds": asdict(found.seconds),
        "badput": {
            "measured": _badput(found.measured),
            "promised": _badput(found.promised),
            "expected": _badput(found.expected),
            "target": found.target,
        },
        "saves": {
            "committed": len(committed),
            "failed": sum(save.outcome == "failed" for save in found.saves),
            "lost": sum(save.outcome == "lost" for save in found.saves),
            "bytes": next((save.bytes for save in reversed(committed) if save.bytes is not None), None),
            "stall_s": asdict(found.stall_s),
            "write_s": asdict(found.write_s),
            "durable_s": asdict(found.durable_s),
            "failures": [
                {"attempt": save.attempt, "step": save.step, "reason": save.reason}
                for save in found.saves
                if save.outcome == "failed"
            ],
        },
        "throughput": {
            "tokens_per_s": found.tokens_per_s,
            "goodput_tokens_per_s": found.goodput_tokens_per_s,
            "by_world_size": [asdict(one) for one in found.throughput],
        },
        "interval": {
            "configured_steps": found.configured_steps,
            "current_steps": found.current_steps,
            "retune": config.checkpoint.retune,
            "changes": [asdict(change) for change in found.changes],
        },
        "assumptions": [asdict(one) for one in found.assumptions],
        "suggestions": list(advice),
    }


def _badput(badput: Any) -> dict[str, float]:
    return {**asdict(badput), "total": badput.total}


@dataclass(frozen=True)
class Total:
    """The interruptions of one kind."""

    count: int
    lost_steps: int
    lost_s: float
    recovery_s: float | None  # median
    flushed: int


def totals(interruptions: Iterable[Interruption]) -> dict[str, Total]:
    """Totals by kind, those that never happened too."""
    from trainer.tools.report.account import quantile

    found = {}
    for kind in KINDS:
        mine = [one for one in interruptions if one.kind == kind]
        found[kind] = Total(
            len(mine),
            sum(one.lost_steps for one in mine),
            sum(one.lost_s for one in mine),
            quantile([one.recovery_s for one in mine if one.recovery_s is not None], 0.5),
            sum(one.flushed for one in mine),
        )
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Text


def to_text(found: Account, config: Config, state: str, advice: Sequence[str]) -> list[str]:
    """The report as lines of at most 110 characters or so."""
    seconds = found.seconds
    trained = [one for one in found.attempts if one.last_step is not None]
    lines = [
        f"{config.run_name}: {state}; step {found.last_step} of {config.train.steps}, "
        f"{counted(len(trained), 'attempt')}, {span(seconds.elapsed)} from the first start"
        + (f", {span(seconds.paused)} paused" if seconds.paused else ""),
        "",
        *_interruptions(found.interruptions),
        "",
        *_time(found),
        "",
        *_saves(found),
        "",
        *_throughput(found),
        "",
        *_interval(found, config),
    ]
    if advice:
        lines += ["", "suggestions (startup/nexgpu.yaml)", *(f"  {line}" for line in advice)]
    return lines


def _interruptions(interruptions: Sequence[Interruption]) -> list[str]:
    if not interruptions:
        return ["interruptions: none so far"]
    rows = [["interruptions", "count", "lost steps", "lost time", "recovery", "flushed"]]
    for kind, total in totals(interruptions).items():
        if total.count:
            rows.append(
                [
                    kind, str(total.count), str(total.lost_steps), span(total.lost_s), span(total.recovery_s),
                    f"{total.flushed} of {total.count}",
                ]
            )  # fmt: skip
    lines = [*table(rows), ""]
    rows = [["attempt", "kind", "at step", "lost steps", "lost time", "recovery", "flushed", "save under way"]]
    for one in interruptions[-_SHOWN:]:
        rows.append(
            [
                str(one.attempt), one.kind + (f" ({one.source})" if one.source else ""), str(one.step),
                str(one.lost_steps), span(one.lost_s), span(one.recovery_s), "yes" if one.flushed else "no",
                one.save_in_flight or "none",
            ]
        )  # fmt: skip
    lines += table(rows, left=2)
    if len(interruptions) > _SHOWN:
        lines.append(f"and {len(interruptions) - _SHOWN} earlier ones: --json lists all")
    return lines


def _time(found: Account) -> list[str]:
    seconds, measured, promised, expected = found.seconds, found.measured, found.promised, found.expected
    meant = seconds.elapsed - seconds.paused
    rows = [["where the time went", "time", "share", "promised", "expected"]]
    for name, part, share, *others in (
        ("productive steps", seconds.productive, None),
        ("evaluation, first start, last save", seconds.other, None),
        ("stalled by saves", seconds.stall, measured.stall, promised.stall, expected.stall),
        ("lost work", seconds.lost, measured.lost, promised.lost, expected.lost),
        ("restarts", seconds.restart, measured.restart, promised.restart, expected.restart),
        ("badput", None, measured.total, promised.total, expected.total),
    ):
        share = share if share is not None else part / meant if part is not None and meant else 0.0
        part = part if part is not None else seconds.stall + seconds.lost + seconds.restart
        rows.append([name, span(part), percent(share), *(percent(other) for other in others)])
    mtbi, *_ = found.assumptions
    return [
        *table(rows),
        f"promised: at the assumed figures and {found.configured_steps} steps between saves; "
        f"expected: at the measured ones and {found.current_steps}",
        f"target: at most {percent(found.target)} lost work"
        + ("; these figures and this interval cannot meet it" if promised.lost > found.target * 1.001 else ""),
        f"mean time between interruptions: assumed {span(mtbi.assumed)}, measured "
        + (f"{span(mtbi.measured)} (over {mtbi.over})" if mtbi.measured else f"not yet ({mtbi.over}; 3 are needed)"),
    ]


def _saves(found: Account) -> list[str]:
    outcomes = {name: sum(save.outcome == name for save in found.saves) for name in ("committed", "failed", "lost")}
    size = next((save.bytes for save in reversed(found.saves) if save.bytes is not None), None)
    counted = ", ".join(f"{count} {name}" for name, count in outcomes.items() if count or name == "committed")
    lines = [f"saves: {counted}" + (f", {size / 1e6:,.1f} MB each" if size else "")]
    rows = [["", "median", "p95", "largest", "first", "steady"]]
    for name, one in (
        ("training stands still", found.stall_s),
        ("write in the background", found.write_s),
        ("until durable", found.durable_s),
    ):
        if one.count:
            rows.append([name, *(span(value) for value in _figures(one))])
    if len(rows) > 1:
        lines += table(rows)
    failures = [save for save in found.saves if save.outcome == "failed"]
    lines += [f"failed at step {save.step}, attempt {save.attempt}: {save.reason}" for save in failures[-_SHOWN:]]
    return lines


def _figures(one: Spread) -> tuple[float | None, ...]:
    return one.median, one.p95, one.largest, one.first, one.steady


def _throughput(found: Account) -> list[str]:
    if not found.throughput:
        return ["throughput: not measured yet"]
    rows = [["throughput", "steps", "tokens/s (median)"]]
    for one in found.throughput:
        ranks = counted(one.world_size, "rank") if one.world_size else "ranks unknown"
        rows.append([ranks, str(one.steps), f"{one.tokens_per_s:,.0f}"])
    lines = table(rows)
    if found.tokens_per_s and found.goodput_tokens_per_s:
        lines.append(
            f"newest steps {found.tokens_per_s:,.0f} tokens/s; with interruptions, saves and restarts counted "
            f"{found.goodput_tokens_per_s:,.0f}"
        )
    return lines


def _interval(found: Account, config: Config) -> list[str]:
    retune = "retuned from what the run measures" if config.checkpoint.retune else "not retuned"
    lines = [f"interval: {found.current_steps} steps; {found.configured_steps} configured, {retune}"]
    if len(found.changes) > _SHOWN:
        lines.append(f"  {len(found.changes) - _SHOWN} earlier changes: --json lists all")
    for change in found.changes[-_SHOWN:]:
        at = f"attempt {change.attempt}" + (f", step {change.step}" if change.step is not None else "")
        figures = ", ".join(
            f"{name} {span(value)}"
            for name, value in (
                ("step", change.step_time_s),
                ("save", change.save_time_s),
                ("stall", change.save_stall_s),
                ("MTBI", change.mtbi_s),
            )
            if value is not None
        )
        why = "; ".join(part for part in (figures, change.warning) if part)
        lines.append(f"  {at}: {change.before} -> {change.every_steps}" + (f" ({why})" if why else ""))
    return lines


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows as aligned columns, the first `left` of them to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Picture

_COLOURS = {"reclaimed": "#e07b00", "killed": "#c62828", "interrupted": "#6a6a6a", "crashed": "#7b1fa2"}
_PARTS = (
    ("productive", "#2e7d32", "productive steps"),
    ("stall", "#fbc02d", "stalled by saves"),
    ("lost", "#c62828", "lost work"),
    ("restart", "#e07b00", "restarts"),
    ("other", "#b0bec5", "evaluation, first start, last save"),
    ("paused", "#eceff1", "paused"),
)


def draw(found: Account, lines: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Loss over steps with interruptions and checkpoints marked, and where the time went. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(5, 1))
    figure.suptitle(title, fontsize=12)
    _draw_loss(above, found, lines)
    _draw_time(below, found)
    figure.savefig(path, dpi=150)


def _draw_loss(axes: Axes, found: Account, lines: Sequence[Mapping[str, Any]]) -> None:
    curves: dict[tuple[bool, int], list[tuple[int, float]]] = {}
    for line in lines:
        attempt, step, loss = line.get("attempt"), line.get("step"), line.get("loss")
        if isinstance(attempt, int) and isinstance(step, int) and isinstance(loss, int | float):
            counts = (attempt, step) in found.counted
            # One curve of what counts; the rewound steps of each attempt apart.
            curves.setdefault((counts, 0 if counts else attempt), []).append((step, loss))
    labelled = set()
    for (counts, _), points in sorted(curves.items(), reverse=True):
        steps, losses = zip(*sorted(points), strict=True)
        label = "loss" if counts else "loss of steps done again"
        colour, width = ("#1565c0", 1.2 if len(points) < 1000 else 0.7) if counts else ("#ef9a9a", 3.0)
        axes.plot(
            steps, losses, color=colour, linewidth=width, zorder=3 if counts else 2,
            label=None if label in labelled else label,
        )  # fmt: skip
        labelled.add(label)
    committed = [save.step for save in found.saves if save.outcome == "committed" and save.step is not None]
    if committed:
        few = len(committed) <= 50
        axes.plot(
            committed, [0.02] * len(committed), "^" if few else "|", transform=axes.get_xaxis_transform(),
            color="#2e7d32", markersize=6 if few else 8, linestyle="none", zorder=4, label="checkpoint", clip_on=False,
        )  # fmt: skip
    width = 1.2 if len(found.interruptions) <= 50 else 0.5
    for kind in KINDS:
        for number, one in enumerate(one for one in found.interruptions if one.kind == kind):
            name = kind if number == 0 else None
            axes.axvline(one.step, color=_COLOURS[kind], linestyle="--", linewidth=width, zorder=1, label=name)
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
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    if left:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9, frameon=False)
