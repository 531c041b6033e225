"""What all ranks agree on in a step, also before the first one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer import parallel
from trainer.agreement import Agreement
from trainer.reclaim import Want


def asked_early(lag: int) -> tuple[bool, list[Want]]:
    """Rank 1 is asked to save before the first step; what this rank acts on in the steps after that."""
    with parallel.join() as world:
        agreement = Agreement(world)
        agreement.lag = lag
        stop = agreement.begin(8, want=Want.SAVE if world.rank == 1 else Want.NOTHING, save_due=False)
        nothing = torch.zeros(())
        found = [
            agreement.exchange(
                step, nothing, nothing, (0, 0), want=Want.NOTHING, save_due=False, save_done=False, save_failed=False
            ).want
            for step in range(8, 11)
        ]
    return stop, found


@pytest.mark.parametrize("lag", [0, 1])
def test_a_wish_to_save_from_before_the_first_step_is_met_once(ranks: Callable[..., list[Any]], lag: int) -> None:
    expected = [Want.NOTHING] * lag + [Want.SAVE] + [Want.NOTHING] * (2 - lag)
    assert ranks(2, asked_early, lag) == [(False, expected)] * 2
