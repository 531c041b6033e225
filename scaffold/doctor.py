"""`scaffold doctor`: whether this project can be updated, what would get in the way of an update, and where the project
differs from its template. It changes nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from scaffold import Refused
from scaffold.git import TRAPS, GitError, git, isolate, require_git, succeeds
from scaffold.source import relink
from scaffold.update import ANSWERS, newest_commit, read_answers, unresolved

_COLORS = {"ok": "green", "warn": "yellow", "FAIL": "red"}


def run(project: Path) -> None:
    """Print one line for each finding. Exits 1 if anything would stop an update."""
    findings: list[str] = []

    def say(verdict: str, text: str) -> None:
        findings.append(verdict)
        click.echo(f"{click.style(f'{verdict:<4}', fg=_COLORS.get(verdict))}  {text}")

    require_git()
    answers = read_answers(project)
    ignore_file = _ignore_file(project)
    _check_settings(project, say)
    isolate()
    relink()
    _check_repository(project, say)
    with tempfile.TemporaryDirectory(prefix="scaffold-doctor-") as scratch:
        _check_template(project, answers, ignore_file, Path(scratch), say)
    if failures := findings.count("FAIL"):
        raise Refused(f"{failures} of {len(findings)} findings would stop an update")


def _check_settings(project: Path, say: Callable[[str, str], None]) -> None:
    """Git settings of the user with which plain `copier update` fails or hides what it did."""
    for key in TRAPS:
        value = _setting(key, project)
        if key == "status.showUntrackedFiles" and value == "no":
            say("warn", f"git's {key} is no: plain `copier update` hides its rejects; use `scaffold update`")
        if key == "core.hooksPath" and value:
            say("warn", f"git's {key} is {value}: its hooks can break plain `copier update`; use `scaffold update`")
    if _setting("protocol.file.allow", project) == "never":
        say("warn", "git's protocol.file.allow is never: templates on this machine cannot be read")


def _check_repository(project: Path, say: Callable[[str, str], None]) -> None:
    if not succeeds("rev-parse", "--is-inside-work-tree", cwd=project):
        say("FAIL", "not in a git repository that git trusts: `git init`, add and commit (or see git's safe.directory)")
        return
    if not succeeds("ls-files", "--error-unmatch", ANSWERS, cwd=project):
        say("FAIL", f"{ANSWERS} is not committed: add and commit it")
    if conflicts := unresolved(project):
        say("FAIL", f"unresolved conflicts: {', '.join(conflicts)}")
    elif git("status", "--porcelain", "--", ".", cwd=project):
        say("warn", "uncommitted changes or new files: commit or stash them before an update")
    else:
        say("ok", "in git, everything committed")


def _check_template(
    project: Path,
    answers: dict[str, object],
    ignore_file: str,
    scratch: Path,
    say: Callable[[str, str], None],
) -> None:
    from scaffold.render import is_derived, one_line_errors, render

    url, commit = str(answers["_src_path"]), str(answers["_commit"])
    if not (url.startswith(("/", "~")) or "://" in url or ":" in url):
        say("FAIL", f"{ANSWERS}: _src_path {url} is relative: write the template's absolute path, and commit that")
        return
    given = {key: value for key, value in answers.items() if not key.startswith("_")}
    old = scratch / "old" / project.resolve().name
    derived: list[str] = []
    try:
        with one_line_errors():
            asked = render(url, commit, old, given, defaults=True, write=False)
            derived = [key for key in given if is_derived(asked.questions.get(key, {}))]
            given = {key: value for key, value in given.items() if key not in derived}  # Copier, too, drops them
            rendered = render(url, commit, old, given, defaults=True)
    except (Refused, click.UsageError) as error:
        say("FAIL", f"the template {url} at {commit} cannot be rendered with {ANSWERS}: {error}")
        return
    say("ok", f"template {url} at {commit}")
    if newest_commit(url) and git("status", "--porcelain", cwd=Path(url).expanduser()):
        say("warn", "the template has uncommitted changes, which plain `copier update` would mix in: commit them first")

    unknown = [key for key in given if key not in rendered.questions]
    open_questions = [key for key in rendered.answers if key not in given]
    if unknown:
        say("warn", f"{ANSWERS} answers what the template does not ask: {', '.join(unknown)}")
    if derived:
        say("warn", f"{ANSWERS} sets computed values, which has no effect: {', '.join(derived)}")
    if open_questions:
        say("warn", f"{ANSWERS} does not answer all questions; an update will ask: {', '.join(open_questions)}")
    if not (unknown or derived or open_questions):
        say("ok", f"{ANSWERS} answers all {len(given)} questions, and nothing else")

    files = _files(old)
    if ignored := _ignored(project, files, ignore_file):
        say("warn", f"git ignores files of the template, so an update can lose edits of them: {', '.join(ignored)}")
    else:
        say("ok", "git ignores none of the template's files")
    _compare_newest(project, url, commit, given, old, scratch, say)
    files = [name for name in files if name != ANSWERS]
    missing = [name for name in files if not (project / name).exists()]
    edited = [name for name in files if name not in missing and not _same(old / name, project / name)]
    for verb, names in (("changed here", edited), ("deleted here", missing)):
        if names:
            say("info", f"{verb} since the template: {', '.join(names)}")
    if not (edited or missing):
        say("info", f"all {len(files)} files are as the template has them")


def _compare_newest(
    project: Path,
    url: str,
    commit: str,
    given: dict[str, object],
    old: Path,
    scratch: Path,
    say: Callable[[str, str], None],
) -> None:
    from scaffold.render import one_line_errors, render

    new = scratch / "new" / project.resolve().name
    try:
        with one_line_errors():
            newest = render(url, newest_commit(url), new, given, defaults=True)
    except (Refused, click.UsageError) as error:
        say("FAIL", f"the newest template cannot be rendered with {ANSWERS}: {error}")
        return
    names = {*_files(old), *_files(new)} - {ANSWERS}
    owners = (project / "tasks").is_dir()  # no update touches it
    changed = sorted(
        name for name in names if not (owners and name.startswith("tasks/")) and not _same(old / name, new / name)
    )
    if changed:
        say("info", f"template {newest.commit} is there; `copier update` would bring changes of: {', '.join(changed)}")
    else:
        say("ok", f"nothing newer than template {commit}")


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _same(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


def _setting(key: str, project: Path) -> str:
    try:
        return git("config", "--get", key, cwd=project)
    except GitError:
        return ""


def _ignore_file(project: Path) -> str:
    """The user's own ignore file, wherever git would look for it."""
    configured = _setting("core.excludesFile", project)
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return str(Path(configured or f"{base}/git/ignore").expanduser())


def _ignored(project: Path, files: list[str], ignore_file: str) -> list[str]:
    """Those of the files that git would ignore; also committed ones, since Copier compares in scratch repositories."""
    arguments = ("-c", f"core.excludesFile={ignore_file}", "check-ignore", "--no-index", "--stdin")
    try:
        return git(*arguments, cwd=project, stdin="\n".join(files)).splitlines()
    except GitError:  # exit 1: none
        return []
