"""One rank of a training run: what any loop uses. `train.py` is the loop that ships.

with Run(config, model, optimizer, dataset_length=len(dataset)) as run:     # joins the ranks, resumes
    for step in run:                       # to the last step, or to the one at which all ranks agree to stop
        for numbers in run.micro_batches():              # this rank's sample numbers of the global batch
            run.backward(*my_loss(run.model, dataset[numbers]))          # sums, never means
        run.update()

In a script of your own this stands below `if __name__ == "__main__":`, since the process that writes checkpoints
imports the script again. Start it with `python`, or with `torchrun` for several ranks.
"""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer import parallel
from trainer.agreement import Agreement, Decision, StepTotals
from trainer.checkpoint.dcp.reader import load_tensors
from trainer.checkpoint.lease import current_epoch
from trainer.checkpoint.save import Checkpoints
from trainer.checkpoint.standalone import standalone
from trainer.collectives import run_on_all, run_on_rank0
from trainer.config.fingerprint import fingerprint
from trainer.config.settings import Config
from trainer.data.loader import Batch, loader
from trainer.data.order import derive_seed
from trainer.data.plan import BatchPlan
from trainer.ledger import Ledger
from trainer.metrics import Metrics
from trainer.optim import AveragedWeights, average_gradients, set_learning_rate
from trainer.outcome import ConfigError, Reason, SavesFailed, exit_code
from trainer.reclaim.rank import Reclaim
from trainer.state import TrainState, seed_all
from trainer.storage.capacity import check_room
from trainer.task import Loss, Task, build_task, checkpoint_bytes
from trainer.wording import counted

VISIBLE_S = 60.0  # until another node sees what the first one has written


@dataclass(frozen=True)
class Start:
    """What the launcher of this node gives its ranks."""

    runtime: Path | None = None  # directory through which they talk; None without a launcher
    attempt: int | None = None  # number of this start, from node 0's launcher; None elsewhere (rank 0 tells)
    accepted: Sequence[str] = ()  # dotted keys that may differ from the checkpoint's configuration


