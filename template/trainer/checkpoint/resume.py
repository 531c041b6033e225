"""Resuming: choose the newest checkpoint that is not damaged, verify it on all ranks, load it.

Nothing is unpickled before its checksum has matched, and an I/O error is never taken for damage.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from trainer.checkpoint import commit as commits
from trainer.checkpoint.commit import Commit
from trainer.checkpoint.commit_mode import CommitMode
from trainer.checkpoint.dcp.reader import load_into, read_metadata, refuse_differences
from trainer.checkpoint.lease import Fenced, commit_lock
from trainer.collectives import gather, run_on_all, run_on_rank0
from trainer.config.fingerprint import compare_fingerprints
from trainer.outcome import ConfigError, Damaged, UnavailableError

log = logging.getLogger(__name__)


class State(Protocol):
    """What checkpoints need of `state.TrainState`."""

    step: int
    samples: int
    fingerprint: dict[str, Any]

    def state_dict(self) -> dict[str, Any]: ...
    def target(self, saved: dict[str, Any]) -> dict[str, Any]: ...
    def loaded(self) -> None: ...


@dataclass(frozen=True)
class Resumer:
    """Loads the newest checkpoint that is not damaged, on all ranks of `group` together.

    Args:
        attempt: the lease's epoch; once a later one has begun, this one quarantines nothing.
        accepted: dotted keys of the fingerprint that may differ from the checkpoint's.
    """

    run_dir: Path
    attempt: int
    mode: CommitMode
    group: dist.ProcessGroup
    accepted: Sequence[str] = ()

    def choose(self) -> Commit | None:
        """The newest checkpoint that is not damaged; None where there has never been one. Damaged ones are quarantined.

        Rank 0 chooses; all ranks verify a share of the shards and agree.

        Raises:
            ConfigError: there are checkpoints but none is good.
            UnavailableError: the volume failed, and nothing was changed.
        """
        while (commit := run_on_rank0(self.group, self._newest)) is not None:
            found = run_on_all(self.group, partial(self._first_damaged, commit))
            damaged = [name for name in gather(self.group, found) if name]
            if not damaged:
                break
            run_on_rank0(self.group, partial(self._quarantine_if_damaged, commit, damaged[0]))
        return commit

    def load(self, commit: Commit, state: State) -> None:
        """Load `commit` into `state`.

        Raises:
            ConfigError: it was saved with another configuration, or does not fit the model.
            UnavailableError: the volume failed.
        """
        warnings = run_on_rank0(
            self.group, lambda: compare_fingerprints(commit.fingerprint, state.fingerprint, self.accepted)
        )

        def read_target() -> tuple[dict[str, Any], Metadata]:
            metadata = read_metadata(commit)
            target = state.target(metadata.state_dict_metadata)
            refuse_differences(target, metadata, commit)
            return target, metadata

        target, metadata = run_on_all(self.group, read_target)
        load_into(target, commit, metadata, self.group)
        state.loaded()
        for warning in warnings if dist.get_rank(self.group) == 0 else ():
            log.warning("resuming from step %d although %s", commit.step, warning)

    def _newest(self) -> Commit | None:
        """Rank 0: the newest checkpoint whose COMMIT.json, sizes and `.metadata` match; newer ones quarantined."""
        for directory in self.mode.candidates(self.run_dir):
            try:
                commit = commits.read_commit(directory)
                commits.check_sizes(commit)
                commits.check_file(commit, commit.metadata)
                return commit
            except Damaged as damage:
                self._quarantine(directory, damage)
        if quarantined := commits.quarantined(self.run_dir):
            names = ", ".join(path.name for path in quarantined[-3:])
            raise ConfigError(
                f"{self.run_dir} holds checkpoints and none of them is whole ({names}): bring a good copy back there, "
                f"or give run.name another value to start from scratch"
            )
        return None

    def _first_damaged(self, commit: Commit) -> str:
        """The first of this rank's share of the shards that is damaged; empty if none is."""
        for name in commits.shares(commit, dist.get_world_size(self.group))[dist.get_rank(self.group)]:
            try:
                commits.check_file(commit, name)
            except Damaged:
                return name
        return ""

    def _quarantine_if_damaged(self, commit: Commit, name: str) -> None:
        """Rank 0: quarantine what is damaged here too. What another node alone cannot see is not damaged."""
        try:
            commits.check_file(commit, name)
        except Damaged as damage:
            return self._quarantine(commit.directory, damage)
        raise UnavailableError(
            f"{commit.directory / name} is whole for rank 0 and missing or damaged for another rank: "
            f"checkpoint.dir must be one volume that all nodes share, and up to date on each; nothing was changed"
        )

    def _quarantine(self, directory: Path, damage: Damaged) -> None:
        log.error("DAMAGED CHECKPOINT: %s; it is quarantined, the next older one is tried", damage)
        try:
            with commit_lock(self.run_dir, self.attempt):
                kept = self.mode.quarantine(directory, str(damage))
        except OSError as error:
            raise UnavailableError(f"{directory} is damaged and cannot be renamed or marked ({error})") from error
        except Fenced as error:
            raise UnavailableError(str(error)) from None
        log.error("it is kept as %s", kept)
