"""A small FSDP2 training run around the real `Checkpoints`, for tests: each rank is a process of its own.

    RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… on_ranks.py SCENARIO RUN_DIR ATTEMPT

Each scenario is a function of `Ranks`; it says what happened as JSON lines that begin with `@`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import resource
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

from trainer.checkpoint.dcp import process
from trainer.checkpoint.save import Checkpoints
from trainer.config.settings import CheckpointConfig, Config, RunConfig
from trainer.ledger import Ledger
from trainer.outcome import SavesFailed, UnavailableError

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
            state |= {f"optim.{self.names[parameter]}.{name}": value for name, value in values.items()}  # type: ignore[index]
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
        mode: Any = os.environ.get("COMMIT", "rename")
        self.settings = CheckpointConfig(dir=str(run_dir.parent), retune=False, every_steps=5, commit=mode)

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
            config, self.run_dir, self.attempt, state, self.group, Ledger(self.run_dir, self.attempt, append=True)
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
            busy = torch.tensor([float(checkpoints._pending is not None or not process.alive())])
            dist.all_reduce(busy, group=self.control)
            if not busy:
                return
            self.settle(checkpoints)
            time.sleep(0.01)


def train(ranks: Ranks) -> None:
    """Resume, train to `STEPS` saving every fifth step, say the losses."""
    state = ToyState(ranks.rank, int(os.environ.get("WIDTH", WIDTH)), int(os.environ.get("LAYERS", "2")))
    with ranks.checkpoints(state) as (checkpoints, state):
        resumed = checkpoints.resume()
        ranks.say(resumed=resumed and resumed.step)
        losses: dict[int, float] = {}
        while state.step < int(os.environ.get("STEPS", "12")):
            loss = ranks.train_step(checkpoints, state)
            losses[state.step] = loss
            if checkpoints.tick(state.step):
                checkpoints.save(state.step, state.samples)
                ranks.say(saving=state.step, writer=writer_pid())
        checkpoints.save(state.step, state.samples)
        ranks.say(finished=checkpoints.finish(), losses=losses)


def fail(ranks: Ranks) -> None:
    """One fault after the other; after each the next save has to work, and training goes on."""
    with ranks.checkpoints(deadline_s=20.0) as (checkpoints, state):
        checkpoints.resume()

        def save(fault: str) -> None:
            ranks.train_step(checkpoints, state)
            checkpoints.save(state.step, state.samples)
            ranks.until_settled(checkpoints)
            ranks.train_step(checkpoints, state)  # goes on
            ranks.say(
                fault=fault, step=state.step - 1, committed=checkpoints._committed, failures=checkpoints._failures
            )

        def works(after: str) -> None:
            ranks.until_settled(checkpoints)
            save(f"none, after {after}")

        save("none")
        # The process is killed while nothing is in flight, on one rank.
        if ranks.rank == 1:
            os.kill(writer_pid(), signal.SIGKILL)
            os.waitid(os.P_PID, writer_pid(), os.WEXITED | os.WNOWAIT)
        ranks.until_settled(checkpoints)
        works("a killed idle writer")
        # It is stopped, so that the save cannot end, then killed.
        if ranks.rank == 0:
            os.kill(writer_pid(), signal.SIGSTOP)
        ranks.train_step(checkpoints, state)
        checkpoints.save(state.step, state.samples)
        checkpoints.before_optimizer_step()
        if ranks.rank == 0:
            os.kill(writer_pid(), signal.SIGKILL)
        ranks.until_settled(checkpoints)
        ranks.say(fault="a writer killed in a save", step=state.step, committed=checkpoints._committed)
        works("a writer killed in a save")
        # The volume refuses: where the files should go there is a file.
        in_the_way = ranks.run_dir / f".step_{state.step + 1:08d}.{ranks.attempt}.{checkpoints._tries}"
        if ranks.rank == 0:
            in_the_way.write_text("")
        dist.barrier(ranks.control)
        save("a file in the way")
        works("a file in the way")
        # One rank's state cannot be saved.
        honest = state.state_dict
        if ranks.rank == 1:
            state.state_dict = lambda: honest() | {"odd": "text"}  # type: ignore[method-assign]
        save("a value that is no tensor, on one rank")
        state.state_dict = honest  # type: ignore[method-assign]
        works("a value that is no tensor")
        # One rank's process meets a write error, then has no file descriptor left.
        if ranks.rank == 1:
            resource.prlimit(writer_pid(), resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
        save("a write error on one rank")
        works("a write error")
        if ranks.rank == 0:
            resource.prlimit(writer_pid(), resource.RLIMIT_NOFILE, (3, 1024))
        save("no file descriptors on one rank")
        works("no file descriptors")
        # A process does not know what its peers know.
        checkpoints.finish()
        if ranks.rank == 1:
            layout = checkpoints._stager._layout
            assert layout is not None
            checkpoints._stager._layout = dataclasses.replace(layout, name="another")
        save("a writer that has forgotten the layout")
        works("a writer that has forgotten the layout")


def hang(ranks: Ranks) -> None:
    """One rank's process hangs: its saves are overdue, and after the second failure in a row all ranks stop."""
    with ranks.checkpoints(deadline_s=6.0, max_failed_saves=2) as (checkpoints, state):
        checkpoints.resume()
        for _ in range(3):
            ranks.until_settled(checkpoints)
            if ranks.rank == 1:
                os.kill(writer_pid(), signal.SIGSTOP)
            try:  # the first step after a failed save is a dry run, and the next save finds how that ended
                ranks.train_step(checkpoints, state)
                checkpoints.save(state.step, state.samples)
                ranks.until_settled(checkpoints)
            except SavesFailed as error:
                print("@" + json.dumps({"stopped": ranks.rank, "why": str(error)}), flush=True)
                raise


