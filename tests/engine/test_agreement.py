"""What all ranks agree on in a step, also before the first one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import parallel, run
from trainer.agreement import Agreement, Decision
from trainer.checkpoint.lease import Lease
from trainer.config.load import load_config
from trainer.outcome import ConfigError
from trainer.reclaim.request import Action


def asked_early(lag: int) -> tuple[bool, list[bool]]:
    """Rank 1 is asked to save before the first step; whether this rank saves after each of the steps 8 to 10."""
    with parallel.join() as world:
        agreement = Agreement(world, last=20)
        agreement.lag = lag
        stop = agreement.begin(8, action=Action.SAVE if world.rank == 1 else Action.NOTHING, save_due=False)
        saves = []
        for step in range(8, 11):
            decision, _ = _decide(agreement, step)
            agreement.complete(torch.zeros(()), decision)
            saves.append(decision.save)
    return stop, saves


def _decide(
    agreement: Agreement, step: int, action: Action = Action.NOTHING, *, loss: float = 0.0, weight: float = 0.0,
    save_due: bool = False, save_done: bool = False, save_failed: bool = False,
) -> tuple[Decision, torch.Tensor]:  # fmt: skip
    sums = torch.tensor([loss, weight], dtype=torch.float64)
    return agreement.decide(
        step, sums, (0, 0), action=action, save_due=save_due, save_done=save_done, save_failed=save_failed
    )


@pytest.mark.parametrize("lag", [0, 1])
def test_a_request_to_save_from_before_the_first_step_is_met_once(ranks: Callable[..., list[Any]], lag: int) -> None:
    expected = [False] * lag + [True] + [False] * (2 - lag)
    assert ranks(2, asked_early, lag) == [(False, expected)] * 2


def decisions(lag: int) -> list[tuple[bool, ...]]:
    """What this rank does after steps 1 to 12, of which 12 is the last; each cause comes on one rank alone."""
    with parallel.join() as world:
        agreement = Agreement(world, last=12, evaluate_every=4)
        agreement.lag = lag
        agreement.begin(1, action=Action.NOTHING, save_due=False)
        found: list[tuple[bool, ...]] = []
        for step in range(1, 13):
            first, second = world.rank == 0, world.rank == 1
            decision, _ = _decide(
                agreement, step, Action.SAVE if step == 5 and second else Action.NOTHING,
                save_due=(first and step + lag == 3) or (second and step == 1),  # only that of rank 0 counts
                save_done=(step == 6 and first) or step == 7, save_failed=step == 9 and second,
            )  # fmt: skip
            agreement.complete(torch.zeros(()), decision)
            found.append((decision.save, decision.evaluate, decision.stop, decision.save_done, decision.save_failed))
    return found


@pytest.mark.parametrize("lag", [0, 1])
def test_each_decision_is_taken_by_all_ranks_at_the_same_step(ranks: Callable[..., list[Any]], lag: int) -> None:
    one, other = ranks(2, decisions, lag)
    assert one == other
    saves, evaluations, stops, done, failed = (
        [step for step, took in enumerate(column, start=1) if took] for column in zip(*one, strict=True)
    )
    assert saves == [3, 5 + lag, 12]  # due on rank 0, asked of rank 1, the last step
    assert evaluations == [4, 8, 12]
    assert stops == [12]
    assert done == [7 + lag]  # on every rank
    assert failed == [9 + lag]


def totals_and_stop(action: int) -> tuple[list[float], list[Any], list[bool]]:
    """Rank 1 is asked in step 2; the sums on the device, what is recorded, and the decisions of that step."""
    with parallel.join() as world:
        agreement = Agreement(world, last=9, evaluate_every=2)
        agreement.begin(1, action=Action.NOTHING, save_due=False)
        recorded: list[Any] = []
        for step in (1, 2):
            asked = Action(action) if world.rank == 1 and step == 2 else Action.NOTHING
            decision, sums = _decide(agreement, step, asked, loss=0.5 + world.rank, weight=3.0 + step)
            one = agreement.complete(torch.tensor(2.5), decision)
            recorded += [(each.step, each.loss, each.weight, each.grad_norm) for each in one]
    return sums.tolist(), recorded, [decision.save, decision.evaluate, decision.stop]


@pytest.mark.parametrize("action", [Action.STOP, Action.STOP_UNSAVED])
def test_a_stop_is_saved_unless_there_is_no_time_and_never_evaluated(
    ranks: Callable[..., list[Any]], action: Action
) -> None:
    for sums, recorded, decided in ranks(2, totals_and_stop, int(action)):
        assert sums == [2.0, 10.0]
        assert recorded == [(1, 2.0, 8.0, 2.5), (2, 2.0, 10.0, 2.5)]
        assert decided == [action is Action.STOP, False, True]


def join_on_two_disks(folder: Path) -> str:
    """Each rank has a run directory of its own, as where one node's mount is missing. Returns how that ends."""
    config = load_config([f"checkpoint.dir={folder / os.environ['RANK']}", "run.name=run"])
    config.run_dir.mkdir(parents=True)
    run.VISIBLE_S = 1.0
    with Lease.acquire(config.run_dir) as lease, parallel.join() as world:
        try:
            run._agree_on_attempt(lease.next_epoch() if world.is_main else None, config, world)
        except ConfigError as error:
            return str(error)
    return ""


def test_a_rank_that_sees_another_directory_stops_all_of_them(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    first, second = ranks(2, join_on_two_disks, tmp_path)
    assert first == second and f"{tmp_path}/1/run" in first and "all nodes share" in first
