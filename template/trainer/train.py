"""The training loop: to the last step, or to the step at which all ranks agree to stop.

`python -m trainer train [KEY=VALUE ...]` is one rank; `launch` starts as many as there are GPUs.
"""

from __future__ import annotations

import gc
import itertools
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.language_model import data as corpus
from tasks.language_model.model import build_model, flops_per_token
from trainer import parallel
from trainer.agreement import Agreed, Agreement
from trainer.checkpoint.lease import current_epoch
from trainer.checkpoint.save import Checkpoints
from trainer.collectives import from_main, on_each
from trainer.config.fingerprint import fingerprint
from trainer.config.settings import Config
from trainer.data import loader as data_loader
from trainer.data import order as data_order
from trainer.data.plan import BatchPlan
from trainer.ledger import Ledger
from trainer.metrics import Metrics
from trainer.optim import AveragedWeights, build_optimizer, clip_gradients, learning_rate, set_learning_rate
from trainer.outcome import ConfigError, Reason, SavesFailed
from trainer.parallel import World
from trainer.reclaim.rank import Reclaim
from trainer.reclaim.request import Action
from trainer.state import TrainState, seed_all

SHOWN_S = 60.0  # until another node sees what the first one has written


def train(
    config: Config, *, runtime: Path | None = None, attempt: int | None = None, accepted: Sequence[str] = ()
) -> tuple[Reason, int]:
    """Train from the newest complete checkpoint, or from the start where there is none.

    Args:
        runtime: directory through which the launcher of this node talks to its ranks; None without a launcher.
        attempt: number of this start, from the launcher of node 0; None elsewhere (rank 0 tells).
        accepted: dotted keys that may differ from the checkpoint's configuration.

    Returns:
        Why training stopped, and after which step.
    """
    with ExitStack() as stack:
        reclaim = stack.enter_context(Reclaim(runtime, config.reclaim.grace_s))
        world = stack.enter_context(parallel.join())
        attempt = _agree_on_attempt(attempt, runtime, config, world, stack)
        from_main(world.control, partial(corpus.prepare_corpus, config))
        samples, held_out = on_each(world.control, partial(corpus.build_dataset, config))
        state, model = build(config, world, samples)
        plan = BatchPlan(config.data.global_batch, config.data.micro_batch, world.size)
        ledger = Ledger(config.run_dir, attempt)
        stack.callback(ledger.close)

        checkpoints = stack.enter_context(
            Checkpoints(config, config.run_dir, attempt, state, world.checkpoints, ledger, accepted)
        )
        resumed = checkpoints.resume()
        if resumed is not None and world.is_main:
            plural = "s" * (resumed.world_size != 1)
            print(f"resumed after step {resumed.step}, saved by {resumed.world_size} rank{plural}", flush=True)
        first, last = state.step + 1, config.train.steps
        if world.is_main:
            ledger.record("attempt_started", world_size=world.size, step=state.step, checkpoint=checkpoints.loaded)
        agreement = Agreement(world)
        if first > last:
            return Reason.FINISHED, state.step
        due = agreement.lag > 0 and world.is_main and checkpoints.due(first)  # else asked after that step
        if agreement.begin(first, want=reclaim.requested(), save_due=due):
            return reclaim_reason(reclaim), state.step
        metrics = stack.enter_context(_metrics(config, attempt, first, model, world))
        record = _Recorder(config, metrics, state)
        batches = data_loader.loader(
            samples, config, plan, world.rank,
            consumed=state.samples, steps=last - state.step, seed=config.data.seed, workers=config.data.workers,
        )  # fmt: skip
        gc.freeze()  # what is there stays: a collection that looks through all of torch stops a rank for 0.3 s

        for step in range(first, last + 1):
            loss, ran = accumulate(model, next(batches), config, world, step)
            checkpoints.before_optimizer_step()
            grad_norm = update(state, config, step)
            state.step, state.samples = step, state.samples + config.data.global_batch

            now = agreement.exchange(
                step, loss, grad_norm, ran,
                want=reclaim.requested(),
                save_due=world.is_main and checkpoints.due(step + agreement.lag),
                **checkpoints.status(),
            )  # fmt: skip
            stop = now.want >= Action.STOP or step == last
            evaluate_now = config.train.eval_every_steps and step % config.train.eval_every_steps == 0
            save = now.save_due or now.want == Action.SAVE or (stop and now.want != Action.STOP_UNSAVED) or step == last
            if save or stop or evaluate_now:
                agreement.drain()
            val_loss = None
            if evaluate_now and now.want < Action.STOP:
                with agreement.aside():
                    val_loss = evaluate(model, held_out, config, world)
            for one in agreement.to_record():
                record(one, val_loss if one.step == step else None)
            checkpoints.settle(now.save_done, now.save_failed)
            if save:
                if metrics is not None:
                    metrics.flush(step)
                checkpoints.save(step, state.samples)
            if stop:
                saved = checkpoints.finish()
                break
    if step == last:
        if not saved:
            raise SavesFailed(f"the save of the last step, {step}, failed twice; start again from the one before")
        return Reason.FINISHED, step
    return reclaim_reason(reclaim), step


