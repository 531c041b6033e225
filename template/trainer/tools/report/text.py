"""`python -m trainer report`: what interruptions and saves have cost this run, as a table, JSON and a picture."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trainer.checkpoint.commit import quarantined
from trainer.config.load import load_config
from trainer.config.settings import CheckpointConfig, Config
from trainer.ledger import KILLED
from trainer.outcome import ConfigError
from trainer.tools.report.account import Account, read_account
from trainer.tools.report.advice import suggestions
from trainer.tools.report.history import KINDS, End, median
from trainer.tools.report.plot import OTHER, draw
from trainer.wording import counted, percent, span

_ALIVE_S = 60.0  # a run whose newest record is older than this has ended
_SHOWN = 12  # interruptions and changes listed; JSON has all
_OUTCOMES = ("committed", "failed", "lost")  # of saves
_FAILURE = ("attempt", "step", "reason")
_CHANGE = (
    "time", "attempt", "step", "before", "every_steps", "step_time_s", "save_time_s", "save_stall_s", "mtbi_s",
    "warning",
)  # fmt: skip


def report(overrides: Sequence[str], as_json: bool = False, plot: Path | None = None) -> int:
    """Print the report of the run that the configuration names. Returns the exit code: 1 if there is nothing yet.

    Raises:
        ConfigError: the picture's name is neither .png nor .svg, or it cannot be written.
    """
    config = load_config(overrides)
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"command line: --plot is {str(plot)!r}; it must end in .png or .svg")
    run_dir = config.run_dir
    signs = [run_dir / "lease.json", *run_dir.glob("ledger*.jsonl"), *run_dir.glob("metrics*.jsonl")]
    age_s = max(0.0, time.time() - max((path.stat().st_mtime for path in signs if path.exists()), default=0.0))
    found = read_account(config, alive=age_s < _ALIVE_S)
    if not found.run.attempts:
        text = f"nothing recorded yet: {run_dir} has no ledger and no metrics; ./restart.sh starts the run"
        click.echo(text, err=True)
        return 1
    reason = found.run.attempts[-1].reason
    state = {
        None: f"running, last record {span(age_s)} ago",
        "finished": "finished",
        KILLED: f"stopped without a status {span(age_s)} ago",
    }.get(reason, f"stopped ({reason})")
    advice = suggestions(found, config.checkpoint, config.reclaim.grace_s)
    if as_json:
        click.echo(json.dumps(to_json(found, config, state, advice), indent=2))
    else:
        click.echo("\n".join(to_text(found, config, state, advice)))
    if plot is not None:
        try:
            draw(found, f"{config.run_name}: {state}", plot)
        except OSError as error:
            raise ConfigError(f"command line: --plot {plot} cannot be written ({error.strerror})") from None
        click.echo(f"drawn: {plot}", err=as_json)
    return 0


def to_json(found: Account, config: Config, state: str, advice: Sequence[str]) -> dict[str, Any]:
    """The report with keys that stay; seconds, shares of 1, Unix times. null: nothing was measured."""
    run, settings = found.run, config.checkpoint
    outcomes = {outcome: [save for save in run.saves if save.outcome == outcome] for outcome in _OUTCOMES}
    mtbi, *_ = found.assumptions
    return {
        "run": config.run_name,
        "directory": str(config.run_dir),
        "state": state,
        "last_step": found.last_step,
        "steps": config.train.steps,
        "attempts": [asdict(one) for one in run.attempts],
        "interruptions": {
            "count": len(run.interruptions),
            "by_kind": totals(run.interruptions),
            "list": [asdict(one) | {"flushed": not one.lost_steps} for one in run.interruptions],
        },
        "mtbi": {"measured_s": mtbi.measured, "assumed_s": mtbi.assumed, "over": mtbi.over},
        "seconds": asdict(found.seconds),
        "badput": {
            **{name: one._asdict() | {"total": one.total} for name, one in found.badput.items()},
            "target": settings.badput_target,
        },
        "saves": {
            **{outcome: len(saves) for outcome, saves in outcomes.items()},
            "bytes": _size(found),
            **{name: asdict(getattr(found, name)) for name in ("stall_s", "write_s", "durable_s")},
            "failures": [{name: getattr(save, name) for name in _FAILURE} for save in outcomes["failed"]],
        },
        "throughput": {
            "unit": found.unit,
            "units_per_s": found.units_per_s,
            "goodput_units_per_s": found.goodput_units_per_s,
            "by_world_size": found.throughput,
        },
        "interval": {
            "configured_steps": settings.every_steps,
            "current_steps": found.current_steps,
            "retune": settings.retune,
            "changes": [{name: getattr(change, name) for name in _CHANGE} for change in run.changes],
        },
        "quarantined": [path.name for path in quarantined(config.run_dir)],
        "assumptions": [asdict(one) for one in found.assumptions],
        "suggestions": list(advice),
    }


def _size(found: Account) -> int | None:
    """Bytes of the newest checkpoint."""
    return next((save.bytes for save in reversed(found.run.saves) if save.bytes is not None), None)


def totals(interruptions: Sequence[End]) -> dict[str, dict[str, Any]]:
    """Totals by kind, including kinds that never happened."""
    found = {kind: [one for one in interruptions if one.kind == kind] for kind in KINDS}
    return {
        kind: {
            "count": len(mine),
            "lost_steps": sum(one.lost_steps for one in mine),
            "lost_s": sum(one.lost_s for one in mine),
            "recovery_s": median([one.recovery_s for one in mine if one.recovery_s is not None]),
            "flushed": sum(not one.lost_steps for one in mine),  # nothing was lost
        }
        for kind, mine in found.items()
    }


def to_text(found: Account, config: Config, state: str, advice: Sequence[str]) -> list[str]:
    """The report as lines of at most 110 characters or so."""
    seconds = found.seconds
    trained = sum(one.last_step is not None for one in found.run.attempts)
    lines = [
        f"{config.run_name}: {state}; step {found.last_step} of {config.train.steps}, "
        f"{counted(trained, 'attempt')}, {span(seconds.elapsed)} from the first start"
        + (f", {span(seconds.paused)} paused" if seconds.paused else "")
    ]
    for part in (_interruptions, _time, _saves, _throughput, _interval):
        lines += ["", *part(found, config.checkpoint)]
    if damaged := quarantined(config.run_dir):
        names = ", ".join(path.name for path in damaged)
        lines += ["", f"quarantined, since their checksums did not match: {names}"]
    if advice:
        lines += ["", "suggestions (startup/nexgpu.yaml)", *(f"  {line}" for line in advice)]
    return lines


def _interruptions(found: Account, settings: CheckpointConfig) -> list[str]:
    interruptions = found.run.interruptions
    if not interruptions:
        return ["interruptions: none so far"]
    rows = [["interruptions", "count", "lost steps", "lost time", "recovery", "nothing lost"]]
    for kind, total in totals(interruptions).items():
        if count := total["count"]:
            costs = str(total["lost_steps"]), span(total["lost_s"]), span(total["recovery_s"])
            rows.append([kind, str(count), *costs, f"{total['flushed']} of {count}"])
    lines = [*table(rows), ""]
    rows = [["attempt", "kind", "at step", "lost steps", "lost time", "recovery", "save under way"]]
    for one in interruptions[-_SHOWN:]:
        kind = f"{one.kind} ({one.source})" if one.source else f"{one.kind}"
        costs = str(one.lost_steps), span(one.lost_s), span(one.recovery_s)
        rows.append([str(one.attempt), kind, str(one.step), *costs, one.save_in_flight or "none"])
    lines += table(rows, left=2)
    if len(interruptions) > _SHOWN:
        lines.append(f"and {len(interruptions) - _SHOWN} earlier ones: --json lists all")
    return lines


def _time(found: Account, settings: CheckpointConfig) -> list[str]:
    seconds, target = found.seconds, settings.badput_target
    missed = found.badput["promised"].lost > target * 1.001
    rows = [["where the time went", "time", "share", "promised", "expected"]]
    for name, part in (("productive steps", seconds.productive), (OTHER, seconds.other)):
        rows.append([name, span(part), percent(seconds.share(part))])
    for name, key, part in (
        ("stalled by saves", "stall", seconds.stall),
        ("lost work", "lost", seconds.lost),
        ("restarts", "restart", seconds.restart),
        ("badput", "total", seconds.stall + seconds.lost + seconds.restart),
    ):
        rows.append([name, span(part), *(percent(getattr(one, key)) for one in found.badput.values())])
    mtbi, *_ = found.assumptions
    return [
        *table(rows),
        f"promised: at the assumed figures and {settings.every_steps} steps between saves; "
        f"expected: at the measured ones and {found.current_steps}",
        f"target: at most {percent(target)} lost work"
        + ("; these figures and this interval cannot meet it" if missed else ""),
        f"mean time between interruptions: assumed {span(mtbi.assumed)}, measured "
        + (f"{span(mtbi.measured)} (over {mtbi.over})" if mtbi.measured else f"not yet ({mtbi.over}; 3 are needed)"),
    ]


def _saves(found: Account, settings: CheckpointConfig) -> list[str]:
    outcomes, size = Counter(save.outcome for save in found.run.saves), _size(found)
    counts = ", ".join(f"{outcomes[name]} {name}" for name in _OUTCOMES if outcomes[name] or name == "committed")
    lines = [f"saves: {counts}" + (f", {size / 1e6:,.1f} MB each" if size else "")]
    rows = [["", "median", "p95", "largest", "first", "steady"]]
    for name, one in (
        ("training stands still", found.stall_s),
        ("write in the background", found.write_s),
        ("until durable", found.durable_s),
    ):
        if one.count:
            rows.append([name, *map(span, (one.median, one.p95, one.largest, one.first, one.steady))])
    if len(rows) > 1:
        lines += table(rows)
    failures = [save for save in found.run.saves if save.outcome == "failed"]
    lines += [f"failed at step {save.step}, attempt {save.attempt}: {save.reason}" for save in failures[-_SHOWN:]]
    return lines


def _throughput(found: Account, settings: CheckpointConfig) -> list[str]:
    if not found.throughput:
        return ["throughput: not measured yet"]
    rows = [["throughput", "steps", f"{found.unit}/s (median)"]]
    for one in found.throughput:
        ranks = counted(one["world_size"], "rank") if one["world_size"] else "ranks unknown"
        rows.append([ranks, str(one["steps"]), f"{one['units_per_s']:,.0f}"])
    lines = table(rows)
    if found.units_per_s and found.goodput_units_per_s:
        lines.append(
            f"newest steps {found.units_per_s:,.0f} {found.unit}/s; with interruptions, saves and restarts counted "
            f"{found.goodput_units_per_s:,.0f}"
        )
    return lines


def _interval(found: Account, settings: CheckpointConfig) -> list[str]:
    changes = found.run.changes
    retune = "retuned from what the run measures" if settings.retune else "not retuned"
    lines = [f"interval: {found.current_steps} steps; {settings.every_steps} configured, {retune}"]
    if len(changes) > _SHOWN:
        lines.append(f"  {len(changes) - _SHOWN} earlier changes: --json lists all")
    for change in changes[-_SHOWN:]:
        at = f"attempt {change.attempt}" + (f", step {change.step}" if change.step is not None else "")
        figures = {"step": change.step_time_s, "save": change.save_time_s, "stall": change.save_stall_s}
        figures["MTBI"] = change.mtbi_s
        measured = ", ".join(f"{name} {span(value)}" for name, value in figures.items() if value is not None)
        why = "; ".join(filter(None, (measured, change.warning)))
        lines.append(f"  {at}: {change.before} -> {change.every_steps}" + (f" ({why})" if why else ""))
    return lines


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows as aligned columns, the first `left` of them to the left, the others to the right."""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    sides = ["<"] * left + [">"] * (len(widths) - left)
    cells = ([f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False)] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]
