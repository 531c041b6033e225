"""The command line. What each command does is imported when it runs: `--help` must be instant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scaffold import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

_FOLDER = click.Path(path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class _Parsed(click.ParamType):  # type: ignore[type-arg]
    """A duration or a share."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        from scaffold import interval

        parse: Callable[[str], float] = getattr(interval, f"parse_{self.name}")
        try:
            return parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


_DURATION, _SHARE = _Parsed("duration"), _Parsed("share")


class _Commands(click.Group):
    """Turns refusals into click's errors, in one place."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Refused as refused:
            raise click.ClickException(str(refused)) from refused


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="scaffold", prog_name="scaffold")
def main() -> None:
    """PyTorch training repos for GPUs that can be taken away."""


def _pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for value in values:
        key, equals, answer = value.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE", ctx, param)
        pairs[key] = answer
    return pairs


@main.command()
@click.argument("path", type=_FOLDER)
@click.option("--defaults", is_flag=True, help="Ask nothing: take the default of every question not answered here.")
@click.option("-d", "data", metavar="KEY=VALUE", multiple=True, callback=_pairs, help="Answer a question.")
@click.option("--answers", "answers_file", type=_FILE, help="Answers from a YAML file; -d takes precedence.")
@click.option("--source", metavar="SRC", help="Another template: a git checkout, a git URL or a git bundle.")
@click.option("--ref", help="The template's tag, branch or commit.")
@click.option("--dry-run", is_flag=True, help="Show the answers and the interval; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; asks nothing, as with --defaults.")
@click.option("--git/--no-git", "git", default=None, help="Make a repository and its first commit (the default).")
def new(**options: Any) -> None:
    """Make a training repo in the new or empty folder PATH."""
    from scaffold.new import Request, create

    create(Request(**options))


@main.command()
@click.option("--mtbi", type=_DURATION, help="Mean time between interruptions, such as 4h.")
@click.option("--interruptions", "log", type=_FILE, help="Instead of --mtbi: a log, one interruption's time a line.")
@click.option("--step-time", type=_DURATION, required=True, help="Time of one optimizer step, such as 800ms.")
@click.option("--save-time", type=_DURATION, required=True, help="Until a checkpoint is safe on the disk, such as 60s.")
@click.option("--save-stall", type=_DURATION, help="How long it holds up training. [default: a tenth of --save-time]")
@click.option("--restart-time", type=_DURATION, default="5m", show_default=True, help="Interruption to first new step.")
@click.option("--badput", type=_SHARE, default="5%", show_default=True, help="Most that saves and lost work may cost.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw it: FILE.png or FILE.svg.")
def interval(
    mtbi: float | None,
    log: Path | None,
    step_time: float,
    save_time: float,
    save_stall: float | None,
    restart_time: float,
    badput: float,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Calculate how many steps to train between two saves."""
    if (mtbi is None) == (log is None):
        raise click.UsageError("give either --mtbi or --interruptions")
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise click.BadParameter(f"{plot} must end in .png or .svg", param_hint="--plot")
    from scaffold.interval import calculator, mtbi_from_log
    from scaffold.interval import plot as draw

    try:
        if mtbi is None:
            assert log is not None
            mtbi = mtbi_from_log(log)
        found = calculator.compute_interval(mtbi, step_time, save_time, save_stall, restart_time, badput)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if plot is not None:
        try:
            draw(found, plot)
        except OSError as error:
            raise click.ClickException(f"{plot} cannot be written: {error.strerror or error}") from error
    if as_json:
        import json

        click.echo(json.dumps(found._asdict(), indent=2))
    else:
        click.echo(calculator.table(found))


@main.command()
@click.argument("path", type=_FOLDER, default=".")
def update(path: Path) -> None:
    """Bring the project in PATH to the newest template.

    Plain `copier update` does the same; this also works under git settings that break it, and exits 1 on conflicts.
    """
    from scaffold.update import run

    run(path)


@main.command()
@click.argument("path", type=_FOLDER, default=".")
def doctor(path: Path) -> None:
    """Check that the project in PATH can be updated.

    Also shows where it differs from its template.
    """
    from scaffold.doctor import run

    run(path)
