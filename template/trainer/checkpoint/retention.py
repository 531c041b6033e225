"""Which checkpoints go, and how they go: counted on disk, after a commit, out of sight first and deleted later.

A checkpoint leaves by one rename to a hidden `.removing_…` (in manifest mode by deleting its COMMIT.json), under the
commit lock; its files are deleted afterwards, in the background, so that a slow disk never holds up a save.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.checkpoint.commit import COMMIT, Commit, Mode, complete, directories, fsync_directory, is_marked
from trainer.checkpoint.lease import commit_lock

_TEMPORARY = re.compile(r"\.step_\d{8,}\.(\d+)(?:\.\d+)?")
_REMOVING = ".removing_"


def expired(steps: Sequence[int], keep_last: int, keep_every_steps: int = 0) -> list[int]:
    """Which of the complete checkpoints at `steps` go: all but the newest `keep_last` (at least 1) and milestones."""
    newest = sorted(steps)[-max(1, keep_last) :]
    return [
        step
        for step in sorted(steps)
        if step not in newest and not (keep_every_steps and step > 0 and step % keep_every_steps == 0)
    ]


def prune(run_dir: Path, epoch: int, keep_last: int, keep_every_steps: int = 0, mode: Mode = "rename") -> list[Path]:
    """Take expired checkpoints away, those that somebody reads excepted.

    Returns:
        What is left to `delete`.

    Raises:
        Fenced, UnavailableError: as `commit_lock`.
        OSError
    """
    with commit_lock(run_dir, epoch):
        return take_away(run_dir, keep_last, keep_every_steps, mode)


def take_away(run_dir: Path, keep_last: int, keep_every_steps: int, mode: Mode) -> list[Path]:
    """`prune` for a caller that holds the commit lock."""
    found = {commit.step: commit for commit in complete(run_dir)}
    gone = []
    for step in expired(list(found), keep_last, keep_every_steps):
        with _unread(found[step].directory) as free:
            if free:
                gone.append(remove(found[step].directory, mode))
    if gone:
        fsync_directory(run_dir)
    return gone


def remove(directory: Path, mode: Mode) -> Path:
    """Make a checkpoint's directory no checkpoint, in one step. Returns what is left to `delete`. Raises OSError."""
    if mode == "manifest":
        (directory / COMMIT).unlink(missing_ok=True)
        return directory
    target = directory.with_name(f"{_REMOVING}{directory.name.lstrip('.')}.{uuid.uuid4().hex[:8]}")
    directory.rename(target)
    return target


def delete(paths: Sequence[Path]) -> None:
    """Delete what was taken away. Errors are left for the next sweep."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def sweep(run_dir: Path, epoch: int, mode: Mode = "rename", spare: Path | None = None) -> list[Path]:
    """Find what dead attempts left: unfinished saves of attempts before `epoch` and directories half deleted.

    With `spare`, unfinished saves of `epoch` itself go too, that one excepted: one save is in flight at a time, so the
    others failed.

    Returns:
        What is left to `delete`, out of the way already where the mount can rename.
    """
    left = []
    with contextlib.suppress(FileNotFoundError):
        for path in run_dir.iterdir():
            match = _TEMPORARY.fullmatch(path.name)
            if match and path != spare and (int(match[1]) < epoch or (spare is not None and int(match[1]) == epoch)):
                with contextlib.suppress(OSError):
                    left.append(remove(path, "rename"))
            elif path.name.startswith(_REMOVING):
                left.append(path)
    if mode == "manifest":
        left += [path for path in directories(run_dir) if path != spare and _never_committed(path, epoch)]
    return left


def _never_committed(directory: Path, epoch: int) -> bool:
    """Whether an object-store directory has no commit and only files of attempts before `epoch`."""
    if is_marked(directory) or (directory / COMMIT).exists():
        return False
    attempts = [int(match[1]) for path in directory.iterdir() if (match := re.search(r"[._]a(\d+)", path.name))]
    return max(attempts, default=0) < epoch


@contextlib.contextmanager
def reading(commit: Commit) -> Iterator[None]:
    """Hold a checkpoint against being pruned while it is read (a shared flock on its COMMIT.json). Raises OSError."""
    descriptor = os.open(commit.directory / COMMIT, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _unread(directory: Path) -> Iterator[bool]:
    """Whether nobody is `reading` the checkpoint; it stays so inside."""
    try:  # NFS locks exclusively what is open for writing only, object stores open nothing for that
        descriptor = os.open(directory / COMMIT, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        descriptor = os.open(directory / COMMIT, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # no locks on this mount
        yield True
    finally:
        os.close(descriptor)
