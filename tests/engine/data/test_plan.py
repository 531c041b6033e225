"""The batch plan: every world size runs the same global batch."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainer.data.plan import BatchPlan

SIZES = st.integers(1, 64)


@given(SIZES, SIZES, SIZES)
@example(32, 4, 3)
@example(7, 64, 64)
@example(1, 1, 64)
def test_every_sample_of_the_global_batch_is_used_exactly_once(batch: int, micro: int, world: int) -> None:
    plan = BatchPlan(batch, micro, world)
    ran = [mine for rank in range(world) for mine in plan.of_rank(rank) if not mine.is_padding]
    used = [p for mine in ran for p in mine.positions]
    assert sorted(used) == list(range(batch))


@given(SIZES, SIZES, SIZES)
def test_micro_batches_do_not_depend_on_the_world_size(batch: int, micro: int, world: int) -> None:
    alone = {mine.index: mine for mine in BatchPlan(batch, micro, 1).of_rank(0)}
    plan = BatchPlan(batch, micro, world)
    shared = [mine for rank in range(world) for mine in plan.of_rank(rank) if not mine.is_padding]
    assert {mine.index: mine for mine in shared} == alone
    for index, mine in alone.items():
        assert list(mine.positions) == list(range(index * micro, min((index + 1) * micro, batch)))


@given(SIZES, SIZES, SIZES)
def test_all_ranks_run_the_same_number_of_micro_batches(batch: int, micro: int, world: int) -> None:
    plan = BatchPlan(batch, micro, world)
    ran = [plan.of_rank(rank) for rank in range(world)]
    assert {len(mine) for mine in ran} == {plan.micro_batches_per_rank}
    assert all(0 <= p < batch for each in ran for mine in each for p in mine.positions)
    padding = [mine for each in ran for mine in each if mine.is_padding]
    assert {len(mine.positions) for mine in padding} <= {min(micro, batch)}  # as large as the others: no new shapes
    assert plan.padding_share == pytest.approx(len(padding) / sum(map(len, ran)))


@given(SIZES, SIZES, SIZES)
def test_padding_is_numbered_apart_from_every_other_micro_batch(batch: int, micro: int, world: int) -> None:
    plan = BatchPlan(batch, micro, world)
    indices = [mine.index for rank in range(world) for mine in plan.of_rank(rank)]
    assert len(set(indices)) == len(indices)


def test_the_plan_reads_as_a_sentence() -> None:
    assert BatchPlan(32, 4, 8).describe() == "32 samples a step = 8 micro-batches of 4 on 8 ranks: 1 each"
    assert "11% of them padding" in BatchPlan(32, 4, 3).describe()