class Run:
    """Resume, micro-batches, gradients, updates, metrics, saves and the stop of one rank.

    Use as a context manager, iterate over it once, and call in each step `backward` for each of `batches` (or
    `micro_batches`) and then `update`. What a step's decision asks for and the loop has not done (`record`, `save`) is
    done when the next step is asked for. Afterwards `reason` and `step` say why and where it stopped.

    Args:
        model: on the CPU, equal on all ranks. It is laid out over the ranks in place.
        optimizer: of the model's parameters, without state yet. Its learning rate is yours to set.
        dataset_length: the number of samples.

    Raises:
        ConfigError, UnavailableError, SavesFailed: as in `outcome`; on all ranks alike.
    """

    def __init__(
        self, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, *, dataset_length: int,
        start: Start | None = None,
    ) -> None:  # fmt: skip
        self._set_up(config, _OwnLoop(config, model, optimizer, dataset_length), start)

    @classmethod
    def of_task(cls, config: Config, task: Task, start: Start | None = None) -> Run:
        """The run of a task, with `batches` to iterate over."""
        run = cls.__new__(cls)
        run._set_up(config, task, start)
        return run

    def _set_up(self, config: Config, task: Task, start: Start | None) -> None:
        self.config, self.task, self._start = config, task, start or Start()
        self.reason = Reason.CRASHED  # until it has stopped otherwise
        self._stack = ExitStack()

    # -- joining and resuming ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with self._stack as stack:  # closed again if anything below fails
            self._join(stack)
            self._resume(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _join(self, stack: ExitStack) -> None:
        """Join the other ranks, and lay the model out over them."""
        config, task, seed = self.config, self.task, self.config.data.seed
        self._reclaim = stack.enter_context(Reclaim(self._start.runtime, config.reclaim.grace_s))
        self.world = stack.enter_context(parallel.join())
        attempt = self._start.attempt
        if self.world.is_main and attempt is None and self._start.runtime is None:
            attempt = stack.enter_context(standalone(config.run_dir, lambda: (self.reason, self.step)))
        self.attempt = _agree_on_attempt(attempt, config, self.world)
        run_on_rank0(self.world.control, task.prepare)
        run_on_all(self.world.control, lambda: (len(task.train), len(task.validation)))
        self.plan = BatchPlan(config.data.global_batch, config.data.micro_batch, self.world.size)
        seed_all(derive_seed("start", seed))
        self.model = task.build_model()
        self.mesh = parallel.distribute(self.model, config, self.world)
        seed_all(derive_seed("start", seed, self.world.rank))  # streams of the ranks' own
        self.state = TrainState(
            self.model,
            task.build_optimizer(self.model),
            AveragedWeights(self.model, config.optim.ema_decay) if config.optim.ema_decay else None,
            rank=self.world.rank,
            seed=seed,
            fingerprint=fingerprint(config) | dict(task.train.identity),
        )

    def _resume(self, stack: ExitStack) -> None:
        """Load the newest complete checkpoint, if there is one."""
        config, world = self.config, self.world
        ledger = Ledger(config.run_dir, self.attempt)
        stack.callback(ledger.close)
        self._checkpoints = stack.enter_context(
            Checkpoints(
                config, config.run_dir, self.attempt, self.state, world.checkpoints, ledger, self._start.accepted
            )
        )
        resumed = self._checkpoints.resume()
        if resumed is None:
            self._check_room()
        elif world.is_main:
            print(f"resumed after step {resumed.step}, saved by {counted(resumed.world_size, 'rank')}", flush=True)
        if world.is_main:
            loaded, unit = self._checkpoints.loaded, self.task.unit
            ledger.record("attempt_started", world_size=world.size, step=self.state.step, checkpoint=loaded, unit=unit)
        self._resumed_at = self.state.step, self.state.samples  # the global batch may have been another one before

    def _check_room(self) -> None:
        """Before the first save of a run: check that it has room. The launcher looks at each later start."""
        world, size = self.world, checkpoint_bytes(self.task)
        nodes = -(-world.size // world.local_size)
        check = partial(check_room, self.config, size, "estimated from the model", world.local_size, nodes, 0)
        line = run_on_all(world.control, check)
        if world.is_main:
            print(line, flush=True)

    # -- the loop ------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps that are completed."""
        return self.state.step

    @property
    def exit_code(self) -> int:
        """For whatever starts this process: 0 finished, `restart.exit_reclaimed` start me again."""
        return exit_code(self.reason, self.config.restart.exit_reclaimed)

    def __iter__(self) -> Iterator[int]:
        """The steps to make, each the number that `step` has after it."""
        config, first, last = self.config, self.step + 1, self.config.train.steps
        if first > last:
            self.reason = Reason.FINISHED
            return
        self._agreement = Agreement(self.world, last, config.train.eval_every_steps)
        due = self._agreement.lag > 0 and self.world.is_main and self._checkpoints.tick(first)  # else after that step
        if self._agreement.begin(first, action=self._reclaim.requested(), save_due=due):
            self.reason = self._why_stopped()
            return
        with self._metrics(first) as self._recorder:
            self._loader = loader(
                self.task.train, config.data, self.plan, self.world.rank,
                consumed=self.state.samples, steps=last - self.step, seed=config.data.seed, workers=config.data.workers,
                pin=self.world.device.type == "cuda",
            )  # fmt: skip
            gc.freeze()  # what is there stays: a collection that looks through all of torch stops a rank for 0.3 s
            for step in range(first, last + 1):
                self._begin_step()
                yield step
                self._end_step()
                if self._decision.stop:
                    break
            self._finish()

    def _begin_step(self) -> None:
        self._sums: Tensor | None = None
        self._metric_names: list[str] = []
        self._checksum = 0, 0
        self._validation: Mapping[str, float] = {}
        self._to_record: list[StepTotals] = []
        self._is_closed = self._is_saved = False
        self.model.train()

    def batches(self) -> Iterator[Any]:
        """This rank's micro-batches of the global batch, on its device; `backward` belongs to each.

        What is drawn at random inside is a function of (seed, step, number of the micro-batch in the global batch).
        """
        batches = next(self._loader)
        for number, self._batch in enumerate(batches, start=1):
            seed = derive_seed("dropout", self.config.data.seed, self.step + 1, self._batch.index)
            with (
                parallel.accumulating(self.model, last=number == len(batches)),
                _seeded(seed, self.world.device),
            ):
                yield self._batch.to(self.world.device)

    micro_batches = batches  # in a loop of one's own, whose samples are their numbers: int64 [n]

    def backward(self, loss: Loss | Tensor, weight: Tensor | float = 0.0) -> None:
        """Add the gradient of one micro-batch.

        Args:
            loss: summed over the micro-batch, a scalar; or all of it as a `Loss`.
            weight: what the sum stands for, such as the number of samples; that of the global batch divides the sum.
        """
        one = loss if isinstance(loss, Loss) else Loss(loss, weight)
        batch: Batch = self._batch
        total = one.sum
        if batch.is_padding:  # not a product: that would make NaN of infinity
            total = torch.where(torch.zeros_like(total, dtype=torch.bool), total, 0.0)
        total.backward()
        self._metric_names = sorted(one.metrics)
        values = [one.sum.detach(), one.weight, *(one.metrics[name] for name in self._metric_names)]
        sums = torch.stack([torch.as_tensor(value, device=self.world.device).detach().double() for value in values])
        if batch.is_padding:
            sums = torch.zeros_like(sums)
        self._sums = sums if self._sums is None else self._sums + sums
        self._checksum = self._checksum[0] + batch.checksum[0], self._checksum[1] + batch.checksum[1]

    def update(self) -> Decision:
        """Finish the step: sum up over the ranks, divide, wait for the copy of a pending save, clip, step.

        Returns:
            What all ranks do after it.
        """
        assert self._sums is not None, "update() before any backward()"
        step = self.step + 1
        save_due = self.world.is_main and self._checkpoints.tick(step + self._agreement.lag)
        self._decision, totals = self._agreement.decide(
            step, self._sums, self._checksum, action=self._reclaim.requested(), save_due=save_due,
            **self._checkpoints.status(),
        )  # fmt: skip
        with self.excluded_from_step_time():
            self._checkpoints.before_optimizer_step()
        norm = average_gradients(self.model, totals[1], self.config.optim.gradient_clip, self.mesh)
        optimizer, averages = self.state.optimizer, self.state.averages
        rate = self.task.learning_rate(step)
        if rate is not None:
            set_learning_rate(optimizer, rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if averages is not None:
            averages.update()
        self.state.step, self.state.samples = step, self.state.samples + self.config.data.global_batch
        self._to_record = self._agreement.complete(norm, self._decision)
        return self._decision

    def excluded_from_step_time(self) -> AbstractContextManager[None]:
        """Around work that is not part of a step, such as an evaluation."""
        return self._agreement.excluded_from_step_time()

    def record(self, values: Mapping[str, float]) -> None:
        """Put `values` into this step's line of the metrics, such as `val_loss`."""
        self._validation = {**self._validation, **values}

    def save(self) -> None:
        """Start a save of the state as it is now, unless this step is saved already."""
        self._close_step()
        self._is_saved = True
        with self.excluded_from_step_time():
            if self._recorder is not None:
                self._recorder.flush(self.step)
            self._checkpoints.save(self.step, self.state.samples)

    def _close_step(self) -> None:
        """Once a step: record what is known by now, and act on what became of the pending save."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._recorder is not None:
            for one in self._to_record:
                self._recorder.step(one.step, self._line(one), one.moment)
        self._checkpoints.settle(self._decision.save_done, self._decision.save_failed)

    def _line(self, one: StepTotals) -> dict[str, Any]:
        """The fields of a step's line in the metrics, except its times."""
        resumed_step, resumed_samples = self._resumed_at
        weight = one.weight or 1.0
        rate = self.task.learning_rate(one.step)
        values = {
            "loss": one.loss / weight,
            "lr": rate if rate is not None else float(self.state.optimizer.param_groups[0]["lr"]),
            "grad_norm": one.grad_norm,
            "samples": resumed_samples + (one.step - resumed_step) * self.config.data.global_batch,
            "batch_hash": one.batch_hash,
        }
        values |= {name: value / weight for name, value in zip(self._metric_names, one.metrics, strict=True)}
        return values | (dict(self._validation) if one.step == self.step else {})

    def _end_step(self) -> None:
        """Do what the loop has left undone."""
        self._close_step()
        if self._decision.save and not self._is_saved:
            self.save()

    def _finish(self) -> None:
        saved = self._checkpoints.finish()
        if self.step < self.config.train.steps:
            self.reason = self._why_stopped()
        elif saved:
            self.reason = Reason.FINISHED
        else:
            raise SavesFailed(f"the save of the last step, {self.step}, failed twice; start again from the one before")

    def _why_stopped(self) -> Reason:
        """A person's Ctrl-C, or the platform."""
        return Reason.INTERRUPTED if self._reclaim.interrupted else Reason.RECLAIMED

    @contextmanager
    def _metrics(self, first: int) -> Iterator[Metrics | None]:
        if not self.world.is_main:
            yield None
            return
        metrics = Metrics(
            self.config, self.attempt, self.task, self.model, first_step=first, device=self.world.device,
            ranks=self.world.size,
        )  # fmt: skip
        try:
            yield metrics
        finally:
            metrics.close()


class _Numbers:
    """Samples that are their own numbers: a loop of one's own has its data itself."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.identity = {"data.length": length}

    def __len__(self) -> int:
        return self.length

    def samples(self, numbers: np.ndarray, epochs: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers)


class _OwnLoop(Task):
    """What a loop of one's own brings along, as a task."""

    def __init__(self, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, length: int) -> None:
        super().__init__(config)
        self.model, self.optimizer = model, optimizer
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.train, self.validation = _Numbers(length), _Numbers(0)

    def build_model(self) -> nn.Module:
        return self.model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer, pointed at the parameters that have taken the place of those it was made with."""
        parameters = dict(model.named_parameters())
        for group in self.optimizer.param_groups:
            group["params"] = [parameters[self.names[parameter]] for parameter in group["params"]]
        return self.optimizer

    def learning_rate(self, step: int) -> float | None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        raise AssertionError("the loop has its own loss")


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from generators seeded with `seed` inside; the streams outside are not affected."""
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(seed)
        yield


def _agree_on_attempt(attempt: int | None, config: Config, world: parallel.World) -> int:
    """The number of this start, on all ranks.

    Only the ranks of node 0 are told; rank 0 need not be one of them, the rendezvous numbers the nodes as it likes.
    """
    agreed = torch.tensor([attempt or 0])
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=world.control)
    run_on_all(world.control, partial(_wait_for_shared_directory, config, int(agreed)))
    return int(agreed)


def _wait_for_shared_directory(config: Config, attempt: int) -> None:
    """Check that this rank sees the run's directory: where a mount is missing there may be an empty one of that name.

    Raises:
        ConfigError: it shows no sign of attempt `attempt`, for as long as a network file system may take.
    """
    give_up = time.monotonic() + VISIBLE_S
    while current_epoch(config.run_dir) < attempt:
        if time.monotonic() > give_up:
            raise ConfigError(
                f"{config.run_dir} on {socket.gethostname()} is not the directory that rank 0 and its launcher use; "
                f"checkpoint.dir must be on a volume that all nodes share, and mounted on each"
            )
        time.sleep(0.2)


def load_trained(config: Config, step: int | None = None, averaged: bool = False) -> tuple[nn.Module, int]:
    """The model of a verified checkpoint (the newest complete one, or that of `step`) on the CPU, and its step; no
    process group is needed.

    Raises:
        ConfigError: there is no such checkpoint, it is of another model, or `averaged` and it has no averaged weights.
    """
    weights, step = load_weights(config, step, averaged)
    model = build_task(config).build_model()
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        line = str(error).splitlines()[-1].strip()
        raise ConfigError(
            f"step {step} is of another model ({line}); give the model.* settings it was trained with"
        ) from None
    return model, step


def load_weights(config: Config, step: int | None = None, averaged: bool = False) -> tuple[dict[str, Tensor], int]:
    """Weights of a verified checkpoint by parameter name, on the CPU, and its step.

    Raises:
        ConfigError: there is no such checkpoint, or none with averaged weights.
    """
    tensors, step = load_tensors(config.run_dir, step, prefixes=("model.", "ema.") if averaged else ("model.",))
    weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    if averaged:
        means = {name.removeprefix("ema."): value for name, value in tensors.items() if name.startswith("ema.")}
        if not means:
            raise ConfigError(f"step {step} has no averaged weights; train with optim.ema_decay above 0 to keep some")
        weights |= means
    return weights, step
