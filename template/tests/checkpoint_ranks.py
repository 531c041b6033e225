"""A small FSDP2 training run around the real `Checkpoints`, for tests: run it with torchrun.

    torchrun --nproc-per-node 2 checkpoint_ranks.py SCENARIO RUN_DIR [ATTEMPT]

Each scenario is a function of `Ranks`; it prints what happened as JSON lines that begin with `@`, from rank 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer.checkpoint import daemon
from trainer.checkpoint.manager import Checkpoints
from trainer.config import CheckpointConfig, Config, RunConfig
from trainer.ledger import Ledger

WIDTH = 32


class ToyState:
    """Model and AdamW under the names that a checkpoint has, and a number on each rank."""

    def __init__(self, rank: int, width: int = WIDTH, layers: int = 2) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        if dist.get_world_size() > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)
        self.rank, self.step, self.samples, self.width = rank, 0, 0, width
        self.fingerprint: dict[str, Any] = {"model.width": width}
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for parameter, values in self.optimizer.state.items():
            state |= {f"optim.{self.names[parameter]}.{name}": value for name, value in values.items()}
        return state | {
            "progress": torch.tensor([self.step, self.samples]),
            f"rng.rank{self.rank}": torch.get_rng_state(),
        }

    def target(self, saved: dict[str, Any]) -> dict[str, Any]:
        target = {name: value for name, value in self.state_dict().items() if name[:5] not in ("optim", "rng.r")}
        for parameter, name in self.names.items():
            for field in ("exp_avg", "exp_avg_sq"):
                target[f"optim.{name}.{field}"] = torch.zeros_like(parameter.detach())
            target[f"optim.{name}.step"] = torch.tensor(0.0)
        self._target = target
        return target

    def loaded(self) -> None:
        self.step, self.samples = self._target["progress"].tolist()
        for parameter, name in self.names.items():
            for field in ("exp_avg", "exp_avg_sq", "step"):
                self.optimizer.state[parameter][field] = self._target[f"optim.{name}.{field}"]

    def loss(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.step)
        batch = torch.randn(8, self.width, generator=generator)
        return (self.model(batch) - batch.roll(1, 1)).square().mean()


class Ranks:
    """What a scenario works with."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self.run_dir, self.attempt = run_dir, attempt
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo")
        self.control = dist.new_group(backend="gloo")
        self.settings = CheckpointConfig(dir=str(run_dir.parent), retune=False, every_steps=5)

    def say(self, **fields: Any) -> None:
        if self.rank == 0:
            print("@" + json.dumps(fields), flush=True)

    @contextlib.contextmanager
    def checkpoints(self, state: ToyState | None = None, **settings: Any) -> Iterator[tuple[Checkpoints, ToyState]]:
        config = Config(
            checkpoint=dataclasses.replace(self.settings, **settings),
            run=RunConfig(name=self.run_dir.name),
            project=self.run_dir.parent,
        )
        state = state or ToyState(self.rank)
        with Checkpoints(
            config, self.run_dir, self.attempt, state, self.group, Ledger(self.run_dir, self.attempt, append=True),
            mode="manifest" if os.environ.get("COMMIT") == "manifest" else "rename",
        ) as checkpoints:  # fmt: skip
            yield checkpoints, state

    def train_step(self, checkpoints: Checkpoints, state: ToyState) -> float:
        loss = state.loss()
        loss.backward()
        checkpoints.before_optimizer_step()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step, state.samples = state.step + 1, state.samples + 8
        self.settle(checkpoints)
        return loss.item()

    def settle(self, checkpoints: Checkpoints) -> tuple[bool, bool]:
        """As the training loop does it: one reduction, the same for all ranks."""
        status = checkpoints.status()
        numbers = torch.tensor([float(status["save_done"]), float(status["save_failed"])])
        dist.all_reduce(numbers, group=self.control)
        done, failed = bool(numbers[0] == self.size), bool(numbers[1] > 0)
        checkpoints.settle(done, failed)
        return done, failed

    def until_settled(self, checkpoints: Checkpoints) -> None:
        """Until nothing is in flight."""
        while True:
            busy = torch.tensor([float(checkpoints._flight is not None or not daemon.alive())])
            dist.all_reduce(busy, group=self.control)
            if not busy:
                return
            self.settle(checkpoints)
            time.sleep(0.01)


def train(ranks: Ranks) -> None:
    """Resume, train to `STEPS` saving every fifth step, say the losses."""
    with ranks.checkpoints() as (checkpoints, state):
        resumed = checkpoints.resume()
        ranks.say(resumed=resumed and resumed.step)
        losses = {}
        while state.step < int(os.environ.get("STEPS", "12")):
            losses[state.step + 1] = ranks.train_step(checkpoints, state)
            if checkpoints.due(state.step):
                checkpoints.save(state.step, state.samples)
        checkpoints.save(state.step, state.samples)
        ranks.say(finished=checkpoints.finish(), losses=losses)


SCENARIOS: dict[str, Callable[[Ranks], None]] = {function.__name__: function for function in (train,)}


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    dist.init_process_group("gloo")
    scenario, run_dir = sys.argv[1], Path(sys.argv[2])
    SCENARIOS[scenario](Ranks(run_dir, int(sys.argv[3]) if len(sys.argv) > 3 else 1))
    dist.destroy_process_group()
