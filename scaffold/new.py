"""`scaffold new`: find the template, ask, show what follows, render, make the first commit.

The project is put together in a hidden folder beside its place, first commit included, and moved there at the end:
whatever goes wrong before leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scaffold import Refused
from scaffold.git import GitError, git, isolate, require_git, succeeds
from scaffold.source import Source, resolve

if TYPE_CHECKING:
    from scaffold.render import Rendered

_STAND_IN = ("-c", "user.name=scaffold", "-c", "user.email=scaffold@localhost")


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    path: Path
    data: Mapping[str, str] = field(default_factory=dict)  # of -d
    answers_file: Path | None = None
    defaults: bool = False
    source: str | None = None
    ref: str | None = None
    dry_run: bool = False
    as_json: bool = False
    git: bool | None = None  # None: unless the project lies in a repository that tracks it


def create(request: Request) -> None:
    """Make the project. Raises `Refused` (exit 1) or `click.UsageError` (exit 2), one line each."""
    target = request.path.absolute()
    asking = not (request.defaults or request.as_json)  # a program that reads JSON cannot be asked
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: leave nothing behind
    require_git()
    isolate()
    _require_room(target)
    if asking and not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask on: pass --defaults, with -d KEY=VALUE as needed")
    given = {**_read_answers(request.answers_file), **request.data}
    source = resolve(request.source, request.ref)

    from scaffold.interval import calculator, from_answers
    from scaffold.render import one_line_errors, render

    notes = list(source.notes)
    with one_line_errors(), _beside(target) as staging:
        rendered, committed = None, False
        if asking or given or request.dry_run or request.as_json:
            rendered = _ask(source, staging, given, request, asking)
        interval = from_answers(rendered.answers) if rendered else None
        if asking:
            if interval:
                click.echo("\n" + calculator.table(interval) + "\n")
            if not request.dry_run:
                click.confirm(f"Write the project to {request.path}?", default=True, abort=True)
        again = _command(request, _chosen(source, staging, rendered.answers) if asking and rendered else given)
        if not request.dry_run:
            answers = rendered.answers if rendered else {}
            rendered = render(source.url, source.ref, staging, answers, defaults=True)
            interval = from_answers(rendered.answers)
            _require_updatable(rendered, source)
            committed = _first_commit(staging, target, request.git, notes)
            _move(staging, target)
        assert rendered is not None

    report = {
        "path": str(target),
        "written": not request.dry_run,
        "committed": committed,
        "source": source.url,
        "commit": rendered.commit,
        "answers": rendered.answers,
        "derived": rendered.derived,
        "interval": interval._asdict() if interval else None,
        "next": [f"cd {shlex.quote(str(request.path))}", "bash startup/onstart.sh", "./restart.sh"],
        "command": again,
        "notes": notes,
    }
    if request.as_json:
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        if interval and not asking:
            click.echo(calculator.table(interval) + "\n")
        _tell(request, report, asking)


def _tell(request: Request, report: Mapping[str, Any], asking: bool) -> None:
    """The messages at the end."""
    if request.dry_run:
        if not asking:
            click.echo("Answers:")
            for key, value in report["answers"].items():
                click.echo(f"  {key}: {_typed(value)}")
        click.echo("Nothing was written.")
    else:
        click.echo(f"{request.path} is ready{', with its first commit' if report['committed'] else ''}. Next:")
        why = ("", "  # sets up .venv and trains; Ctrl-C saves and stops", "  # carries on from the newest checkpoint")
        width = max(map(len, report["next"]))
        for command, purpose in zip(report["next"], why, strict=True):
            click.echo(f"  {command:<{width}}{purpose}".rstrip())
    click.echo(f"The same without questions:\n  {report['command']}")
    for note in report["notes"]:
        click.echo(f"Note: {note}", err=True)


def _require_room(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Refused(f"{target} exists and is not an empty folder: choose another path")
    if target.is_symlink():
        raise Refused(f"{target} is a broken link: choose another path")


def _read_answers(file: Path | None) -> dict[str, Any]:
    """The answers in a YAML file; another project's `.copier-answers.yml` will do."""
    if file is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise Refused(f"--answers {file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise Refused(f"--answers {file} holds no answers: it must be YAML lines of KEY: VALUE")
    return {key: value for key, value in content.items() if not key.startswith("_")}


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A folder of the target's name in a hidden one on the same disk, gone at the end."""
    place = target
    while not place.is_dir():
        place = place.parent
    try:
        hidden = Path(tempfile.mkdtemp(prefix=".scaffold-", dir=place))
    except OSError as error:
        raise Refused(f"{place} cannot be written to: {error.strerror}") from error
    try:
        yield hidden / target.resolve().name
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _move(staging: Path, target: Path) -> None:
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(target)
        return
    # The empty folder that was there stays: it may be a mount, or the current folder of a shell.
    for child in staging.iterdir():
        child.rename(target / child.name)


def _ask(source: Source, staging: Path, given: Mapping[str, Any], request: Request, asking: bool) -> Rendered:
    """Everything but the writing: ask, compute, and check what was given against the questions there are."""
    from scaffold.render import is_derived, render

    try:
        rendered = render(source.url, source.ref, staging, given, defaults=not asking, write=False)
    except (ValueError, TypeError) as error:
        _name_the_question(error, given)
        raise
    for key in given:
        question = rendered.questions.get(key)
        if question is not None and not is_derived(question):
            continue
        problem = "the template has no such question" if question is None else "it is computed from the answers"
        if key in request.data:
            raise click.UsageError(f"-d {key}={request.data[key]}: {problem}")
        raise Refused(f"--answers {request.answers_file}: {key}: {problem}")
    return rendered


def _name_the_question(error: Exception, given: Mapping[str, Any]) -> None:
    """Copier says "invalid literal for int() with base 10: 'abc'" and leaves the question out; name the likely one."""
    text = " ".join(str(error).split())
    if "question" in text.lower():
        return
    culprits = [key for key, value in given.items() if repr(value) in text or f"'{value}'" in text]
    if culprits:
        if text.startswith("invalid literal for int()"):
            text = f"{given[culprits[0]]!r} is not a whole number"
        raise Refused(f"{culprits[0]}: {text}") from error


def _require_updatable(rendered: Rendered, source: Source) -> None:
    if not rendered.commit:
        raise Refused(
            f"git cannot tell the commit of the template {source.url} (is it yours?): the project could not be updated"
        )


def _first_commit(staging: Path, target: Path, wanted: bool | None, notes: list[str]) -> bool:
    """Make the project a repository with one commit, unless that is not wanted or it is inside another repository."""
    if wanted is False:
        notes.append("not in git yet: `copier update` needs the project committed")
        return False
    if wanted is None and (outer := _tracking_repository(target)):
        notes.append(f"it is inside the repository {outer}: commit it there (--git makes it a repository of its own)")
        return False
    try:
        git("init", "--quiet", "--initial-branch=main", cwd=staging)
        git("add", "--all", cwd=staging)
        identity: tuple[str, ...] = ()
        if not succeeds("var", "GIT_AUTHOR_IDENT", cwd=staging) or not succeeds("config", "user.email", cwd=staging):
            identity = _STAND_IN
            notes.append("git does not know you yet: the first commit is by `scaffold`; set user.name and user.email")
        git(*identity, "commit", "--quiet", "--message", "Project as generated by scaffold new", cwd=staging)
    except GitError as error:
        notes.append(f"the files are staged, not committed ({error}): commit them yourself")
        return False
    return True


def _tracking_repository(target: Path) -> str:
    """The repository around `target` that does not ignore it, or nothing."""
    place = target.parent
    while not place.is_dir():
        place = place.parent
    try:
        outer = git("rev-parse", "--show-toplevel", cwd=place)
    except GitError:
        return ""
    return "" if succeeds("check-ignore", "--quiet", str(target), cwd=place) else outer


def _chosen(source: Source, staging: Path, answers: Mapping[str, Any]) -> dict[str, Any]:
    """The answers that differ from what `--defaults` alone gives, and those whose default names one that does."""
    from scaffold.render import render

    plain = render(source.url, source.ref, staging, {}, defaults=True, write=False)
    chosen: dict[str, Any] = {}
    for key, answer in answers.items():
        names = re.findall(r"\w+", str(plain.questions[key].get("default")))
        if answer != plain.answers.get(key) or not chosen.keys().isdisjoint(names):
            chosen[key] = answer
    return chosen


def _command(request: Request, data: Mapping[str, Any]) -> str:
    words = ["scaffold", "new", str(request.path), "--defaults"]
    for key, value in data.items():
        words += ["-d", f"{key}={_typed(value)}"]
    if request.source:
        words += ["--source", request.source]
    if request.ref:
        words += ["--ref", request.ref]
    if request.git is not None:
        words.append("--git" if request.git else "--no-git")
    return shlex.join(words)


def _typed(value: Any) -> str:
    """A value as one types it after -d."""
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
