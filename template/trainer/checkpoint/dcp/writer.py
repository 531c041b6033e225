"""The storage writer: shards, checksums and the commit, all of it in the background process.

DCP calls `write_data` in every rank's process and, once all of them have returned, `finish` in that of rank 0. `finish`
is the commit: fsync, COMMIT.json, the epoch's check and the rename under the lock, then retention. So a save that
DCP reports as done is durable on every rank, it takes no part of the trainer, and it completes when the trainers die.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainer.checkpoint import commit as commits
from trainer.checkpoint import retention
from trainer.checkpoint.commit import COMMIT, Commit
from trainer.checkpoint.commit_mode import CommitMode
from trainer.checkpoint.dcp.planner import ArenaPlanner
from trainer.checkpoint.dcp.process import configure_process
from trainer.checkpoint.dcp.shard import ShardReport, write_shard
from trainer.checkpoint.lease import commit_lock
from trainer.config.settings import CheckpointConfig
from trainer.ledger import Ledger
from trainer.outcome import Damaged

log = logging.getLogger(__name__)

SHOWN_S = 10.0  # until the files of other nodes are visible
SPARE_BYTES = 16 << 20  # left free on the volume beside a checkpoint


@dataclass(frozen=True)
class SaveRequest:
    """What a save is to become."""

    run_dir: Path
    commit: Commit  # without the files, which the save writes
    mode: CommitMode
    settings: CheckpointConfig
    started: float  # time.monotonic()
    tries: int = 0  # earlier failed saves of this attempt: names of no two of them are equal

    @property
    def directory(self) -> Path:
        """Where the files are written."""
        return self.mode.directory(self.run_dir, self.commit.step, self.commit.attempt, self.tries)

    @property
    def mark(self) -> str:
        """What tells this save's files from those of other saves in the same directory."""
        return self.mode.mark(self.commit.attempt, self.tries)


class KeptBetweenSaves:
    """What the writer process of a rank keeps from one save to the next."""

    def __init__(self) -> None:
        self.needed_bytes = 0  # of a save, over all ranks
        self.deleting: threading.Thread | None = None
        self._ledger: tuple[Path, int, Ledger] | None = None

    def note_size(self, plans: Sequence[SavePlan]) -> None:
        """How large this save is. Cached plans arrive empty: they are as large as the last full ones."""
        if all(plan.usable for plan in plans):
            self.needed_bytes = sum(
                item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
                for plan in plans
                for item in plan.items
                if item.tensor_data
            )

    def check_room(self, run_dir: Path) -> None:
        """Raise ENOSPC before a save that the volume has no room for, once what is being deleted is gone."""
        for last_chance in (False, True):
            room = os.statvfs(run_dir)
            free = room.f_bavail * room.f_frsize
            if free >= self.needed_bytes + SPARE_BYTES:
                return
            if self.deleting is None or last_chance:
                needed = f"a checkpoint of {self.needed_bytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are free"
                raise OSError(errno.ENOSPC, f"no room for {needed}", str(run_dir))
            self.deleting.join()

    def delete_later(self, paths: Sequence[Path]) -> None:
        """Delete in the background, one batch after the other; the next save does not wait for it."""
        before = self.deleting

        def work() -> None:
            if before is not None:
                before.join()
            retention.delete_files(paths)

        if paths:
            self.deleting = threading.Thread(target=work, name="deleting checkpoints")
            self.deleting.start()

    def ledger(self, run_dir: Path, attempt: int) -> Ledger:
        if self._ledger is None or self._ledger[:2] != (run_dir, attempt):
            self._ledger = run_dir, attempt, Ledger(run_dir, attempt)
        return self._ledger[2]


kept = KeptBetweenSaves()


