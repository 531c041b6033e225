"""The micro-batches of one rank, step after step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from tasks.language_model.data import Samples
from trainer.config.settings import Config
from trainer.data.order import SampleOrder, batch_checksum, derive_seed
from trainer.data.plan import BatchPlan, MicroBatch
from trainer.reclaim.rank import worker_ignore_signals


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank on its way to the model."""

    index: int  # its number in the global batch
    tokens: torch.Tensor  # int64 [micro_batch, sequence_length + 1]
    real: int  # the first `real` samples count, the rest is padding
    witness: tuple[int, int]  # of the samples that count


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
        mine = request.micro_batch
        tokens = self.source.samples(request.numbers, request.epochs)
        ran = batch_checksum(np.asarray(mine.positions[: mine.real], dtype=np.int64), request.numbers[: mine.real])
        return Batch(mine.index, tokens, mine.real, ran)


def _as_is(batch: Any) -> Any:
    return batch


def loader(
    samples: Samples, config: Config, plan: BatchPlan, rank: int, *, consumed: int, steps: int, seed: int, workers: int
) -> Iterator[Sequence[Batch]]:
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
            prefetch_factor=config.data.prefetch if workers else None,
            worker_init_fn=worker_ignore_signals,
            generator=torch.Generator().manual_seed(derive_seed("loader", seed, rank, consumed)),
            multiprocessing_context="fork" if workers else None,  # else the token file would be pickled
        )
    )
    for _ in range(steps):
        yield [next(batches) for _ in range(plan.micro_batches_per_rank)]