def reclaim_reason(reclaim: Reclaim) -> Reason:
    """A person's Ctrl-C, or the platform."""
    return Reason.INTERRUPTED if reclaim.interrupted else Reason.RECLAIMED


def build(config: Config, world: World, samples: corpus.Samples) -> tuple[TrainState, nn.Module]:
    """Model, optimizer and averaged weights, laid out over the ranks and seeded alike on all of them."""
    seed_all(data_order.derive_seed("start", config.data.seed))
    model = parallel.distribute(build_model(config), config, world)
    plain = parallel.unwrap(model)
    seed_all(data_order.derive_seed("start", config.data.seed, world.rank))  # streams of the ranks' own
    state = TrainState(
        plain,
        build_optimizer(plain, config.optim),
        AveragedWeights(plain, config.optim.ema_decay) if config.optim.ema_decay else None,
        rank=world.rank,
        seed=config.data.seed,
        fingerprint=fingerprint(config) | samples.identity,
    )
    return state, model


def accumulate(
    model: nn.Module, batches: Sequence[data_loader.Batch], config: Config, world: World, step: int
) -> tuple[Tensor, tuple[int, int]]:
    """Forward and backward of this rank's micro-batches of optimizer step `step`.

    The ranks' gradients are averaged, so each rank's loss is its summed loss · world size / tokens of the global
    batch: the gradient is that of the mean over the global batch, however it was dealt.

    Returns:
        This rank's share of that mean loss, a scalar on the device, and the witness of its samples; the shares of
        the ranks add up, and so do the witnesses.
    """
    total = torch.zeros((), dtype=torch.float32, device=world.device)
    tokens = config.data.global_batch * config.data.sequence_length
    model.train()
    for number, batch in enumerate(batches, start=1):
        with (
            parallel.accumulating(model, last=number == len(batches)),
            seeded(data_order.derive_seed("dropout", config.data.seed, step, batch.index), world.device),
        ):
            share = summed_loss(model, batch, config, world) / tokens
            (share * world.size).backward()
        total += share.detach()
    return total, (sum(batch.witness[0] for batch in batches), sum(batch.witness[1] for batch in batches))


