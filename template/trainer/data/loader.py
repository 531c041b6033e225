"""The micro-batches of one rank, step after step, prepared ahead by data-loader workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Sampler

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


@dataclass(frozen=True)
class _Request:
    micro_batch: MicroBatch
    numbers: np.ndarray
    epochs: np.ndarray


class _Requests(Sampler[_Request]):
    """The micro-batches of one rank, step after step, from `consumed` samples on."""

    def __init__(self, order: SampleOrder, plan: BatchPlan, rank: int, consumed: int, steps: int) -> None:
        self.order, self.plan, self.consumed, self.steps = order, plan, consumed, steps
        self.mine = plan.of_rank(rank)

    def __iter__(self) -> Iterator[_Request]:
        for step in range(self.steps):
            start = self.consumed + step * self.plan.global_batch
            for micro_batch in self.mine:
                positions = start + np.asarray(micro_batch.positions, dtype=np.int64)
                yield _Request(micro_batch, *self.order.at(positions))


class _MicroBatches(Dataset[Batch]):
    def __init__(self, samples: Samples) -> None:
        self.source = samples

    def __getitem__(self, request: _Request) -> Batch:
        mine, numbers = request.micro_batch, request.numbers
        samples = self.source.samples(numbers, request.epochs)
        positions = np.asarray(mine.positions, dtype=np.int64)
        checksum = (0, 0) if mine.is_padding else batch_checksum(positions, numbers)
        return Batch(mine.index, samples, mine.is_padding, checksum)


def _as_is(batch: Any) -> Any:
    return batch


def loader(
    samples: Samples, settings: DataConfig, plan: BatchPlan, rank: int, *, consumed: int, steps: int, seed: int,
    workers: int = 0, pin: bool = False,
) -> Iterator[Sequence[Batch]]:  # fmt: skip
    """Yield, for each of `steps` optimizer steps after `consumed` samples, the micro-batches that `rank` runs.

    Its workers' seeds come from a generator of its own: a loader takes nothing from the streams of the user's code.
    """
    requests = _Requests(SampleOrder(len(samples), seed), plan, rank, consumed, steps)
    batches = iter(
        DataLoader(
            _MicroBatches(samples),
            batch_size=None,
            sampler=requests,
            collate_fn=_as_is,
            num_workers=workers,
            prefetch_factor=settings.prefetch if workers else None,
            worker_init_fn=worker_ignore_signals,
            generator=torch.Generator().manual_seed(derive_seed("loader", seed, rank, consumed)),
            multiprocessing_context="fork" if workers else None,  # else the token file would be pickled
            pin_memory=pin,
        )
    )
    for _ in range(steps):
        yield [next(batches) for _ in range(plan.micro_batches_per_rank)]
