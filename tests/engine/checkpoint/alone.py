"""Saves and resumes in one process, without the background one: what the tests of commit and damage start from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from trainer.checkpoint.commit import Commit, directory_name
from trainer.checkpoint.commit_mode import MODES
from trainer.checkpoint.dcp.planner import ArenaPlanner
from trainer.checkpoint.dcp.stager import STATE, ArenaStager
from trainer.checkpoint.dcp.writer import CommittingWriter, SaveRequest
from trainer.checkpoint.save import Checkpoints
from trainer.config.settings import CheckpointConfig, Config, RunConfig
from trainer.ledger import Ledger

FINGERPRINT = {"model.width": 64}


class Numbers:
    """A state of a few tensors that all hold the number of the step."""

    def __init__(self) -> None:
        self.step = self.samples = 0
        self.fingerprint: dict[str, Any] = dict(FINGERPRINT)
        self.fill(0)

    def fill(self, step: int) -> None:
        self.step, self.samples = step, 8 * step
        self.tensors = {
            "model.weight": torch.full((64, 300), float(step)),
            "model.half": torch.full((1000,), step, dtype=torch.bfloat16),
            "optim.weight.exp_avg": torch.full((64, 300), -float(step)),
            "optim.weight.step": torch.tensor(float(step)),
            "empty": torch.empty(0),
            "progress": torch.tensor([step, 8 * step]),
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def target(self, saved: dict[str, Any]) -> dict[str, Any]:
        return self.tensors

    def loaded(self) -> None:
        self.step, self.samples = self.tensors["progress"].tolist()
        for name, tensor in self.tensors.items():
            expected = {"progress": None, "optim.weight.exp_avg": -self.step}.get(name, self.step)
            assert expected is None or bool((tensor == expected).all()), f"{name} is not of step {self.step}"


def request_of(run_dir: Path, step: int, attempt: int = 1, mode: str = "rename", keep_last: int = 10) -> SaveRequest:
    code = {"commit": "abc", "dirty": True}
    directory = run_dir / directory_name(step)
    commit = Commit(directory, step, 8 * step, attempt, 1, 0.0, FINGERPRINT, torch.__version__, "", {}, code)
    return SaveRequest(run_dir, commit, MODES[mode], CheckpointConfig(keep_last=keep_last), time.monotonic())


def save(run_dir: Path, step: int, attempt: int = 1, **others: Any) -> None:
    """Save and commit as the background process does."""
    state = Numbers()
    state.fill(step)
    stager = ArenaStager()
    staged = stager.stage({STATE: state.state_dict()}).result()
    run_dir.mkdir(parents=True, exist_ok=True)
    writer = CommittingWriter(request_of(run_dir, step, attempt, **others))
    dcp_save(staged, storage_writer=writer, planner=ArenaPlanner(), no_dist=True)
    stager.close()


@contextlib.contextmanager
def one_rank() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield dist.group.WORLD  # type: ignore[misc]
    finally:
        dist.destroy_process_group()


def manager(
    run_dir: Path, group: dist.ProcessGroup, attempt: int = 2, accepted: tuple[str, ...] = (), mode: Any = "rename"
) -> tuple[Checkpoints, Numbers]:
    """A manager whose background process is never started: it can resume."""
    state = Numbers()
    config = Config(checkpoint=CheckpointConfig(dir=str(run_dir.parent), commit=mode), run=RunConfig(name=run_dir.name))
    ledger = Ledger(run_dir, attempt, append=True)
    return Checkpoints(config, run_dir, attempt, state, group, ledger, accepted), state
