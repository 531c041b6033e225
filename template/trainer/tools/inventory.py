"""`python -m trainer checkpoints list|verify|prune`: what is on the disk, for people."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from trainer.checkpoint import commit as commits
from trainer.checkpoint import retention
from trainer.checkpoint.commit_mode import HIDDEN, MODES
from trainer.checkpoint.lease import Fenced, commit_lock, current_epoch
from trainer.config.settings import Config
from trainer.interval import format_duration
from trainer.outcome import Damaged, UnavailableError
from trainer.storage import volume
from trainer.wording import counted

_KNOWN = ("step", "samples", "attempt", "bytes", "world_size", "time", "torch")  # of a checkpoint that can be read


def entries(run_dir: Path) -> list[dict[str, Any]]:
    """Everything of a run that has to do with checkpoints; complete ones first, newest first. Reads no shards."""
    found: list[dict[str, Any]] = []
    for directory in commits.directories(run_dir):
        try:
            commit = commits.read_commit(directory)
            commits.check_sizes(commit)
        except Damaged as damage:
            found.append({"name": directory.name, "state": "damaged", "problem": str(damage)})
        else:
            state = "quarantined" if commits.is_marked(directory) else "complete"
            known = {name: getattr(commit, name) for name in _KNOWN}
            found.append({"name": directory.name, "state": state, "problem": "", **known})
    states = {"corrupt_": "quarantined", ".step_": "unfinished", HIDDEN: "being removed"}
    for path in sorted(run_dir.iterdir() if run_dir.is_dir() else []):
        for prefix, state in states.items():
            if path.name.startswith(prefix) and path.is_dir():
                found.append({"name": path.name, "state": state, "problem": ""})
    return found


def show(run_dir: Path, *, as_json: bool) -> int:
    """Print every checkpoint with its size, age, world size and state. Returns the exit code."""
    found = entries(run_dir)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif not found:
        click.echo(f"{run_dir} holds no checkpoint")
    else:
        for entry in found:
            about = entry["problem"]
            if "step" in entry:
                age = format_duration(round(max(0.0, time.time() - entry["time"])))
                size, ranks = f"{entry['bytes'] / 1e6:.1f} MB", counted(entry["world_size"], "rank")
                about = f"{size:>12}  {ranks:>9}  attempt {entry['attempt']}  {age} old"
            click.echo(f"{entry['name']:<28} {entry['state']:<14} {about}".rstrip())
    return 0


def verify(run_dir: Path, step: int | None = None) -> int:
    """Read every byte of the complete checkpoints (or that of `step`); say which match. Returns the exit code."""
    directories = [path for path in commits.directories(run_dir) if step in (None, commits.step_of(path.name))]
    if not directories:
        click.echo(f"{run_dir} holds no checkpoint" + ("" if step is None else f" of step {step}"))
        return 0 if step is None else 1
    bad = 0
    for directory in directories:
        begin = time.monotonic()
        try:
            commit = commits.read_commit(directory)
            commits.verify(commit)
        except Damaged as damage:
            bad += 1
            click.echo(f"{directory.name}: DAMAGED: {damage}")
            continue
        took_s = time.monotonic() - begin
        click.echo(f"{directory.name}: whole, {len(commit.files)} files, {commit.bytes / 1e6:.1f} MB in {took_s:.2f} s")
    return 1 if bad else 0


def prune(config: Config, keep: int | None = None) -> int:
    """Remove all but the newest `keep` complete checkpoints and the milestones, and what ended attempts left."""
    run_dir, settings = config.run_dir, config.checkpoint
    if not run_dir.is_dir():
        click.echo(f"{run_dir} holds no checkpoint")
        return 0
    mode = MODES[volume.commit_mode(config)]
    epoch = current_epoch(run_dir)
    settings = replace(settings, keep_last=keep or settings.keep_last)
    try:
        with commit_lock(run_dir, epoch):
            gone = retention.expire(run_dir, settings, mode)
    except Fenced as error:
        raise UnavailableError(str(error)) from None
    left = [path for path in retention.sweep(run_dir, epoch, mode) if path not in gone]
    retention.delete_files([*gone, *left])
    kept = len(commits.complete(run_dir))
    click.echo(f"removed: checkpoints {len(gone)}, leftovers {len(left)}; kept: {kept}")
    return 0
