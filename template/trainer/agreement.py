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
from dataclasses import dataclass, field, replace
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
    """What the ranks have summed up for one step; rank 0 records it."""

    step: int
    moment: float  # time.perf_counter() of this rank when it had enqueued the step, less what is excluded
    loss: float = 0.0  # sum over the global batch, as the others
    weight: float = 0.0
    metrics: Sequence[float] = ()
    batch_hash: str = ""  # of the samples that the ranks ran
    grad_norm: float = 0.0  # of the mean gradient, before clipping


@dataclass(frozen=True)
class _Agreed:
    """The strongest request of any rank, and whether rank 0's interval says to save."""

    action: Action = Action.NOTHING
    save_due: bool = False
    save_done: bool = False
    save_failed: bool = False


@dataclass
class _Pending:
    """A step whose sums are on their way to the host."""

    totals: StepTotals
    sums: Callable[[], list[float]]
    grad_norm: Callable[[], list[float]] = field(default=lambda: [0.0])


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
        self._pending: deque[_Pending] = deque()
        self._read_steps: list[_Pending] = []
        self._agreed: dict[int, _Agreed] = {}
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
        self._agreed[first - 1] = _Agreed(save_due=due)
        return stop

    def decide(
        self,
        step: int,
        sums: Tensor,
        checksum: tuple[int, int],
        *,
        action: Action,
        save_due: bool,
        save_done: bool,
        save_failed: bool,
    ) -> tuple[Decision, Tensor]:
        """Sum the numbers of `step` over the ranks, between its last backward and its update.

        Args:
            sums: this rank's loss, weight and metrics, float64 [2 + metrics] on the device.
            checksum: of this rank's samples (see `order.batch_checksum`).
            save_due: rank 0's interval says: save after step `step` + lag.

        Returns:
            What to do after this step, and `sums` over all ranks, on the device.
        """
        action, self._early = max(action, self._early), Action.NOTHING
        flags = [action >= Action.SAVE, action >= Action.STOP, action >= Action.STOP_UNSAVED]
        flags += [self.world.is_main and save_due, save_done, save_failed]
        host = torch.tensor([*map(float, checksum), *map(float, flags)], dtype=torch.float64)
        vector = torch.cat((sums, host.to(sums.device, non_blocking=True)))
        dist.all_reduce(vector, group=self.world.control if self.lag == 0 else None)
        totals = StepTotals(step, time.perf_counter() - self._excluded_s)
        self._pending.append(_Pending(totals, self._to_host(vector)))
        while len(self._pending) > self.lag:
            self._read()
        self._agreed.pop(step - self.lag - 1, None)
        agreed = self._agreed.get(step - self.lag, _Agreed())
        stop = agreed.action >= Action.STOP or step == self.last
        decision = Decision(
            evaluate=self.evaluate_every > 0 and step % self.evaluate_every == 0 and agreed.action < Action.STOP,
            save=agreed.save_due or agreed.action in (Action.SAVE, Action.STOP) or step == self.last,
            stop=stop,
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
        self._newest().grad_norm = self._to_host(grad_norm.detach().double().reshape(1))
        if decision.evaluate or decision.save or decision.stop:
            # Of what is read early nothing is acted on that a save may change: whether one is done is asked again.
            while self._pending:
                step = self._read()
                self._agreed[step] = replace(self._agreed[step], save_done=False, save_failed=False)
        done, self._read_steps = self._read_steps, []
        for one in done:
            one.totals.grad_norm = one.grad_norm()[0]
        return [one.totals for one in done]

    @contextmanager
    def excluded_from_step_time(self) -> Iterator[None]:
        """Around work between two steps (an evaluation, the stall of a save) whose time is none of theirs."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._excluded_s += time.perf_counter() - begin

    def _newest(self) -> _Pending:
        return self._pending[-1] if self._pending else self._read_steps[-1]

    def _to_host(self, vector: Tensor) -> Callable[[], Any]:
        """What gives the numbers of `vector`; on a GPU it waits for the copy and not for what is enqueued since."""
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

    def _read(self) -> int:
        """Take up the oldest pending step. Returns its number."""
        pending = self._pending.popleft()
        *sums, high, low, save, stop, unsaved, due, done, failed = pending.sums()
        totals = pending.totals
        totals.loss, totals.weight, *totals.metrics = sums
        totals.batch_hash = batch_hash(high, low)
        actions = ((unsaved, Action.STOP_UNSAVED), (stop, Action.STOP), (save, Action.SAVE))
        action = next((action for asked, action in actions if asked), Action.NOTHING)
        self._agreed[totals.step] = _Agreed(action, due > 0, round(done) == self.world.size, failed > 0)
        self._read_steps.append(pending)
        return totals.step
