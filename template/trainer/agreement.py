"""One reduction per optimizer step carries its loss and every decision that all ranks have to take alike.

A rank may be told to stop, or see its save fail, at another moment than its peers. Nothing of that is acted on before
it has been summed over all ranks. On accelerators the sum is read one step late (`lag`), so that no step waits for
the host; on CPUs at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel import World
from trainer.reclaim import Want


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of step `step`, equal on each of them."""

    step: int
    loss: float  # mean over the global batch
    grad_norm: float
    want: Want  # the strongest request of any rank
    save_due: bool  # rank 0's interval says: save after step `step` + lag
    save_done: bool  # on every rank
    save_failed: bool  # on any rank

    @classmethod
    def nothing(cls, step: int) -> Agreed:
        """What is known of a step whose numbers are still under way."""
        return cls(step, float("nan"), float("nan"), Want.NOTHING, False, False, False)


class Agreement:
    """Collects the numbers of each step on all ranks; `lag` is how many steps later they are read."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lag = 0 if world.device.type == "cpu" else 1
        self._pending: deque[tuple[int, Tensor, dist.Work | None]] = deque()

    def exchange(
        self,
        step: int,
        loss: Tensor,
        grad_norm: Tensor,
        *,
        want: Want,
        save_due: bool,
        save_done: bool,
        save_failed: bool,
    ) -> list[Agreed]:
        """Sum the numbers of `step` over the ranks; return those that are ready to be read (of step - lag).

        Args:
            loss: this rank's share of the mean loss, a scalar; the shares add up to the mean.
            grad_norm: of the whole gradient, equal on all ranks.
        """
        bits = [want >= Want.SAVE, want >= Want.STOP, want >= Want.STOP_UNSAVED]
        bits += [self.world.is_main and save_due, save_done, save_failed]
        flags = torch.tensor(bits, dtype=torch.float64)
        numbers = torch.stack((loss.detach().double(), grad_norm.detach().double() / self.world.size))
        device = "cpu" if self.lag == 0 else self.world.device
        vector = torch.cat((numbers.to(device), flags.to(device, non_blocking=True)))
        group = self.world.control if self.lag == 0 else None
        self._pending.append((step, vector, dist.all_reduce(vector, group=group, async_op=self.lag > 0)))
        ready = []
        while len(self._pending) > self.lag:
            ready.append(self._read())
        return ready

    def stop_now(self, want: Want) -> bool:
        """Whether any rank has been asked to stop, before the first step."""
        asked = torch.tensor([want >= Want.STOP], dtype=torch.int32)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.world.control)
        return bool(asked)

    def drain(self) -> list[Agreed]:
        """Read what is still under way, up to the newest step."""
        return [self._read() for _ in range(len(self._pending))]

    def _read(self) -> Agreed:
        step, vector, work = self._pending.popleft()
        if work is not None:
            work.wait()
        loss, norm, save, stop, unsaved, due, done, failed = vector.tolist()
        want = Want.STOP_UNSAVED if unsaved else Want.STOP if stop else Want.SAVE if save else Want.NOTHING
        return Agreed(step, loss, norm, want, due > 0, round(done) == self.world.size, failed > 0)
