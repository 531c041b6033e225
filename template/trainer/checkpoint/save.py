"""What the training loop sees of checkpoints: resume, due, save, settle, finish.

Every method but `due` is called by all ranks, at the same step. Nothing that differs between ranks decides anything:
`status` gives this rank's numbers to the reduction of each step, and `settle` acts on the reduced ones.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

from trainer.checkpoint import commit as commits
from trainer.checkpoint.commit import Commit, Mode
from trainer.checkpoint.dcp import process as daemon
from trainer.checkpoint.dcp.reader import differences, load_into, load_tensors, read_metadata, refuse_differences
from trainer.checkpoint.dcp.stager import STATE, ArenaPlanner, ArenaStager
from trainer.checkpoint.dcp.writer import CommittingWriter, Order, Rehearsal, WarmUp
from trainer.checkpoint.lease import Fenced, commit_lock
from trainer.checkpoint.pace import Pace
from trainer.collectives import from_main, gather, on_each
from trainer.config.fingerprint import compare_fingerprints
from trainer.config.settings import Config
from trainer.ledger import Ledger, mtbi_s, read_events
from trainer.outcome import ConfigError, Damaged, SavesFailed, UnavailableError
from trainer.steps import read_counting
from trainer.storage import volume

__all__ = ["Checkpoints", "Resumed", "load_tensors"]

log = logging.getLogger(__name__)

START_S = 120.0  # at least, for the writer processes to start and find each other
_SLICE_S = 0.25
CRASH_PATIENCE_S = 30.0  # for the save in flight when the training loop ends in an error
END_PATIENCE_S = 10.0  # for the writer process to delete what was pruned


class State(Protocol):
    """What the manager needs of `state.TrainState`."""

    step: int
    samples: int
    fingerprint: dict[str, Any]

    def state_dict(self) -> dict[str, Any]: ...
    def target(self, saved: dict[str, Any]) -> dict[str, Any]: ...
    def loaded(self) -> None: ...


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that was loaded."""

    step: int
    samples: int
    checkpoint: str  # name of its directory
    world_size: int  # of the ranks that saved it


@dataclass
class _Flight:
    """A save, or the start of the writer process, on its way."""

    future: Future[Any]
    started: float  # time.monotonic()
    deadline: float
    what: str  # for people
    step: int | None = None  # None: nothing is to be committed
    samples: int = 0
    ended: float | None = None
    waited_s: float = 0.0  # of training, for the one before
    stall_s: float = 0.0  # of training, for this one
    staged: bool = False

    def __post_init__(self) -> None:
        self.future.add_done_callback(self._end)

    def _end(self, future: Future[Any]) -> None:
        self.ended = time.monotonic()

    def overdue(self) -> bool:
        return time.monotonic() > self.deadline

    def error(self) -> BaseException | None:
        """Why it failed; None while it runs and when it has succeeded."""
        return self.future.exception() if self.future.done() else None


