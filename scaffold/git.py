"""Git, called so that neither a hook's variables nor a user's settings change what it does here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from scaffold import Refused

# Set inside git's hooks and aliases; inherited, they would point every call at another repository.
_REPOSITORY_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
)

# Settings with which an update loses edits or stops half way, and what they must be instead: hooks that know nothing
# of Copier's scratch repositories, a personal ignore file that hides rendered files, untracked files not listed.
TRAPS = {"core.hooksPath": os.devnull, "core.excludesFile": "", "status.showUntrackedFiles": "normal"}


class GitError(Refused):
    """Git is missing or refused; one line, git's own reason."""


def isolate() -> None:
    """Free this process from the variables and settings above; Copier's calls of git inherit it.

    Call it before Copier is imported: its subprocess library copies the environment at import. The user's
    configuration files are not touched.
    """
    for name in _REPOSITORY_VARIABLES:
        os.environ.pop(name, None)
    count = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    for number, (key, value) in enumerate(TRAPS.items(), start=count):
        os.environ[f"GIT_CONFIG_KEY_{number}"] = key
        os.environ[f"GIT_CONFIG_VALUE_{number}"] = value
    os.environ["GIT_CONFIG_COUNT"] = str(count + len(TRAPS))


def require_git() -> None:
    """Raise `GitError` where there is no git."""
    if shutil.which("git") is None:
        raise GitError("git is needed and was not found on PATH: install it, then run this again")


def git(*arguments: str, cwd: Path, stdin: str | None = None) -> str:
    """Run git in `cwd` and return what it printed, stripped; raises `GitError` with the last line it complained in."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.quotePath=false", *arguments],
            cwd=cwd,
            input=stdin,
            capture_output=True,
            text=True,
            errors="surrogateescape",
        )
    except OSError as error:
        raise GitError(f"git {arguments[0]} could not be run in {cwd}: {error.strerror}") from error
    if done.returncode:
        complaint = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit {done.returncode}"]
        raise GitError(f"git {arguments[0]} failed in {cwd}: {complaint[-1].strip()}")
    return done.stdout.strip()


def succeeds(*arguments: str, cwd: Path) -> bool:
    """Whether git says yes (exit 0)."""
    try:
        git(*arguments, cwd=cwd)
    except GitError:
        return False
    return True
