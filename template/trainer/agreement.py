"""One reduction per optimizer step carries the sums of its loss and every decision that all ranks have to take alike.

A rank may be told to stop, or see its save fail, at another moment than its peers. Nothing of that is acted on before
it has been summed over all ranks. On accelerators the host reads the sum one step late (`lag`), so that no step waits
for it; on CPUs at once. What was agreed on in step s is acted on in step s + lag, also where it had to be read earlier
(before a save, whose step must be in the metrics by then).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.order import batch_hash
from trainer.parallel import World
from trainer.reclaim.request import Action


@dataclass(frozen=True)
class Decision:
    """What all ranks do after a step, equal on each of them."""

    evaluate: bool
    save: bool
    stop: bool  # after this step and its save
    save_done: bool  # the pending save, on every rank
    save_failed: bool  # on any rank


@dataclass
class StepTotals:
    """What the ranks have summed up for one step: numbers for the record, and what was asked for."""

    step: int
    moment: float = 0.0  # time.perf_counter() of this rank when it had enqueued the step, less what is excluded
    loss: float = 0.0  # sum over the global batch, as the others
    weight: float = 0.0
    metrics: Sequence[float] = ()
    batch_hash: str = ""  # of the samples that the ranks ran
    grad_norm: float = 0.0  # of the mean gradient, before clipping
    action: Action = Action.NOTHING  # the strongest request of any rank
    save_due: bool = False
    save_done: bool = False
    save_failed: bool = False


_Numbers = Callable[[], Any]  # waits for a vector that is on its way to the host; its numbers


class Agreement:
    """Collects the numbers of each step on all ranks.

    Args:
        last: the run's last step.
        evaluate_every: steps between evaluations, 0 for none.
    """

    def __init__(self, world: World, last: int, evaluate_every: int = 0) -> None:
        self.world, self.last, self.evaluate_every = world, last, evaluate_every
        self.lag = 0 if world.device.type == "cpu" else 1
        self._side = torch.cuda.Stream() if world.device.type == "cuda" else None
        self._excluded_s = 0.0
        self._pending: deque[tuple[StepTotals, _Numbers]] = deque()
        self._to_act_on: dict[int, StepTotals] = {}
        self._norms: dict[int, _Numbers] = {}
        self._unrecorded: list[StepTotals] = []
        self._early = Action.NOTHING  # a request to save that came before the first step

    def begin(self, first: int, *, action: Action, save_due: bool) -> bool:
        """Before step `first`: whether any rank has been asked to stop.

        Args:
            save_due: rank 0's interval says: save after step `first`.
        """
        asked = torch.tensor([action >= Action.STOP, self.world.is_main and save_due], dtype=torch.int32)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.world.control)
        stop, due = map(bool, asked.tolist())
        self._early = min(action, Action.SAVE)
        self._to_act_on[first - 1] = StepTotals(first - 1, save_due=due)
        return stop

    def decide(
        self, step: int, sums: Tensor, checksum: tuple[int, int], *, action: Action, save_due: bool, save_done: bool,
        save_failed: bool,
    ) -> tuple[Decision, Tensor]:  # fmt: skip
        """Sum the numbers of `step` over the ranks, between its last backward and its update.

        Args:
            sums: this rank's loss, weight and metrics, float64 [2 + metrics] on the device.
            checksum: of this rank's samples (see `order.batch_checksum`).
            save_due: rank 0's interval says: save after step `step` + lag.

        Returns:
            What to do after this step, and `sums` over all ranks, on the device.
        """
        self._newest = step
        action, self._early = max(action, self._early), Action.NOTHING
        asked = [action >= level for level in (Action.SAVE, Action.STOP, Action.STOP_UNSAVED)]
        flags = [*checksum, *asked, self.world.is_main and save_due, save_done, save_failed]
        vector = torch.cat((sums, torch.tensor(flags, dtype=torch.float64).to(sums.device, non_blocking=True)))
        dist.all_reduce(vector, group=self.world.control if self.lag == 0 else None)
        self._pending.append((StepTotals(step, time.perf_counter() - self._excluded_s), self._to_host(vector)))
        while len(self._pending) > self.lag:
            self._read()
        self._to_act_on.pop(step - self.lag - 1, None)
        agreed = self._to_act_on.get(step - self.lag) or StepTotals(step)
        decision = Decision(
            evaluate=self.evaluate_every > 0 and step % self.evaluate_every == 0 and agreed.action < Action.STOP,
            save=agreed.save_due or agreed.action in (Action.SAVE, Action.STOP) or step == self.last,
            stop=agreed.action >= Action.STOP or step == self.last,
            save_done=agreed.save_done,
            save_failed=agreed.save_failed,
        )
        return decision, vector[: len(sums)]

    def complete(self, grad_norm: Tensor, decision: Decision) -> list[StepTotals]:
        """After the update of the newest step.

        Args:
            grad_norm: a scalar on the device, equal on all ranks.

        Returns:
            Every step that the host knows all of by now, each once; the newest is among them where `decision` has
            something done after it.
        """
        self._norms[self._newest] = self._to_host(grad_norm)
        if decision.evaluate or decision.save or decision.stop:
            while self._pending:
                newest = self._read()
                newest.save_done = newest.save_failed = False  # a save may change that: it is asked for again
        ready, self._unrecorded = self._unrecorded, []
        for one in ready:
            one.grad_norm = self._norms.pop(one.step)()
        return ready

    @contextmanager
    def excluded_from_step_time(self) -> Iterator[None]:
        """Around work between two steps (an evaluation, the stall of a save) whose time is none of theirs."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._excluded_s += time.perf_counter() - begin

    def _to_host(self, vector: Tensor) -> _Numbers:
        """Start copying to the host; on a GPU that waits for the vector and not for what is enqueued after it."""
        if self._side is None:
            return vector.tolist
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            host.copy_(vector, non_blocking=True)
            vector.record_stream(self._side)
            copied = self._side.record_event()

        def numbers() -> Any:
            copied.synchronize()
            return host.tolist()

        return numbers

    def _read(self) -> StepTotals:
        """Take up the oldest pending step."""
        totals, numbers = self._pending.popleft()
        *sums, high, low, save, stop, unsaved, due, done, failed = numbers()
        totals.loss, totals.weight, *totals.metrics = sums
        totals.batch_hash = batch_hash(high, low)
        actions = ((unsaved, Action.STOP_UNSAVED), (stop, Action.STOP), (save, Action.SAVE))
        totals.action = next((action for asked, action in actions if asked), Action.NOTHING)
        totals.save_due, totals.save_failed = due > 0, failed > 0
        totals.save_done = round(done) == self.world.size
        self._to_act_on[totals.step] = totals
        self._unrecorded.append(totals)
        return totals
