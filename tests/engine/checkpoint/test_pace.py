"""When a save is due."""

from __future__ import annotations

import pytest

from trainer.checkpoint.pace import FIRST_SAVE_S, Pace
from trainer.config.settings import CheckpointConfig


def pace(resumed: int = 0, **settings: object) -> Pace:
    one = Pace(CheckpointConfig(**settings))  # type: ignore[arg-type]
    one.resumed(resumed, None)
    return one


def test_without_retuning_saves_are_at_multiples_exactly() -> None:
    one = pace(resumed=7, every_steps=5, retune=False)
    assert [step for step in range(8, 40) if one.tick(step, now=1e6 * step)] == [10, 15, 20, 25, 30, 35]


def test_the_first_save_comes_after_at_most_half_a_minute_of_training() -> None:
    one = pace(every_steps=1000)
    due = [step for step in range(1, 100) if one.tick(step, now=float(step))]
    assert due == [int(FIRST_SAVE_S) + 1]


def test_a_short_interval_comes_before_that() -> None:
    one = pace(resumed=100, every_steps=4)
    assert [step for step in range(101, 112) if one.tick(step, now=float(step))] == [104, 108]


def test_a_save_for_another_reason_counts() -> None:
    one = pace(every_steps=4)
    for step in range(1, 3):
        assert not one.tick(step, now=float(step))
    one.began(2)
    assert [step for step in range(3, 9) if one.tick(step, now=float(step))] == [6]


def test_the_interval_follows_what_is_measured() -> None:
    one = pace(every_steps=500, mtbi_s=3600.0, badput_target=0.05)
    for step in range(1, 60):
        one.tick(step, now=0.1 * step)  # steps of 100 ms
    one.began(59)
    changed = one.ended(save_s=2.0, stall_s=0.05)
    assert changed is not None and changed["every_steps"] == one.every_steps
    assert changed["floor_steps"] == 25 and changed["ceiling_steps"] == 3560
    assert one.every_steps == pytest.approx((2 * 0.05 * 3600) ** 0.5 / 0.1, abs=1)
    one.began(60)
    assert one.ended(save_s=2.0, stall_s=0.05) is None, "nothing new"


def test_what_writing_costs_the_steps_counts() -> None:
    quiet, slowed = (pace(every_steps=500, mtbi_s=3600.0) for _ in range(2))
    for one, busy_s in ((quiet, 0.1), (slowed, 0.2)):
        for step in range(1, 60):
            one.tick(step, now=0.1 * step)
        one.began(59)
        for step in range(60, 70):
            one.tick(step, now=5.9 + busy_s * (step - 59))
        one.ended(save_s=2.0, stall_s=0.05)
    assert slowed.every_steps > 4 * quiet.every_steps


def test_an_impossible_target_means_as_often_as_possible_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    one = pace(every_steps=500, mtbi_s=60.0, badput_target=0.01)
    for step in range(1, 60):
        one.tick(step, now=0.1 * step)
    one.began(59)
    assert one.ended(save_s=2.0, stall_s=0.05) is not None
    assert one.every_steps == 25
    assert "no interval keeps badput" in caplog.text


def test_a_failed_save_measures_nothing() -> None:
    one = pace(every_steps=500)
    for step in range(1, 60):
        one.tick(step, now=0.1 * step)
    one.began(59)
    assert one.ended(None, 0.05) is None and one.every_steps == 500