class Checkpoints:
    """The checkpoints of a run. As a context manager: leaving it waits for the save in flight and ends the writer.

    Args:
        attempt: the lease's epoch for this start of the ranks.
        group: a gloo group that nothing else uses.
        accepted: dotted keys of the fingerprint that may differ from the checkpoint's.
        mode: how a checkpoint is committed; None: as `checkpoint.commit` says.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        attempt: int,
        state: State,
        group: dist.ProcessGroup,
        ledger: Ledger,
        accepted: Sequence[str] = (),
        mode: Mode | None = None,
    ) -> None:
        self.config, self.run_dir, self.attempt, self.ledger = config, run_dir, attempt, ledger
        self.state, self.group, self.accepted = state, group, accepted
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.mode: Mode = mode if mode else from_main(group, partial(volume.commit_mode, config))
        self.loaded: str | None = None  # name of the checkpoint that was resumed from
        self._template = _template_version(config.project)
        self._stager = ArenaStager()
        self._pace = Pace(config.checkpoint, 0)
        self._flight: _Flight | None = None
        self._rehearsed = False
        self._committed: int | None = None  # newest step known to be on disk
        self._failures = self._tries = self._updates = 0
        self._stale = False  # the next reduced numbers are older than what has happened since

    def __enter__(self) -> Self:
        daemon.raise_descriptor_limit()
        self._start_daemon()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
            elif self._flight is not None:  # peers may be gone: wait for this rank's part alone
                self._wait(self._flight, min(CRASH_PATIENCE_S, self.config.checkpoint.deadline_s))
        finally:
            daemon.end(0.0 if error is not None else END_PATIENCE_S)
            self._stager.close()

    # -- resume --------------------------------------------------------------------------------------------------------

    def resume(self) -> Resumed | None:
        """Load the newest checkpoint that is whole; None where there has never been one.

        Rank 0 chooses; all ranks verify a share of the shards and agree. A damaged one is set aside, and the next is
        tried. Nothing is unpickled before its checksum has held.

        Raises:
            ConfigError: there are checkpoints but none is good, or the newest does not fit this configuration.
            UnavailableError: the volume failed, and nothing was changed.
        """
        begin = time.monotonic()
        while (commit := from_main(self.group, self._newest)) is not None:
            damaged = [name for name in gather(self.group, on_each(self.group, partial(self._damage, commit))) if name]
            if not damaged:
                break
            from_main(self.group, partial(self._set_aside_if_damaged, commit, damaged[0]))
        from_main(self.group, partial(self._set_pace, commit))
        if commit is None:
            return None
        warnings = from_main(
            self.group, lambda: compare_fingerprints(commit.fingerprint, self.state.fingerprint, self.accepted)
        )
        self._load(commit)
        self.loaded, self._committed = commit.directory.name, commit.step
        lost = from_main(self.group, lambda: _lost(self.run_dir, commit))
        if self.rank == 0:
            for warning in warnings:
                log.warning("resuming from step %d although %s", commit.step, warning)
            self.ledger.record(
                "resumed",
                step=commit.step,
                checkpoint=self.loaded,
                load_s=round(time.monotonic() - begin, 3),
                **lost,
            )
        return Resumed(commit.step, commit.samples, self.loaded, commit.world_size)

    def _newest(self) -> Commit | None:
        """Rank 0: the newest checkpoint whose COMMIT.json, sizes and `.metadata` hold, those before it set aside."""
        for directory in commits.candidates(self.run_dir, self.mode):
            try:
                commit = commits.read_commit(directory)
                commits.check_sizes(commit)
                commits.check_file(commit, commit.metadata)
                return commit
            except Damaged as damage:
                self._set_aside(directory, str(damage))
        if remains := commits.remains(self.run_dir):
            names = ", ".join(path.name for path in remains[-3:])
            raise ConfigError(
                f"{self.run_dir} holds checkpoints and none of them is whole ({names}): bring a good copy back there, "
                f"or give run.name another value to start from scratch"
            )
        return None

    def _set_pace(self, commit: Commit | None) -> None:
        """Rank 0: when saves are due from here on."""
        self._pace = Pace(self.config.checkpoint, commit.step if commit else 0, mtbi_s(read_events(self.run_dir)))

    def _damage(self, commit: Commit) -> str:
        """The first of this rank's share of the shards that is damaged; empty if none is."""
        for name in commits.shares(commit, self.size)[self.rank]:
            try:
                commits.check_file(commit, name)
            except Damaged:
                return name
        return ""

    def _set_aside_if_damaged(self, commit: Commit, name: str) -> None:
        """Rank 0: set aside what is damaged here too. What another node alone cannot see is not damaged."""
        try:
            commits.check_file(commit, name)
        except Damaged as damage:
            return self._set_aside(commit.directory, str(damage))
        raise UnavailableError(
            f"{commit.directory / name} is whole for rank 0 and missing or damaged for another rank: "
            f"checkpoint.dir must be one volume that all nodes share, and up to date on each; nothing was changed"
        )

    def _set_aside(self, directory: Path, why: str) -> None:
        log.error("DAMAGED CHECKPOINT: %s; it is set aside, the next older one is tried", why)
        try:
            with commit_lock(self.run_dir, self.attempt):
                kept = commits.set_aside(directory, self.mode, why)
        except OSError as error:
            raise UnavailableError(f"{directory} is damaged and cannot be set aside ({error})") from error
        except Fenced as error:
            raise UnavailableError(str(error)) from None
        log.error("it is kept as %s", kept)

    def _load(self, commit: Commit) -> None:
        def look() -> tuple[dict[str, Any], Metadata]:
            metadata = read_metadata(commit)
            target = self.state.target(metadata.state_dict_metadata)
            refuse_differences(differences(target, metadata), commit)
            return target, metadata

        target, metadata = on_each(self.group, look)
        load_into(target, commit, metadata, self.group)
        self.state.loaded()

    # -- save ----------------------------------------------------------------------------------------------------------

    def due(self, step: int, now: float | None = None) -> bool:
        """Rank 0: whether a save is due after `step`. To be asked for every step, in order."""
        return self._pace.due(step, now)

    @property
    def every_steps(self) -> int:
        """Rank 0: the number of steps between two saves at present."""
        return self._pace.every_steps

    def save(self, step: int, samples: int) -> None:
        """Start saving the state as it is now, after `step`; wait first for a save in flight.

        Does nothing for a step that is on disk or in flight already. The state must not change before
        `before_optimizer_step` has returned.

        Raises:
            SavesFailed: the save that was in flight was one failure too many.
            UnavailableError: another start has taken the run over.
        """
        if self._is_saved(step):
            return
        begin = time.monotonic()
        self._land()
        landed = time.monotonic()
        if self._is_saved(step):
            return
        if self.rank == 0:
            self.ledger.record("save_started", step=step)
            self._pace.began(step)
        order = self._order(step, samples)
        self._flight = self._fly(CommittingWriter(order), landed, f"the save of step {step}", step, samples)
        self._flight.waited_s = landed - begin
        self._flight.stall_s = time.monotonic() - landed
        self._rehearsed = self._stale = True

    def before_optimizer_step(self) -> None:
        """Wait until the save in flight has copied the state, which may change after that."""
        self._updates += 1
        flight, copied = self._flight, self._stager.copied
        if flight is not None and copied is not None and not flight.staged:
            begin = time.monotonic()
            copied.exception(timeout=self.config.checkpoint.deadline_s)  # an error is the save's: `status` has it
            flight.stall_s += time.monotonic() - begin
            self._staged(flight)
        if self._updates >= 2 and not self._rehearsed and self._flight is None:  # the optimizer has its state now
            self._rehearse()

    def status(self) -> dict[str, bool]:
        """This rank's view of the save in flight, for the reduction of the step: `save_done`, `save_failed`."""
        flight = self._flight
        if flight is None:
            return {"save_done": False, "save_failed": not daemon.alive()}
        done = flight.future.done()
        failed = flight.error() is not None or (not done and (flight.overdue() or not daemon.alive()))
        return {"save_done": done and not failed, "save_failed": failed}

    def settle(self, done_everywhere: bool, failed_anywhere: bool) -> None:
        """Act on the reduced `status` of all ranks: close the books on a save, or replace the writers after a failure.

        The numbers may be one step old; those from before the last `save` or failure are passed over.

        Raises:
            SavesFailed: one failure too many, on all ranks alike.
        """
        if self._stale:
            self._stale = False
        elif failed_anywhere:
            self._recover()
        elif done_everywhere and self._flight is not None:
            self._close_books(self._flight)

    def finish(self) -> bool:
        """Wait for the save in flight, at most until its deadline. A save of the present state is tried once more.

        Returns:
            Whether the last save that was started is on disk.

        Raises:
            SavesFailed: one failure too many, on all ranks alike.
        """
        flight = self._flight
        if flight is None or flight.step is None:
            return True
        self._land()
        if self._is_saved(flight.step):
            return True
        if not flight.staged:  # no optimizer step since
            log.warning("saving step %d once more", flight.step)
            self.save(flight.step, flight.samples)
            self._land()
        return self._is_saved(flight.step)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_saved(self, step: int) -> bool:
        return step == self._committed or (self._flight is not None and self._flight.step == step)

    def _staged(self, flight: _Flight) -> None:
        flight.staged = True
        if self.rank == 0 and flight.step is not None:
            self.ledger.record("save_staged", step=flight.step, stall_s=round(flight.waited_s + flight.stall_s, 5))

    def _order(self, step: int, samples: int) -> Order:
        settings = self.config.checkpoint
        return Order(
            run_dir=self.run_dir,
            step=step,
            samples=samples,
            attempt=self.attempt,
            world_size=self.size,
            fingerprint=self.state.fingerprint,
            template=self._template,
            mode=self.mode,
            keep_last=settings.keep_last,
            keep_every_steps=settings.keep_every_steps,
            deadline_s=settings.deadline_s,
            started=time.monotonic(),
            tries=self._tries,
        )

    def _start_daemon(self) -> None:
        """Start the writer process in the background; that of rank 0 sweeps what dead attempts left."""
        self._stager.forget()
        begin = time.monotonic()
        with daemon.starting():
            future = async_save(
                {},
                storage_writer=WarmUp(self._order(0, 0)),
                process_group=self.group,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
        patience_s = max(START_S, self.config.checkpoint.deadline_s)
        self._flight = _Flight(
            cast("Future[Any]", future), begin, begin + patience_s, "the start of the writer process"
        )

    def _fly(
        self, writer: CommittingWriter, begin: float, what: str, step: int | None = None, samples: int = 0
    ) -> _Flight:
        response = async_save(
            {STATE: self.state.state_dict()},
            storage_writer=writer,
            planner=ArenaPlanner(),
            process_group=self.group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        future = cast("Future[Any]", cast(AsyncSaveResponse, response).upload_completion)
        return _Flight(future, begin, begin + self.config.checkpoint.deadline_s, what, step, samples)

    def _rehearse(self) -> None:
        """Make room for the copy and plan once, writing nothing, so that the first save is as fast as the others."""
        begin = time.monotonic()
        self._flight = self._fly(Rehearsal(self._order(0, 0)), begin, "the rehearsal of a save")
        copied = self._stager.copied
        assert copied is not None
        copied.exception(timeout=self.config.checkpoint.deadline_s)
        self._flight.staged = self._rehearsed = self._stale = True

    def _wait(self, flight: _Flight, patience_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            flight.future.exception(timeout=max(0.0, patience_s))

    def _land(self) -> None:
        """Wait for what is in flight; all ranks agree how it ended, and go on without it."""
        flight = self._flight
        if flight is None:
            return
        while True:  # in slices, so that a failure on one rank ends the wait of all
            self._wait(flight, _SLICE_S)
            status = self.status()
            ends = torch.tensor([status["save_done"], not status["save_failed"]], dtype=torch.int32)
            dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=self.group)
            done, well = map(bool, ends.tolist())
            if not well:
                return self._recover()
            if done:
                return self._close_books(flight)

    def _close_books(self, flight: _Flight) -> None:
        self._flight = None
        if flight.step is None:
            return
        self._committed, self._failures = flight.step, 0
        if not flight.staged:
            self._staged(flight)
        if self.rank == 0:
            took_s = (flight.ended or time.monotonic()) - flight.started
            if changed := self._pace.ended(took_s, flight.stall_s):
                self.ledger.record("retuned", **changed)

    def _recover(self) -> None:
        """A save failed, or a writer process is gone: replace all of them together, plan caches with them."""
        flight, self._flight = self._flight, None
        reasons = [text for text in gather(self.group, self._reason(flight)) if text]
        reason = reasons[0] if reasons else "for a reason that no rank knows"
        daemon.end(0.0)
        if flight is not None:
            self._wait(flight, CRASH_PATIENCE_S)
            daemon.end(0.0)  # one that had only just started by then
        step = flight.step if flight is not None else None
        if step is not None and from_main(self.group, lambda: self._is_on_disk(step)):  # it failed after its commit
            self._committed, self._failures = step, 0
        elif flight is not None:
            self._failures += 1
            if self.rank == 0:
                self._pace.ended(None, flight.stall_s)
                log.error("%s failed (%s)", flight.what, reason)
                self.ledger.record("save_failed", step=step, reason=reason)
        elif self.rank == 0:
            log.warning("the writer process was lost (%s) and is replaced", reason)
        if f": {Fenced.__name__}: " in reason:
            raise UnavailableError(f"this run has been taken over by another start ({reason})")
        self._tries += 1
        limit = self.config.checkpoint.max_failed_saves
        if self._failures >= limit:
            newest = self._committed
            kept = f"the newest one is step {newest}" if newest is not None else "there is none yet"
            raise SavesFailed(
                f"{limit} saves in a row failed, the last with: {reason}; "
                f"checkpoints that are complete were kept ({kept}): mend the volume or the machine, then start again"
            )
        self._start_daemon()
        self._stale, self._rehearsed = True, False

    def _reason(self, flight: _Flight | None) -> str:
        """Why this rank thinks that something failed, in one line; empty if it does not."""
        if flight is not None and (error := flight.error()) is not None:
            text = _one_line(error)
            return text if text.startswith("rank ") else f"rank {self.rank}: {text}"
        if not daemon.alive():
            return f"rank {self.rank}: the writer process died"
        if flight is not None and flight.overdue():
            took_s, deadline_s = time.monotonic() - flight.started, self.config.checkpoint.deadline_s
            return f"rank {self.rank}: not done after {took_s:.0f} s (checkpoint.deadline_s is {deadline_s:.0f})"
        return ""

    def _is_on_disk(self, step: int) -> bool:
        try:
            commit = commits.read_commit(self.run_dir / commits.directory_name(step))
            commits.check_sizes(commit)
            return commit.attempt == self.attempt
        except (Damaged, UnavailableError):
            return False


def _one_line(error: BaseException) -> str:
    """The first cause inside a CheckpointException, or the error itself."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {_one_line(cause)}"
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _template_version(project: Path) -> str:
    """The template's version that the project was rendered from, as Copier recorded it."""
    try:
        for line in (project / ".copier-answers.yml").read_text(encoding="utf-8").splitlines():
            if line.startswith("_commit:"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def _lost(run_dir: Path, commit: Commit) -> dict[str, Any]:
    """What the interruption before this start cost: steps that have to be trained again, and the time they took.

    Where an attempt between has loaded it and made no step, it has said so already.
    """
    units_per_sample = commit.fingerprint.get("data.sequence_length", 0)
    again = [step for step in read_counting(run_dir, units_per_sample) if step.step > commit.step]
    seconds = sum(step.seconds for step in again)
    return {"lost_steps": len(again), "lost_s": round(seconds, 3)}
