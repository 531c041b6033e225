"""What all ranks agree on in a step, also before the first one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import parallel, train
from trainer.agreement import Agreement
from trainer.config.load import load_config
from trainer.outcome import ConfigError
from trainer.reclaim.request import Action


def asked_early(lag: int) -> tuple[bool, list[Action]]:
    """Rank 1 is asked to save before the first step; what this rank acts on in the steps after that."""
    with parallel.join() as world:
        agreement = Agreement(world)
        agreement.lag = lag
        stop = agreement.begin(8, want=Action.SAVE if world.rank == 1 else Action.NOTHING, save_due=False)
        nothing = torch.zeros(())
        found = [
            agreement.exchange(
                step, nothing, nothing, (0, 0), want=Action.NOTHING, save_due=False, save_done=False, save_failed=False
            ).want
            for step in range(8, 11)
        ]
    return stop, found


@pytest.mark.parametrize("lag", [0, 1])
def test_a_wish_to_save_from_before_the_first_step_is_met_once(ranks: Callable[..., list[Any]], lag: int) -> None:
    expected = [Action.NOTHING] * lag + [Action.SAVE] + [Action.NOTHING] * (2 - lag)
    assert ranks(2, asked_early, lag) == [(False, expected)] * 2


def join_on_two_disks(folder: Path) -> str:
    """Each rank has a run directory of its own, as where one node's mount is missing. Returns how that ends."""
    config = load_config([f"checkpoint.dir={folder / os.environ['RANK']}", "run.name=run"])
    config.run_dir.mkdir(parents=True)
    train.SHOWN_S = 1.0
    with ExitStack() as stack, parallel.join() as world:
        try:
            train._agree_on_attempt(None, None, config, world, stack)
        except ConfigError as error:
            return str(error)
    return ""


def test_a_rank_that_sees_another_directory_stops_all_of_them(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    first, second = ranks(2, join_on_two_disks, tmp_path)
    assert first == second and f"{tmp_path}/1/run" in first and "all nodes share" in first
