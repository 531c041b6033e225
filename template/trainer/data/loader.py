"""The micro-batches of one rank, step after step, prepared ahead by data-loader workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from trainer.config.settings import DataConfig
from trainer.data.order import SampleOrder, batch_checksum, derive_seed
from trainer.data.plan import BatchPlan, MicroBatch
from trainer.reclaim.rank import worker_ignore_signals
from trainer.task import Samples


@dataclass(frozen=True)
class Batch:
    """One micro-batch on its way to the model."""

    index: int  # its number in the global batch
    samples: Any  # what the task's `samples` gave
    is_padding: bool  # repeats a sample, for ranks with fewer micro-batches; carries no weight
    checksum: tuple[int, int]  # of the sample numbers: see `order.batch_checksum`

    def pin_memory(self) -> Batch:
        """For the data loader: a copy from which a GPU reads without holding up the host."""
        return replace(self, samples=tree_map(lambda value: value.pin_memory(), self.samples))

    def to(self, device: torch.device) -> Any:
        """The samples on `device`."""
        return tree_map(lambda value: value.to(device, non_blocking=True), self.samples)


_Request = tuple[MicroBatch, np.ndarray, np.ndarray]  # with the sample numbers and epochs at its positions


class _MicroBatches(Dataset[Batch]):
    def __init__(self, samples: Samples) -> None:
        self.source = samples

    def __getitem__(self, request: _Request) -> Batch:
        mine, numbers, epochs = request
        samples = self.source.samples(numbers, epochs)
        checksum = (0, 0) if mine.is_padding else batch_checksum(np.asarray(mine.positions, dtype=np.int64), numbers)
        return Batch(mine.index, samples, mine.is_padding, checksum)


def loader(
    samples: Samples, settings: DataConfig, plan: BatchPlan, rank: int, *, consumed: int, steps: int, seed: int,
    workers: int = 0, pin: bool = False,
) -> Iterator[Sequence[Batch]]:  # fmt: skip
    """Yield, for each of `steps` optimizer steps after `consumed` samples, the micro-batches that `rank` runs.

    Its workers' seeds come from a generator of its own: a loader takes nothing from the streams of the user's code.
    """
    order, mine = SampleOrder(len(samples), seed), plan.of_rank(rank)

    def requests() -> Iterator[_Request]:
        for step in range(steps):
            for micro_batch in mine:
                positions = np.asarray(micro_batch.positions, dtype=np.int64)
                yield micro_batch, *order.at(consumed + step * plan.global_batch + positions)

    batches = iter(
        DataLoader(
            _MicroBatches(samples),
            batch_size=None,
            sampler=requests(),
            num_workers=workers,
            prefetch_factor=settings.prefetch if workers else None,
            worker_init_fn=worker_ignore_signals,
            generator=torch.Generator().manual_seed(derive_seed("loader", seed, rank, consumed)),
            multiprocessing_context="fork" if workers else None,  # else the samples would be pickled
            pin_memory=pin,
        )
    )
    for _ in range(steps):
        yield [next(batches) for _ in range(plan.micro_batches_per_rank)]
