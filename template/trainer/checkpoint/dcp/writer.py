"""The storage writer: shards, checksums and the commit, all of it in the background process.

DCP calls `write_data` in every rank's process and, once all of them have returned, `finish` in that of rank 0. `finish`
is the commit: fsync, COMMIT.json, the epoch's check and the rename under the lock, then retention. So a save that
DCP reports as done is durable on every rank, it takes no part of the trainer, and it completes when the trainers die.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, DEFAULT_SUFFIX, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainer.checkpoint import commit as commits
from trainer.checkpoint import retention
from trainer.checkpoint.commit import COMMIT, Commit, FileSum, Mode
from trainer.checkpoint.dcp import process as daemon
from trainer.checkpoint.dcp.shard import places, write_shard
from trainer.checkpoint.dcp.stager import ArenaPlanner
from trainer.checkpoint.lease import commit_lock
from trainer.ledger import Ledger
from trainer.outcome import Damaged

log = logging.getLogger(__name__)

SHOWN_S = 10.0  # until the files of other nodes are to be seen
SPARE_BYTES = 16 << 20  # left free on the volume beside a checkpoint


@dataclass(frozen=True)
class Order:
    """What a save is to become."""

    run_dir: Path
    step: int
    samples: int
    attempt: int
    world_size: int
    fingerprint: Mapping[str, Any]
    template: str
    mode: Mode
    keep_last: int
    keep_every_steps: int
    deadline_s: float
    started: float  # time.monotonic()
    tries: int = 0  # earlier failed saves of this attempt: names of no two of them are equal

    @property
    def final(self) -> Path:
        return self.run_dir / commits.directory_name(self.step)

    @property
    def directory(self) -> Path:
        """Where the files are written."""
        if self.mode == "manifest":
            return self.final
        name = f".{commits.directory_name(self.step)}.{self.attempt}"
        return self.run_dir / (f"{name}.{self.tries}" if self.tries else name)

    @property
    def mark(self) -> str:
        """What tells this save's files from those of other saves in the same directory."""
        return f"a{self.attempt}.{self.tries}" if self.mode == "manifest" else ""


@dataclass(frozen=True)
class Written:
    """What one rank wrote, on its way to rank 0 in the place of DCP's write results."""

    name: str
    file: FileSum
    mark: str  # of the places
    places: Sequence[WriteResult] | None  # None: those that came with the same mark before


