"""The command line of `python -m trainer`; what each command does is in the file of its name."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trainer.outcome import CONFIG, RECLAIMED, ConfigError, Expected, Reason, Status, exit_code
from trainer.streams import make_streams_safe


class _Group(click.Group):
    """One clear line and the right exit code for whatever a user can cause."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except Expected as error:
            click.echo(error.reason.line(str(error)), err=True)
            sys.exit(exit_code(error.reason))
        except click.UsageError as error:
            error.show()
            sys.exit(CONFIG)  # click's 2 would look like a crash to what starts the run


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Train, resume and inspect a run that may be interrupted at any time."""
    make_streams_safe()


def _settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments that every command takes: settings as dotted keys."""
    return click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(command)


def _run(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `launch` and `train`."""

    @click.option("--gpus", type=click.IntRange(min=1), help="Ranks on this node, instead of one for each GPU found.")
    @click.option("--accept", metavar="KEY,...", default="", help="Settings that may differ from the checkpoint's.")
    @_settings
    @functools.wraps(command)
    def wrapped(*args: Any, accept: str, **kwargs: Any) -> Any:
        return command(*args, accepted=tuple(key.strip() for key in accept.split(",") if key.strip()), **kwargs)

    return wrapped


@main.command()
@_run
def launch(overrides: tuple[str, ...], gpus: int | None, accepted: tuple[str, ...]) -> None:
    """Start training on this node, or resume it.

    Restarts it after crashes and stops it cleanly at a reclaim.
    """
    from trainer.launch.supervisor import launch as run

    sys.exit(run(overrides, gpus=gpus, accepted=accepted))


@main.command()
@_run
@click.option("--runtime", type=click.Path(path_type=Path), hidden=True)
@click.option("--attempt", type=int, hidden=True)
def train(
    overrides: tuple[str, ...],
    gpus: int | None,
    accepted: tuple[str, ...],
    runtime: Path | None,
    attempt: int | None,
) -> None:
    """Run one rank.

    `launch` starts one of these for each GPU.
    """
    from trainer.reclaim.rank import prepare_rank

    prepare_rank(runtime)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    reason, step, message, again = Reason.CRASHED, 0, "", RECLAIMED
    try:
        from trainer.config.load import load_config

        if gpus is not None and gpus != ranks:
            raise ConfigError(f"--gpus is {gpus} and train is 1 of {ranks} ranks; start {gpus} of them with launch")
        config = load_config(overrides)
        again = config.restart.exit_reclaimed
        from trainer.run import Start
        from trainer.task import build_task
        from trainer.train import train as run

        reason, step = run(config, build_task(config), Start(runtime, attempt, accepted))
    except Expected as error:
        reason, message = error.reason, _last_line(error)
    except BaseException:
        message = traceback.format_exc()
    if runtime is not None:  # the launcher shows what the rank that failed first has written
        Status(reason, step, message, rank).write(runtime)
    elif message:
        click.echo(message if reason is Reason.CRASHED else reason.line(message), err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    if not reason.is_clean:
        os._exit(exit_code(reason, again))  # peers may be gone, data-loader workers run: no destructor may wait
    sys.exit(0 if runtime is not None else exit_code(reason, again))  # to torchrun anything else is a failure


def _last_line(error: Exception) -> str:
    """The text of an error; of one that was raised in a data-loader worker, its own text, without the traceback."""
    return str(error).strip().rpartition("\n")[2].removeprefix(f"{type(error).__module__}.{type(error).__name__}: ")


@main.command()
@click.option("--save-ranks", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--resume-ranks", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--steps", type=click.IntRange(min=4), default=24, show_default=True, help="Steps of each run.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for the result; default: ./drill")
@_settings
def drill(overrides: tuple[str, ...], save_ranks: int, resume_ranks: int, steps: int, output: Path | None) -> None:
    """Rehearse a recovery.

    Trains, kills, resumes on another number of ranks, and compares with a run that was never interrupted.
    """
    from trainer.tools.drill import drill as run

    sys.exit(run(overrides, save_ranks=save_ranks, resume_ranks=resume_ranks, steps=steps, output=output))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_settings
def doctor(overrides: tuple[str, ...], as_json: bool) -> None:
    """Check this machine and this configuration.

    Says whether a run here would survive an interruption, and what to change.
    """
    from trainer.tools.doctor import doctor as run

    sys.exit(run(overrides, as_json=as_json))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the run as .png or .svg.")
@_settings
def report(overrides: tuple[str, ...], as_json: bool, plot: Path | None) -> None:
    """Report what interruptions and saves have cost this run."""
    from trainer.tools.report.text import report as run

    sys.exit(run(overrides, as_json=as_json, plot=plot))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_settings
def interval(overrides: tuple[str, ...], as_json: bool) -> None:
    """Show the save interval and how it is calculated."""
    from trainer.config.load import load_config
    from trainer.interval import IntervalError, compute_interval, table

    settings = load_config(overrides).checkpoint
    try:
        found = compute_interval(**settings.figures)
    except IntervalError as error:
        raise ConfigError(f"checkpoint: {error}") from None
    if as_json:
        click.echo(json.dumps(found._asdict(), indent=2))
        return
    click.echo(table(found))
    if found.save_interval_steps != settings.every_steps:
        click.echo(f"checkpoint.every_steps is {settings.every_steps}")


@main.group()
def checkpoints() -> None:
    """List, verify and prune checkpoints."""


@checkpoints.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_settings
def list_checkpoints(overrides: tuple[str, ...], as_json: bool) -> None:
    """Every checkpoint with its step, size, age, world size and state."""
    from trainer.config.load import load_config
    from trainer.tools import inventory

    sys.exit(inventory.show(load_config(overrides).run_dir, as_json=as_json))


@checkpoints.command("verify")
@click.option("--step", type=int, help="Only this one.")
@_settings
def verify_checkpoints(overrides: tuple[str, ...], step: int | None) -> None:
    """Read every byte of the complete checkpoints and compare checksums. Exit 1 if one is damaged."""
    from trainer.config.load import load_config
    from trainer.tools import inventory

    sys.exit(inventory.verify(load_config(overrides).run_dir, step))


@checkpoints.command("prune")
@click.option("--keep", type=click.IntRange(min=1), help="Complete checkpoints that stay; default: keep_last.")
@_settings
def prune_checkpoints(overrides: tuple[str, ...], keep: int | None) -> None:
    """Remove older complete checkpoints and the leftovers of attempts that have ended."""
    from trainer.config.load import load_config
    from trainer.tools import inventory

    sys.exit(inventory.prune(load_config(overrides), keep))


@main.command()
@click.option("--step", type=int, help="Which checkpoint; default: the newest complete one.")
@click.option("--averaged", is_flag=True, help="Take the averaged weights (optim.ema_decay).")
@click.argument("output", type=click.Path(path_type=Path))
@_settings
def export(overrides: tuple[str, ...], output: Path, step: int | None, averaged: bool) -> None:
    """Write a checkpoint's model to OUTPUT, as safetensors."""
    from trainer.tools.export import export as run

    sys.exit(run(overrides, output, step=step, averaged=averaged))
