"""How a checkpoint becomes complete, and stops being one: what depends on whether renaming a directory is atomic.

`rename`: written to a hidden directory, committed by one rename, hidden again by another before it is deleted.
`manifest`, for mounts of object stores: written in place under names that carry the attempt; COMMIT.json appearing is
the commit, it is deleted first when a checkpoint goes, and damage is noted by a marker file.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from trainer.checkpoint import commit as commits
from trainer.checkpoint.commit import COMMIT, MARKER, Commit
from trainer.outcome import Damaged

HIDDEN = ".removing_"


class CommitMode(ABC):
    """The operations that differ. Whoever publishes or hides holds the commit lock. All raise OSError."""

    @abstractmethod
    def directory(self, run_dir: Path, step: int, attempt: int, tries: int) -> Path:
        """Where the files of a save are written. `tries`: earlier failed saves of this attempt."""

    @abstractmethod
    def mark(self, attempt: int, tries: int) -> str:
        """What tells this save's files from those of other saves in the same directory; empty where it is alone."""

    @abstractmethod
    def publish(self, commit: Commit, prepared: Path) -> list[Path]:
        """Make the written files the checkpoint `commit.directory`, `prepared` being its COMMIT.json beside them.

        Returns:
            What is left to delete.
        """

    @abstractmethod
    def hide(self, directory: Path) -> Path:
        """Make a directory cease to be a checkpoint, in one step. Returns what is left to delete."""

    @abstractmethod
    def quarantine(self, directory: Path, why: str) -> Path:
        """Take a damaged checkpoint out of the way, keeping its files. Returns where they are now."""

    @abstractmethod
    def candidates(self, run_dir: Path) -> Iterator[Path]:
        """Directories that may be complete, newest first. Raises UnavailableError."""

    def never_committed(self, run_dir: Path, epoch: int) -> list[Path]:
        """Directories named like complete ones that attempts before `epoch` never committed."""
        return []


class RenameCommit(CommitMode):
    def directory(self, run_dir: Path, step: int, attempt: int, tries: int) -> Path:
        return run_dir / f".{commits.directory_name(step)}.{attempt}{f'.{tries}' if tries else ''}"

    def mark(self, attempt: int, tries: int) -> str:
        return ""

    def publish(self, commit: Commit, prepared: Path) -> list[Path]:
        incomplete = []
        if commit.directory.exists():
            try:
                commits.check_sizes(commits.read_commit(commit.directory))
                return [self.hide(prepared.parent)]  # that step is committed already
            except Damaged:
                incomplete.append(self.hide(commit.directory))
        prepared.parent.rename(commit.directory)
        commits.fsync_directory(commit.directory.parent)
        return incomplete

    def hide(self, directory: Path) -> Path:
        return directory.rename(directory.with_name(f"{HIDDEN}{directory.name.lstrip('.')}.{uuid.uuid4().hex[:8]}"))

    def quarantine(self, directory: Path, why: str) -> Path:
        target, number = directory.with_name(f"corrupt_{directory.name}"), 0
        while target.exists():
            number += 1
            target = directory.with_name(f"corrupt_{directory.name}.{number}")
        directory.rename(target)
        commits.fsync_directory(directory.parent)
        return target

    def candidates(self, run_dir: Path) -> Iterator[Path]:
        # One without COMMIT.json is damage: such a directory only ever appears with its COMMIT.json.
        return (path for path in commits.directories(run_dir) if not commits.is_marked(path))


class ManifestCommit(CommitMode):
    def directory(self, run_dir: Path, step: int, attempt: int, tries: int) -> Path:
        return run_dir / commits.directory_name(step)

    def mark(self, attempt: int, tries: int) -> str:
        return f"a{attempt}.{tries}"

    def publish(self, commit: Commit, prepared: Path) -> list[Path]:
        try:
            prepared.rename(commit.directory / COMMIT)
        except OSError:  # a mount that renames nothing at all, on which a new file appears when it is closed
            commits.write_durably(commit.directory / COMMIT, commits.encode(commit))
            with contextlib.suppress(OSError):
                prepared.unlink()
        commits.fsync_directory(commit.directory)
        return []

    def hide(self, directory: Path) -> Path:
        (directory / COMMIT).unlink(missing_ok=True)
        return directory

    def quarantine(self, directory: Path, why: str) -> Path:
        (directory / MARKER).write_text(why + "\n")
        return directory

    def candidates(self, run_dir: Path) -> Iterator[Path]:
        # One without COMMIT.json was never committed.
        for path in commits.directories(run_dir):
            if not commits.is_marked(path) and commits.retry_io((path / COMMIT).exists, path):
                yield path

    def never_committed(self, run_dir: Path, epoch: int) -> list[Path]:
        return [path for path in commits.directories(run_dir) if self._newest_attempt(path) < epoch]

    def _newest_attempt(self, directory: Path) -> float:
        """The newest attempt that wrote into `directory`; infinite where it is, or was, a checkpoint."""
        if commits.is_marked(directory) or (directory / COMMIT).exists():
            return float("inf")
        attempts = [int(match[1]) for path in directory.iterdir() if (match := re.search(r"[._]a(\d+)", path.name))]
        return max(attempts, default=0)


MODES: dict[str, CommitMode] = {"rename": RenameCommit(), "manifest": ManifestCommit()}