class CommittingWriter(FileSystemWriter):
    """Writes one checkpoint and commits it. A new one for each save.

    Raises (DCP carries it to every rank):
        OSError: ENOSPC before anything is written where the volume has no room for it; whatever the volume says later.
        Fenced, UnavailableError: as `lease.commit_lock`.
        RuntimeError: DCP's results do not cover what was planned.
    """

    def __init__(self, order: Order) -> None:
        self.writes = True
        super().__init__(order.directory, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.order = order

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        daemon.settle_in(self.order.run_dir, self.order.attempt, self.order.deadline_s)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            retention.delete(
                retention.sweep(self.order.run_dir, self.order.attempt, self.order.mode, spare=self.order.directory)
            )

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        _note_size(plans)
        if self.writes:
            _check_room(self.order.run_dir)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank = plan.storage_data.prefix  # the plan may be a cached one, the mark is that of this save
        name = f"{rank}{self.order.mark + '_' if self.order.mark else ''}0{DEFAULT_SUFFIX}"
        ends, file = write_shard(self.order.directory / name, plan.items, cast(ArenaPlanner, planner).resolve)
        results: Future[list[WriteResult]] = Future()
        results.set_result([cast(WriteResult, _report(name, file, plan.items, ends))])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: from here on either the checkpoint that was there before is the newest one, or this one is."""
        order = self.order
        reports = [cast(Written, each) for of_rank in results for each in of_rank]
        files = {each.name: each.file for each in reports}
        name = f".metadata.{order.mark}" if order.mark else ".metadata"
        content = _metadata(metadata, reports, order)
        files[name] = FileSum(len(content), commits.ALGORITHM, xxhash.xxh3_128(content).hexdigest())
        commits.write_durably(order.directory / name, content)

        final = order.final
        commit = Commit(
            directory=final,
            step=order.step,
            samples=order.samples,
            attempt=order.attempt,
            world_size=order.world_size,
            time=time.time(),
            fingerprint=order.fingerprint,
            torch=torch.__version__,
            template=order.template,
            files=files,
        )
        _see_all(replace(commit, directory=order.directory))
        gone = publish(commit, order)
        _ledger(order).record(
            "save_committed", step=order.step, write_s=round(time.monotonic() - order.started, 4), bytes=commit.bytes
        )
        _delete_later(gone)


def _see_all(commit: Commit) -> None:
    """See that all files are here: other nodes wrote some of them, perhaps to a disk that is not the shared one.

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


def publish(commit: Commit, order: Order) -> list[Path]:
    """The moment of the commit, and retention after it. Returns what is left to delete.

    Raises:
        Fenced, UnavailableError, OSError
    """
    gone: list[Path] = []
    content = commits.encode(commit)
    if order.mode == "rename":
        commits.write_durably(order.directory / COMMIT, content)
        commits.fsync_directory(order.directory)
    with commit_lock(order.run_dir, order.attempt):
        if order.mode == "manifest":
            _put(order.final / COMMIT, content, order.mark)
        else:
            if order.final.exists():
                try:
                    commits.check_sizes(commits.read_commit(order.final))
                    return [retention.remove(order.directory, "rename")]  # that step is committed already
                except Damaged:
                    gone.append(retention.remove(order.final, "rename"))
            order.directory.rename(order.final)
            commits.fsync_directory(order.run_dir)
        try:
            gone += retention.take_away(order.run_dir, order.keep_last, order.keep_every_steps, order.mode)
        except OSError as error:  # the commit stands
            log.warning("older checkpoints of %s could not be removed (%s)", order.run_dir, error)
    return gone


def _put(path: Path, content: bytes, mark: str) -> None:
    """Have a small file appear in one piece where directories cannot be renamed. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{mark}")
    commits.write_durably(temporary, content)
    try:
        temporary.rename(path)
    except OSError:  # a mount that renames nothing at all, on which a new file appears when it is closed
        commits.write_durably(path, content)
        with contextlib.suppress(OSError):
            temporary.unlink()
    commits.fsync_directory(path.parent)


# ---------------------------------------------------------------------------------------------------------------------
# Kept between saves. With 10,000 tensors, sending where in the files they lie would cost several times what writing
# them does. It stays the same from save to save, so a rank sends it once, and `.metadata` is encoded once.

_told: tuple[str, Sequence[WriteItem], list[int], str] | None = None  # in every process: see _report
_heard: dict[int, tuple[str, Sequence[WriteResult]]] = {}
_encoded: tuple[object, list[str], bytes] | None = None
_needed_bytes = 0
_ledgers: dict[tuple[Path, int], Ledger] = {}
_deleting: threading.Thread | None = None


def _report(name: str, file: FileSum, items: Sequence[WriteItem], ends: list[int]) -> Written:
    """What this rank has to say of the shard that it wrote."""
    global _told
    if _told is not None and _told[0] == name and _told[1] is items and _told[2] == ends:
        return Written(name, file, _told[3], None)
    _told = (name, items, ends, str(uuid.uuid4()))
    return Written(name, file, _told[3], places(name, items, ends))


def _metadata(metadata: Metadata, reports: Sequence[Written], order: Order) -> bytes:
    """DCP's metadata with the places in the files, encoded.

    Raises:
        RuntimeError: a part that nobody wrote, results of another number of ranks, or places that were never sent.
    """
    global _encoded
    structure, marks = metadata.state_dict_metadata, [each.mark for each in reports]
    for rank, each in enumerate(reports):
        if each.places is not None:
            _heard[rank] = (each.mark, each.places)
        elif _heard.get(rank, ("", ()))[0] != each.mark:
            raise RuntimeError(f"{order.directory}: it is not known where in {each.name} what lies: no commit")
    if _encoded is not None and _encoded[0] is structure and _encoded[1] == marks:
        return _encoded[2]
    written = [place for rank in range(len(reports)) for place in _heard[rank][1]]
    planned = sum(len(entry.chunks) if isinstance(entry, TensorStorageMetadata) else 1 for entry in structure.values())
    if len(reports) != order.world_size or len({place.index for place in written}) != planned:
        raise RuntimeError(
            f"{order.directory}: {len(written)} of {planned} parts by {len(reports)} of {order.world_size} ranks: "
            "no commit"
        )
    whole = Metadata(**vars(metadata))
    whole.version, whole.storage_meta = CURRENT_DCP_VERSION, None
    whole.storage_data = {place.index: place.storage_data for place in written}
    _encoded = (structure, marks, pickle.dumps(whole))
    return _encoded[2]


def _note_size(plans: Sequence[SavePlan]) -> None:
    """How large this save is. Cached plans arrive empty: they are as large as the last full ones."""
    global _needed_bytes
    if all(plan.usable for plan in plans):
        _needed_bytes = sum(
            item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
            for plan in plans
            for item in plan.items
            if item.tensor_data
        )


def _check_room(run_dir: Path) -> None:
    """Raise ENOSPC before a save that the volume has no room for, once what is being deleted is gone."""
    for last_chance in (False, True):
        room = os.statvfs(run_dir)
        free = room.f_bavail * room.f_frsize
        if free >= _needed_bytes + SPARE_BYTES:
            return
        if _deleting is None or last_chance:
            raise OSError(
                28,
                f"no room for a checkpoint of {_needed_bytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are free",
                str(run_dir),
            )
        _deleting.join()


def _delete_later(paths: Sequence[Path]) -> None:
    """Delete in the background, one batch after the other; the next save does not wait for it."""
    global _deleting
    before = _deleting

    def work() -> None:
        if before is not None:
            before.join()
        retention.delete(paths)

    if paths:
        _deleting = threading.Thread(target=work, name="deleting checkpoints")
        _deleting.start()


def _ledger(order: Order) -> Ledger:
    key = (order.run_dir, order.attempt)
    if key not in _ledgers:
        _ledgers[key] = Ledger(order.run_dir, order.attempt)
    return _ledgers[key]


# ---------------------------------------------------------------------------------------------------------------------
# Saves that write nothing


class WarmUp(StorageWriter):
    """The first request of a new process: it settles in, and that of rank 0 sweeps what dead attempts left."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        daemon.settle_in(self.order.run_dir, self.order.attempt, self.order.deadline_s)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        _delete_later(retention.sweep(self.order.run_dir, self.order.attempt, self.order.mode))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Rehearsal(CommittingWriter):
    """A save in all but the writing: it fills the plan caches, so that the first real save is like the others."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.writes = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        daemon.settle_in(self.order.run_dir, self.order.attempt, self.order.deadline_s)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass
