"""One reduction per optimizer step carries its loss and every decision that all ranks have to take alike.

A rank may be told to stop, or see its save fail, at another moment than its peers. Nothing of that is acted on before
it has been summed over all ranks. On accelerators the sum is read one step late (`lag`), so that no step waits for
the host; on CPUs at once. What was agreed on in step s is acted on in step s + lag, also where it had to be read
earlier (before a save, whose step must be in the metrics by then).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.order import batch_hash
from trainer.parallel import World
from trainer.reclaim.request import Action


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of step `step`, equal on each of them."""

    step: int
    loss: float  # mean over the global batch
    grad_norm: float
    batch_hash: str  # of the samples that the ranks ran
    want: Action  # the strongest request of any rank
    save_due: bool  # rank 0's interval says: save after step `step` + lag
    save_done: bool  # on every rank
    save_failed: bool  # on any rank
    moment: float  # time.perf_counter() of this rank when it had enqueued the step, without what was done aside


class Agreement:
    """Collects the numbers of each step on all ranks; `lag` is how many steps later they are read."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lag = 0 if world.device.type == "cpu" else 1
        self._side = torch.cuda.Stream() if world.device.type == "cuda" else None
        self._aside_s = 0.0
        self._pending: deque[tuple[int, float, Tensor, Callable[[], Any] | None]] = deque()
        self._unrecorded: list[Agreed] = []
        self._to_act_on: dict[int, Agreed] = {}
        self._early = Action.NOTHING  # a wish to save that came before the first step

    def begin(self, first: int, *, want: Action, save_due: bool) -> bool:
        """Before step `first`: whether any rank has been asked to stop.

        Args:
            save_due: rank 0's interval says: save after step `first`.
        """
        asked = torch.tensor([want >= Action.STOP, self.world.is_main and save_due], dtype=torch.int32)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.world.control)
        stop, due = map(bool, asked.tolist())
        self._early = min(want, Action.SAVE)
        self._to_act_on[first - 1] = replace(_nothing(first - 1), save_due=due)
        return stop

    def exchange(
        self,
        step: int,
        loss: Tensor,
        grad_norm: Tensor,
        witness: tuple[int, int],
        *,
        want: Action,
        save_due: bool,
        save_done: bool,
        save_failed: bool,
    ) -> Agreed:
        """Sum the numbers of `step` over the ranks; return what is to be acted on now: that of step - lag.

        Args:
            loss: this rank's share of the mean loss, a scalar; the shares add up to the mean.
            grad_norm: of the whole gradient, equal on all ranks.
            witness: of this rank's samples (see `data.witness`).
            save_due: rank 0's interval says: save after step `step` + lag.
        """
        want, self._early = max(want, self._early), Action.NOTHING
        flags = [want >= Action.SAVE, want >= Action.STOP, want >= Action.STOP_UNSAVED]
        flags += [self.world.is_main and save_due, save_done, save_failed]
        host = torch.tensor([*map(float, witness), *map(float, flags)], dtype=torch.float64)
        numbers = torch.stack((loss.detach().double(), grad_norm.detach().double() / self.world.size))
        device = "cpu" if self.lag == 0 else self.world.device
        vector = torch.cat((numbers.to(device), host.to(device, non_blocking=True)))
        group = self.world.control if self.lag == 0 else None
        work = dist.all_reduce(vector, group=group, async_op=self.lag > 0)
        moment = time.perf_counter() - self._aside_s
        self._pending.append((step, moment, *self._on_its_way(vector, work)))
        while len(self._pending) > self.lag:
            self._read()
        self._to_act_on.pop(step - self.lag - 1, None)
        return self._to_act_on.get(step - self.lag) or _nothing(step - self.lag)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around work between two steps (an evaluation) whose time is none of theirs."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._aside_s += time.perf_counter() - begin

    def drain(self) -> None:
        """Read what is still under way, up to the newest step.

        Of that, nothing is acted on that a save may change meanwhile: whether one is done is asked again anyway.
        """
        while self._pending:
            newest = self._read()
            self._to_act_on[newest.step] = replace(newest, save_done=False, save_failed=False)

    def to_record(self) -> list[Agreed]:
        """Every step that was read since the last call, each once."""
        ready, self._unrecorded = self._unrecorded, []
        return ready

    def _on_its_way(self, vector: Tensor, work: dist.Work | None) -> tuple[Tensor, Callable[[], Any] | None]:
        """The sum where the host can read it, and what to wait for before that: not for the steps enqueued since."""
        if self._side is None or work is None:
            return vector, work.wait if work is not None else None
        with torch.cuda.stream(self._side):
            work.wait()
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            host.copy_(vector, non_blocking=True)
            vector.record_stream(self._side)
            return host, self._side.record_event().synchronize

    def _read(self) -> Agreed:
        step, moment, vector, wait = self._pending.popleft()
        if wait is not None:
            wait()
        loss, norm, high, low, save, stop, unsaved, due, done, failed = vector.tolist()
        want = Action.STOP_UNSAVED if unsaved else Action.STOP if stop else Action.SAVE if save else Action.NOTHING
        done_everywhere = round(done) == self.world.size
        agreed = Agreed(step, loss, norm, batch_hash(high, low), want, due > 0, done_everywhere, failed > 0, moment)
        self._unrecorded.append(agreed)
        self._to_act_on[step] = agreed
        return agreed


def _nothing(step: int) -> Agreed:
    return Agreed(step, float("nan"), float("nan"), "", Action.NOTHING, False, False, False, 0.0)