class DryRunSave(StorageWriter):
    """A save in all but the writing: it fills the plan caches, so that the first real save is as fast as the others."""

    def __init__(self, request: SaveRequest) -> None:
        self.request = request

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        request = self.request
        configure_process(request.run_dir, request.commit.attempt, request.settings.deadline_s)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        kept.note_size(plans)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = Future()
        written.set_result(self.write(plan, planner))
        return written

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[Any]:
        """Write this rank's part. Returns what `finish` gets of it."""
        return []

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class WarmUp(DryRunSave):
    """The first request of a new process: it configures itself, and that of rank 0 sweeps what dead attempts left."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        request = self.request
        kept.delete_later(retention.sweep(request.run_dir, request.commit.attempt, request.mode))


class CommittingWriter(DryRunSave):
    """Writes one checkpoint and commits it. A new one for each save.

    Raises (DCP carries it to every rank):
        OSError: ENOSPC before anything is written where the volume has no room for it; others from the volume.
        Fenced, UnavailableError: as `lease.commit_lock`.
        RuntimeError: DCP's results do not cover what was planned.
    """

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator)
        if is_coordinator:
            request = self.request
            retention.delete_files(
                retention.sweep(request.run_dir, request.commit.attempt, request.mode, spare=request.directory)
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.request.directory.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = super().prepare_global_plan(plans)
        kept.check_room(self.request.run_dir)
        return plans

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[Any]:
        mark = f"{self.request.mark}_" if self.request.mark else ""  # that of this save: the plan may be a cached one
        path = self.request.directory / f"__{plan.storage_data}_{mark}0{DEFAULT_SUFFIX}"
        return [write_shard(path, plan.items, cast(ArenaPlanner, planner).resolve_data)]

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Commit: from here on either the checkpoint that was there before is the newest one, or this one is."""
        request, directory = self.request, self.request.directory
        reports: list[ShardReport] = [report for of_rank in results for report in of_rank]
        files = {report.name: report.file for report in reports}
        name = f".metadata.{request.mark}" if request.mark else ".metadata"
        content = self._encoded(metadata, reports)
        files[name] = commits.sum_of(content)
        commits.write_durably(directory / name, content)
        names = sorted(metadata.state_dict_metadata)
        commit = replace(request.commit, time=time.time(), files=files, names=names)
        wait_until_visible(replace(commit, directory=directory))
        hidden = self._publish(commit, directory / (f".{COMMIT}.{request.mark}" if request.mark else COMMIT))
        took_s = round(time.monotonic() - request.started, 4)
        ledger = kept.ledger(request.run_dir, commit.attempt)
        ledger.record("save_committed", step=commit.step, write_s=took_s, bytes=commit.bytes)
        kept.delete_later(hidden)

    def _encoded(self, metadata: Metadata, reports: Sequence[ShardReport]) -> bytes:
        """DCP's metadata, completed by where in the files each tensor lies.

        Raises:
            RuntimeError: a part that no rank wrote, or results of another number of ranks.
        """
        entries = metadata.state_dict_metadata.values()
        planned = sum(len(entry.chunks) if isinstance(entry, TensorStorageMetadata) else 1 for entry in entries)
        written = {part.index: part.storage_data for report in reports for part in report.parts}
        if len(reports) != self.request.commit.world_size or len(written) != planned:
            raise RuntimeError(
                f"{self.request.directory}: {len(written)} of {planned} parts by {len(reports)} of "
                f"{self.request.commit.world_size} ranks: no commit"
            )
        whole = Metadata(**vars(metadata))
        whole.version, whole.storage_meta, whole.storage_data = CURRENT_DCP_VERSION, None, written
        return pickle.dumps(whole)

    def _publish(self, commit: Commit, prepared: Path) -> list[Path]:
        """The moment of the commit, and retention after it. Returns what is left to delete."""
        request = self.request
        commits.write_durably(prepared, commits.encode(commit))
        commits.fsync_directory(prepared.parent)
        with commit_lock(request.run_dir, commit.attempt):
            hidden = request.mode.publish(commit, prepared)
            try:
                hidden += retention.expire(request.run_dir, request.settings, request.mode)
            except OSError as error:  # the commit stands
                log.warning("older checkpoints of %s could not be removed (%s)", request.run_dir, error)
        return hidden


def wait_until_visible(commit: Commit) -> None:
    """Check that all files are here: other nodes wrote some of them, perhaps to a disk that is not the shared one.

    Raises:
        Damaged: after some seconds, in which a network file system may show them.
    """
    give_up = time.monotonic() + SHOWN_S
    while True:
        try:
            return commits.check_sizes(commit)
        except Damaged:
            if time.monotonic() > give_up:
                raise
        time.sleep(0.2)