def summed_loss(model: nn.Module, batch: data_loader.Batch, config: Config, world: World) -> Tensor:
    """Cross-entropy summed over the samples of the micro-batch that count; a scalar in fp32."""
    tokens = batch.tokens.to(world.device, non_blocking=True)
    dtype = parallel.compute_dtype(config, world.device)
    autocast = config.parallel.strategy == "ddp" and dtype != torch.float32  # FSDP casts by its own policy
    with torch.autocast(world.device.type, dtype=dtype, enabled=autocast):
        logits = model(tokens[:, :-1])
    losses = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    losses = losses.view(len(tokens), -1)
    counts = torch.arange(len(tokens), device=world.device)[:, None] < batch.real
    return torch.where(counts, losses, 0.0).sum()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from generators seeded with `seed` inside; the streams outside go on as if nothing had happened."""
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(seed)
        yield


def update(state: TrainState, config: Config, step: int) -> Tensor:
    """One optimizer step. Returns the norm of the gradient before clipping, equal on all ranks."""
    norm = clip_gradients(state.model, config.optim.gradient_clip)
    set_learning_rate(state.optimizer, learning_rate(config.optim, step, config.train.steps))
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    if state.averages is not None:
        state.averages.update()
    return norm


@torch.no_grad()
def evaluate(model: nn.Module, held_out: corpus.Samples, config: Config, world: World) -> float:
    """Mean loss per token over the first `train.eval_batches` global batches of the held-out samples."""
    size = min(config.data.global_batch, len(held_out))
    plan = BatchPlan(size, config.data.micro_batch, world.size)
    rounds = max(1, min(config.train.eval_batches, len(held_out) // size))
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    model.eval()
    batches = data_loader.loader(held_out, config, plan, world.rank, consumed=0, steps=rounds, seed=0, workers=0)
    for batch in itertools.chain.from_iterable(batches):
        total += summed_loss(model, batch, config, world)
    dist.all_reduce(total)
    return total.item() / (rounds * size * config.data.sequence_length)


class _Recorder:
    """Turns what was agreed on into lines of the metrics; does nothing on ranks other than 0."""

    def __init__(self, config: Config, metrics: Metrics | None, state: TrainState) -> None:
        self.config, self.metrics = config, metrics
        self.step, self.samples = state.step, state.samples  # of the checkpoint: B may have been another one before

    def __call__(self, agreed: Agreed, val_loss: float | None) -> None:
        if self.metrics is None:
            return
        step = agreed.step
        values = {
            "loss": agreed.loss,
            "lr": learning_rate(self.config.optim, step, self.config.train.steps),
            "grad_norm": agreed.grad_norm,
            "samples": self.samples + (step - self.step) * self.config.data.global_batch,
            "batch_hash": agreed.batch_hash,
        }
        self.metrics.step(step, values if val_loss is None else values | {"val_loss": val_loss}, agreed.moment)


@contextmanager
def _metrics(config: Config, attempt: int, first: int, model: nn.Module, world: World) -> Iterator[Metrics | None]:
    if not world.is_main:
        yield None
        return
    flops = flops_per_token(parallel.unwrap(model), config)
    metrics = Metrics(config, attempt, first_step=first, flops_per_token=flops, device=world.device, ranks=world.size)
    try:
        yield metrics
    finally:
        metrics.close()


def _agree_on_attempt(attempt: int | None, runtime: Path | None, config: Config, world: World, stack: ExitStack) -> int:
    """The number of this start, on all ranks: from node 0's launcher, or without launchers from the lease.

    Only the ranks of node 0 are told; rank 0 need not be one of them, the rendezvous numbers the nodes as it likes.
    """
    if world.is_main and attempt is None and runtime is None:
        from trainer.checkpoint.lease import Lease

        lease = Lease.acquire(config.run_dir)
        stack.callback(lease.release)
        attempt = lease.next_epoch()
    agreed = torch.tensor([attempt or 0])
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=world.control)
    attempt = int(agreed)
    on_each(world.control, partial(_see_the_shared, config, attempt))
    return attempt


def _see_the_shared(config: Config, attempt: int) -> None:
    """See that this rank looks at the run's directory: where a mount is missing there may be an empty one of that name.

    Raises:
        ConfigError: it shows no sign of attempt `attempt`, for as long as a network file system may take.
    """
    give_up = time.monotonic() + SHOWN_S
    while current_epoch(config.run_dir) < attempt:
        if time.monotonic() > give_up:
            raise ConfigError(
                f"{config.run_dir} on {socket.gethostname()} is not the directory that rank 0 and its launcher use; "
                f"checkpoint.dir must be on a volume that all nodes share, and mounted on each"
            )
        time.sleep(0.2)
