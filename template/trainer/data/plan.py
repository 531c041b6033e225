"""The batch plan: which samples of a global batch each rank runs, for any world size.

Micro-batch k of a step holds samples [k·m, (k+1)·m) of the global batch, whatever the world size. Whole micro-batches
are dealt to the ranks in order; a rank with fewer of them runs padding, which repeats a real sample and carries no
weight, so that all ranks run the same number of forward and backward passes and with them the same collectives.
Imports no torch: the launcher prints the plan before it starts any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.wording import counted


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: the samples at `positions` of the global batch."""

    index: int  # k, its number in the global batch; padding is numbered on from there, differently on each rank
    positions: Sequence[int]
    is_padding: bool = False


@dataclass(frozen=True)
class BatchPlan:
    """How `global_batch` samples become micro-batches of `micro_batch` samples on `world_size` ranks (each ≥ 1)."""

    global_batch: int
    micro_batch: int
    world_size: int

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one global batch; the last one may be smaller than the others."""
        return -(-self.global_batch // self.micro_batch)

    @property
    def micro_batches_per_rank(self) -> int:
        """Forward passes that every rank runs in one optimizer step (the gradient accumulation)."""
        return -(-self.micro_batches // self.world_size)

    @property
    def padding_share(self) -> float:
        """Share of the forward passes that carry no weight, 0 to 1."""
        return 1 - self.micro_batches / (self.world_size * self.micro_batches_per_rank)

    def of_rank(self, rank: int) -> list[MicroBatch]:
        """The micro-batches that `rank` runs, in order."""
        fewer, more = divmod(self.micro_batches, self.world_size)
        first = rank * fewer + min(rank, more)
        plan = []
        for index in range(first, first + fewer + (rank < more)):
            start = index * self.micro_batch
            plan.append(MicroBatch(index, range(start, min(start + self.micro_batch, self.global_batch))))
        while len(plan) < self.micro_batches_per_rank:
            plan.append(MicroBatch(self.micro_batches + rank, [0] * min(self.micro_batch, self.global_batch), True))
        return plan

    def describe(self) -> str:
        """One line for the log: what each rank runs, and what share of it is padding."""
        line = (
            f"{counted(self.global_batch, 'sample')} a step = "
            f"{counted(self.micro_batches, 'micro-batch', 'micro-batches')} of {self.micro_batch} "
            f"on {counted(self.world_size, 'rank')}: {self.micro_batches_per_rank} each"
        )
        return line + (f", {self.padding_share:.0%} of them padding" if self.padding_share > 0 else "")
