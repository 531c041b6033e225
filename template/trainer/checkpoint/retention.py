"""Which checkpoints go: counted on disk, after a commit, hidden first and deleted later.

A checkpoint is hidden in one step under the commit lock (`CommitMode.hide`); its files are deleted afterwards, in the
background, so that a slow disk never holds up a save.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.checkpoint.commit import COMMIT, Commit, attempt_of, complete, fsync_directory, quarantined
from trainer.checkpoint.commit_mode import HIDDEN, MODES, CommitMode
from trainer.config.settings import CheckpointConfig

KEEP_QUARANTINED = 3


def expired(steps: Sequence[int], keep_last: int, keep_every_steps: int = 0) -> list[int]:
    """Which of the complete checkpoints at `steps` go: all but the newest `keep_last` (at least 1) and milestones."""
    newest = sorted(steps)[-max(1, keep_last) :]
    return [
        step
        for step in sorted(steps)
        if step not in newest and not (keep_every_steps and step > 0 and step % keep_every_steps == 0)
    ]


def expire(run_dir: Path, settings: CheckpointConfig, mode: CommitMode) -> list[Path]:
    """Hide expired checkpoints, except those that are being read, and all but the newest few that are quarantined. The
    caller holds the commit lock.

    Returns:
        What is left for `delete_files`.

    Raises:
        OSError
    """
    found = {commit.step: commit for commit in complete(run_dir)}
    gone = []
    for step in expired(list(found), settings.keep_last, settings.keep_every_steps):
        with _unread(found[step].directory) as unread:
            if unread:
                gone.append(mode.hide(found[step].directory))
    gone += [mode.hide(path) for path in quarantined(run_dir)[:-KEEP_QUARANTINED]]
    if gone:
        fsync_directory(run_dir)
    return gone


def delete_files(paths: Sequence[Path]) -> None:
    """Delete what was hidden. Errors are left for the next sweep."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def sweep(run_dir: Path, epoch: int, mode: CommitMode, spare: Path | None = None) -> list[Path]:
    """Find what dead attempts left: unfinished saves of attempts before `epoch` and directories half deleted.

    With `spare`, unfinished saves of `epoch` itself go too, except that one: one save runs at a time, so the others
    failed.

    Returns:
        What is left for `delete_files`, hidden already where the mount can rename.
    """
    left = []
    with contextlib.suppress(FileNotFoundError):
        for path in run_dir.iterdir():
            attempt = attempt_of(path.name)
            if path.name.startswith(HIDDEN):
                left.append(path)
            elif attempt is not None and path != spare and attempt < epoch + (spare is not None):
                with contextlib.suppress(OSError):
                    left.append(MODES["rename"].hide(path))
    return left + [path for path in mode.never_committed(run_dir, epoch) if path != spare]


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
    """Whether the checkpoint is not being read; it stays so inside."""
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
