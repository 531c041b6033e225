"""What the training loop uses of checkpoints: resume, tick, save, settle, finish.

Every method but `tick` is called by all ranks, at the same step. Nothing that differs between ranks decides anything:
`status` gives this rank's numbers to the reduction of each step, and `settle` acts on the reduced ones.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from trainer.checkpoint import commit as commits
from trainer.checkpoint.commit import Commit
from trainer.checkpoint.commit_mode import MODES
from trainer.checkpoint.dcp import process
from trainer.checkpoint.dcp.planner import ArenaPlanner
from trainer.checkpoint.dcp.stager import STATE, ArenaStager
from trainer.checkpoint.dcp.writer import CommittingWriter, DryRunSave, SaveRequest, WarmUp
from trainer.checkpoint.lease import Fenced
from trainer.checkpoint.pace import Pace
from trainer.checkpoint.resume import Resumer, State
from trainer.collectives import gather, run_on_rank0
from trainer.config.settings import Config
from trainer.ledger import Ledger, mtbi_s, read_events
from trainer.outcome import Damaged, SavesFailed, UnavailableError
from trainer.steps import read_counting
from trainer.storage import volume
from trainer.versions import code_version, template_version

log = logging.getLogger(__name__)

START_S = 120.0  # at least, for the writer processes to start and find each other
CRASH_PATIENCE_S = 30.0  # for the pending save when the training loop ends in an error
END_PATIENCE_S = 10.0  # for the writer process to delete what was pruned
_SLICE_S = 0.25


@dataclass
class PendingSave:
    """A save, or the start of the writer process, that has begun and is not known to have ended."""

    future: Future[Any]
    began: float  # time.monotonic()
    patience_s: float
    what: str  # for people
    step: int | None = None  # None: nothing is to be committed
    samples: int = 0
    ended: float | None = None
    waited_s: float = 0.0  # of training, for the one before
    stall_s: float = 0.0  # of training, for this one
    staged: bool = False

    def __post_init__(self) -> None:
        self.future.add_done_callback(self._note_end)

    def _note_end(self, future: Future[Any]) -> None:
        self.ended = time.monotonic()

    def overdue(self) -> bool:
        return time.monotonic() - self.began > self.patience_s

    def error(self) -> BaseException | None:
        """Why it failed; None while it runs and when it has succeeded."""
        return self.future.exception() if self.future.done() else None

    def wait(self, patience_s: float) -> None:
        """Until it has ended, with or without an error, or `patience_s` are over."""
        with contextlib.suppress(TimeoutError):
            self.future.exception(timeout=patience_s)


class Checkpoints:
    """The checkpoints of a run. As a context manager: leaving it waits for the pending save and ends the writer.

    Args:
        attempt: the lease's epoch for this start of the ranks.
        group: a gloo group that nothing else uses.
        accepted: dotted keys of the fingerprint that may differ from the checkpoint's.
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
    ) -> None:
        self.config, self.run_dir, self.attempt, self.ledger = config, run_dir, attempt, ledger
        self.state, self.group = state, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.mode = MODES[run_on_rank0(group, lambda: volume.commit_mode(config))]
        self.loaded: str | None = None  # name of the checkpoint that was resumed from
        self._resumer = Resumer(run_dir, attempt, self.mode, group, accepted)
        self._template = template_version(config.project)
        self._code = code_version(config.project) if self.rank == 0 else {}
        self._stager = ArenaStager()
        self._pace = Pace(config.checkpoint)
        self._pending: PendingSave | None = None
        self._dry_run_done = False
        self._committed: int | None = None  # newest step known to be on disk
        self._failures = self._tries = self._updates = 0
        self._stale = False  # the next reduced numbers are older than what has happened since

    def __enter__(self) -> Self:
        process.raise_descriptor_limit()
        self._start_process()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
            elif self._pending is not None:  # peers may be gone: wait for this rank's part alone
                self._pending.wait(min(CRASH_PATIENCE_S, self.config.checkpoint.deadline_s))
        finally:
            process.end(0.0 if error is not None else END_PATIENCE_S)
            self._stager.close()

    def resume(self) -> Commit | None:
        """Load the newest checkpoint that is whole. Returns it; None where there has never been one.

        Raises:
            ConfigError: there are checkpoints but none is good, or the newest does not fit this configuration.
            UnavailableError: the volume failed, and nothing was changed.
        """
        begin = time.monotonic()
        commit = self._resumer.choose()
        measured_s = run_on_rank0(self.group, lambda: mtbi_s(read_events(self.run_dir)))
        self._pace.resumed(commit.step if commit else 0, measured_s)
        if commit is None:
            return None
        self._resumer.load(commit, self.state)
        self.loaded, self._committed = commit.directory.name, commit.step
        lost = run_on_rank0(self.group, lambda: _lost(self.run_dir, commit))
        if self.rank == 0:
            load_s = round(time.monotonic() - begin, 3)
            self.ledger.record("resumed", step=commit.step, checkpoint=self.loaded, load_s=load_s, **lost)
        return commit

    def tick(self, step: int, now: float | None = None) -> bool:
        """Rank 0: note that `step` is complete, every step and in order. Returns whether a save of it is due."""
        return self._pace.tick(step, now)

    def save(self, step: int, samples: int) -> None:
        """Start saving the state as it is now, after `step`; wait first for a pending save.

        Does nothing for a step that is on disk or pending already. The state must not change before
        `before_optimizer_step` has returned.

        Raises:
            SavesFailed: the pending save was one failure too many.
            UnavailableError: another start has taken the run over.
        """
        if self._is_saved(step):
            return
        begin = time.monotonic()
        self._wait()
        waited = time.monotonic()
        if self._is_saved(step):
            return
        if self.rank == 0:
            self.ledger.record("save_started", step=step)
            self._pace.began(step)
        writer = CommittingWriter(self._request(step, samples))
        self._pending = self._start(writer, waited, f"the save of step {step}", step, samples)
        self._pending.waited_s = waited - begin
        self._pending.stall_s = time.monotonic() - waited
        self._dry_run_done = self._stale = True

    def before_optimizer_step(self) -> None:
        """Wait until the pending save has copied the state, which may change after that."""
        self._updates += 1
        pending, copied = self._pending, self._stager.copied
        if pending is not None and copied is not None and not pending.staged:
            begin = time.monotonic()
            copied.exception(timeout=self.config.checkpoint.deadline_s)  # an error is the save's: `status` has it
            pending.stall_s += time.monotonic() - begin
            self._mark_staged(pending)
        if self._updates >= 2 and not self._dry_run_done and self._pending is None:  # the optimizer has its state now
            self._dry_run()

    def status(self) -> dict[str, bool]:
        """This rank's view of the pending save, for the reduction of the step: `save_done`, `save_failed`."""
        pending = self._pending
        if pending is None:
            return {"save_done": False, "save_failed": not process.alive()}
        done = pending.future.done()
        failed = pending.error() is not None or (not done and (pending.overdue() or not process.alive()))
        return {"save_done": done and not failed, "save_failed": failed}

    def settle(self, done_everywhere: bool, failed_anywhere: bool) -> None:
        """Act on the reduced `status` of all ranks: mark a save as committed, or replace the writers after a failure.

        The numbers may be one step old; those from before the last `save` or failure are ignored.

        Raises:
            SavesFailed: one failure too many, on all ranks alike.
        """
        if self._stale:
            self._stale = False
        elif failed_anywhere:
            self._recover()
        elif done_everywhere and self._pending is not None:
            self._mark_committed(self._pending)

    def finish(self) -> bool:
        """Wait for the pending save, at most until its deadline. A save of the present state is tried once more.

        Returns:
            Whether the last save that was started is on disk.

        Raises:
            SavesFailed: one failure too many, on all ranks alike.
        """
        pending = self._pending
        if pending is None or pending.step is None:
            return True
        self._wait()
        if not self._is_saved(pending.step) and not pending.staged:  # no optimizer step since
            log.warning("saving step %d once more", pending.step)
            self.save(pending.step, pending.samples)
            self._wait()
        return self._is_saved(pending.step)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_saved(self, step: int) -> bool:
        return step == self._committed or (self._pending is not None and self._pending.step == step)

    def _request(self, step: int = 0, samples: int = 0) -> SaveRequest:
        commit = Commit(
            directory=self.run_dir / commits.directory_name(step),
            step=step,
            samples=samples,
            attempt=self.attempt,
            world_size=self.size,
            time=time.time(),
            fingerprint=self.state.fingerprint,
            torch=torch.__version__,
            template=self._template,
            code=self._code,
            files={},
        )
        return SaveRequest(self.run_dir, commit, self.mode, self.config.checkpoint, time.monotonic(), self._tries)

    def _start_process(self) -> None:
        """Start the writer process in the background; that of rank 0 sweeps what dead attempts left."""
        self._stager.forget()
        begin, patience_s = time.monotonic(), max(START_S, self.config.checkpoint.deadline_s)
        future = process.start(WarmUp(self._request()), self.group)
        self._pending = PendingSave(future, begin, patience_s, "the start of the writer process")

    def _start(
        self, writer: DryRunSave, begin: float, what: str, step: int | None = None, samples: int = 0
    ) -> PendingSave:
        state = {STATE: self.state.state_dict()}
        future = process.save(state, writer, ArenaPlanner(), self._stager, self.group)
        return PendingSave(future, begin, self.config.checkpoint.deadline_s, what, step, samples)

    def _dry_run(self) -> None:
        """Make room for the copy and plan once, writing nothing, so that the first save is as fast as the others."""
        self._pending = self._start(DryRunSave(self._request()), time.monotonic(), "the dry run of a save")
        assert self._stager.copied is not None
        self._stager.copied.exception(timeout=self.config.checkpoint.deadline_s)
        self._pending.staged = self._dry_run_done = self._stale = True

    def _wait(self) -> None:
        """Wait for what is pending; all ranks agree how it ended, and go on without it."""
        pending = self._pending
        if pending is None:
            return
        while True:  # in slices, so that a failure on one rank ends the wait of all
            pending.wait(_SLICE_S)
            status = self.status()
            ends = torch.tensor([status["save_done"], not status["save_failed"]], dtype=torch.int32)
            dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=self.group)
            done, well = map(bool, ends.tolist())
            if not well:
                return self._recover()
            if done:
                return self._mark_committed(pending)

    def _mark_staged(self, pending: PendingSave) -> None:
        pending.staged = True
        if self.rank == 0 and pending.step is not None:
            self.ledger.record("save_staged", step=pending.step, stall_s=round(pending.waited_s + pending.stall_s, 5))

    def _mark_committed(self, pending: PendingSave) -> None:
        self._pending = None
        if pending.step is None:
            return
        self._committed, self._failures = pending.step, 0
        if not pending.staged:
            self._mark_staged(pending)
        if self.rank == 0:
            took_s = (pending.ended or time.monotonic()) - pending.began
            if changed := self._pace.ended(took_s, pending.stall_s):
                self.ledger.record("retuned", **changed)

    def _recover(self) -> None:
        """A save failed, or a writer process is gone: replace all of them together, plan caches with them."""
        pending, self._pending = self._pending, None
        reasons = [text for text in gather(self.group, self._reason(pending)) if text]
        reason = reasons[0] if reasons else "for an unknown reason"
        process.end(0.0)
        if pending is not None:
            pending.wait(CRASH_PATIENCE_S)
            process.end(0.0)  # one that had only just started by then
        step = pending.step if pending is not None else None
        if step is not None and run_on_rank0(self.group, lambda: self._is_on_disk(step)):  # it failed after its commit
            self._committed, self._failures = step, 0
        elif pending is not None:
            self._failures += 1
            if self.rank == 0:
                self._pace.ended(None, pending.stall_s)
                log.error("%s failed (%s)", pending.what, reason)
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
                f"checkpoints that are complete were kept ({kept}): fix the volume or the machine, then start again"
            )
        self._start_process()
        self._stale, self._dry_run_done = True, False

    def _reason(self, pending: PendingSave | None) -> str:
        """Why this rank thinks that something failed, in one line; empty if it does not."""
        if pending is not None and (error := pending.error()) is not None:
            text = _one_line(error)
            return text if text.startswith("rank ") else f"rank {self.rank}: {text}"
        if not process.alive():
            return f"rank {self.rank}: the writer process died"
        if pending is not None and pending.overdue():
            took_s, deadline_s = time.monotonic() - pending.began, self.config.checkpoint.deadline_s
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


def _lost(run_dir: Path, commit: Commit) -> dict[str, Any]:
    """What the interruption before this start cost: steps that have to be trained again, and the time they took.

    Where an attempt between has loaded it and made no step, it has recorded that already.
    """
    units_per_sample = commit.fingerprint.get("data.sequence_length", 0)
    again = [step for step in read_counting(run_dir, units_per_sample) if step.step > commit.step]
    return {"lost_steps": len(again), "lost_s": round(sum(step.seconds for step in again), 3)}
