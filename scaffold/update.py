"""`scaffold update`: Copier's update under any git settings, with its conflicts listed.

If anything fails, the project is restored: an update only begins in a clean project.
"""

from __future__ import annotations

from pathlib import Path

import click

from scaffold import Refused
from scaffold.git import git, isolate, require_git, succeeds
from scaffold.source import relink

ANSWERS = ".copier-answers.yml"


def run(project: Path) -> None:
    """Update the project. Raises `Refused` (exit 1), also when conflicts are left."""
    require_git()
    isolate()
    relink()
    _require_clean(project)
    answers = read_answers(project)
    newest = newest_commit(str(answers["_src_path"]))

    from copier import run_update

    from scaffold.render import one_line_errors

    before = answers["_commit"]
    try:
        with one_line_errors():
            run_update(project, vcs_ref=newest, overwrite=True, quiet=True, unsafe=False)
    except (Refused, click.UsageError, click.Abort):
        _put_back(project)
        raise
    conflicts = unresolved(project)
    changed = git("status", "--porcelain", "--", ".", cwd=project).splitlines()
    removed = git("diff", "--name-only", "--diff-filter=D", "--relative", "HEAD", "--", ".", cwd=project).splitlines()
    after = read_answers(project)["_commit"]
    if not changed:
        click.echo(f"{project} is up to date: template {after}")
        return
    click.echo(f"{project}: template {before} -> {after}, {len(changed)} files changed")
    for name in removed:
        click.echo(f"  removed by the template: {name} (its last content is in git)")
    if conflicts:
        raise Refused(f"conflicts in {', '.join(conflicts)}: resolve the marked places, then `git add` and commit")
    click.echo("Look at it with `git diff`, then commit all of it, new files too: git add --all && git commit")


def read_answers(project: Path) -> dict[str, object]:
    """The project's answers file; raises `Refused` if Copier could not update from it."""
    import yaml

    file = project / ANSWERS
    if not project.is_dir():
        raise Refused(f"{project} is not a folder")
    try:
        answers = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Refused(f"{project} was not made by `scaffold new`: it has no {ANSWERS}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise Refused(
            f"{file} cannot be read ({' '.join(str(error).split())}): `git log -p {ANSWERS}` has its earlier content"
        ) from error
    if not isinstance(answers, dict):
        raise Refused(f"{file} holds no answers: `git log -p {ANSWERS}` has its earlier content")
    for key in ("_commit", "_src_path"):
        if not isinstance(answers.get(key), str):
            raise Refused(
                f"{file} has no {key}, so Copier cannot tell what the project was made from: "
                f"`git log -p {ANSWERS}` has its earlier content"
            )
    return answers


def unresolved(project: Path) -> list[str]:
    """Files with conflicts: unmerged in git's index, or with rejected hunks beside them."""
    unmerged = git("diff", "--name-only", "--diff-filter=U", "--relative", "--", ".", cwd=project).splitlines()
    rejected = git("ls-files", "--others", "--", "*.rej", cwd=project).splitlines()
    return sorted({*unmerged, *rejected})


def _require_clean(project: Path) -> None:
    if not project.is_dir():
        raise Refused(f"{project} is not a folder")
    if not succeeds("rev-parse", "--is-inside-work-tree", cwd=project):
        raise Refused(f"{project} is not in a git repository that git trusts: `git init`, add and commit it first")
    if unresolved(project):
        raise Refused(f"{project} has unresolved conflicts: {', '.join(unresolved(project))}")
    if git("status", "--porcelain", "--", ".", cwd=project):
        raise Refused(f"{project} has uncommitted changes or new files: commit or stash them, then update")


def newest_commit(url: str) -> str | None:
    """The commit to update to where Copier's own choice would be the word HEAD with uncommitted changes mixed in."""
    source = Path(url).expanduser()
    if not source.is_dir() or git("tag", cwd=source):
        return None
    return git("rev-parse", "HEAD", cwd=source)


def _put_back(project: Path) -> None:
    """Undo what a failed update had done; there was nothing uncommitted before it."""
    git("restore", "--source=HEAD", "--staged", "--worktree", "--", ".", cwd=project)
    git("clean", "-d", "--force", "--quiet", "--", ".", cwd=project)