def refuse(ranks: Ranks) -> None:
    """The volume takes files but no commit: after the second failure in a row all ranks stop."""
    with ranks.checkpoints(max_failed_saves=2) as (checkpoints, state):
        checkpoints.resume()
        for _ in range(4):
            ranks.until_settled(checkpoints)
            ranks.train_step(checkpoints, state)
            checkpoints.save(state.step, state.samples)
            try:
                ranks.until_settled(checkpoints)
            except (SavesFailed, UnavailableError) as error:
                print("@" + json.dumps({"stopped": ranks.rank, "why": str(error), "step": state.step}), flush=True)
                raise


def mix(ranks: Ranks) -> None:
    """Everything changes as soon as it may, while the save is being written; a hundred times, back to back."""
    state = ToyState(ranks.rank, width=512)
    with ranks.checkpoints(state, keep_last=100) as (checkpoints, state):
        checkpoints.resume()
        ranks.train_step(checkpoints, state)
        resident = []
        for step in range(1, 101):
            with torch.no_grad():
                for name, tensor in state.state_dict().items():
                    if not name.startswith("rng."):
                        tensor.fill_(step)
            state.step = step
            state.samples = step
            checkpoints.save(step, step)
            checkpoints.before_optimizer_step()
            resident.append((_resident_bytes(os.getpid()), _resident_bytes(writer_pid())))
        ranks.say(finished=checkpoints.finish(), resident=resident)


def fill(ranks: Ranks) -> None:
    """The volume is full at the first save, and has room at the second."""
    with ranks.checkpoints() as (checkpoints, state):
        checkpoints.resume()
        for _ in range(2):
            ranks.train_step(checkpoints, state)
            checkpoints.save(state.step, state.samples)
            ranks.until_settled(checkpoints)
            if ranks.rank == 0:
                Path(os.environ["FILLER"]).unlink(missing_ok=True)
            dist.barrier(ranks.control)


def writer_pid() -> int:
    """The background process of this rank; 0 before it has started."""
    handle = process.executor._CHECKPOINT_PROCESS  # type: ignore[attr-defined]
    return handle._save_process.pid or 0 if handle is not None else 0


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


SCENARIOS: dict[str, Callable[[Ranks], None]] = {
    function.__name__: function for function in (train, fail, refuse, hang, mix, fill)
}


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    dist.init_process_group("gloo")
    scenario, run_dir = sys.argv[1], Path(sys.argv[2])
    SCENARIOS[scenario](Ranks(run_dir, int(sys.argv[3]) if len(sys.argv) > 3 else 1))
    dist.destroy_process_group()
