"""Loss and metrics on the held-out samples, over all ranks."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from trainer.data.loader import loader
from trainer.data.plan import BatchPlan
from trainer.run import Run


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """`val_loss` and the task's metrics as `val_…`: means over the first `train.eval_batches` global batches of the
    held-out samples. Empty where there are none."""
    config, task, world = run.config, run.task, run.world
    held_out = len(task.validation)
    if not held_out:
        return {}
    size = min(config.data.global_batch, held_out)
    plan = BatchPlan(size, config.data.micro_batch, world.size)
    rounds = max(1, min(config.train.eval_batches, held_out // size))
    sums: dict[str, torch.Tensor] = {}
    with run.excluded_from_step_time():
        run.model.eval()
        batches = loader(task.validation, config.data, plan, world.rank, consumed=0, steps=rounds, seed=0)
        for batch in itertools.chain.from_iterable(batches):
            one = task.loss(run.model, batch.to(world.device))
            for name, value in {"loss": one.sum, "weight": one.weight, **one.metrics}.items():
                value = torch.as_tensor(value, device=world.device).double() * (not batch.is_padding)
                sums[name] = sums.get(name, 0.0) + value
        total = torch.stack(list(sums.values()))
        dist.all_reduce(total)
        found = dict(zip(sums, total.tolist(), strict=True))
        run.model.train()
    weight = found.pop("weight") or 1.0
    return {f"val_{name}": value / weight for name, value in found.items()}
