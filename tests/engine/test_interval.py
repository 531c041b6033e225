"""The formulas of the save interval: between floor and ceiling, within the target, never failing in a run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.interval import IntervalError, compute_interval, retuned

settings.register_profile("loaded machine", deadline=None)
settings.load_profile("loaded machine")

positive = st.floats(1e-9, 1e9)


def test_the_formulas_by_hand() -> None:
    interval = compute_interval(mtbi_s=14400, step_time_s=0.8, save_time_s=60)
    assert interval.floor_steps == 75  # 60 / 0.8
    assert interval.optimum_steps == round(math.sqrt(2 * 6 * 14400) / 0.8) == 520
    assert interval.ceiling_steps == 1650  # 2 * (720 - 60) / 0.8
    assert interval.save_interval_steps == 520
    assert interval.badput == pytest.approx((60 + 520 * 0.4) / 14400)
    assert interval.badput_stall == pytest.approx(6 / (416 + 6))
    assert interval.badput_restart == pytest.approx(300 / 14400)
    assert interval.badput_total == pytest.approx(interval.badput + interval.badput_stall + interval.badput_restart)
    assert interval.save_stall_s == 6


def test_floors_and_ceilings_tolerate_decimals() -> None:
    assert compute_interval(3600, 0.1, 0.3).floor_steps == 3  # 0.3 / 0.1 is 2.9999999999999996
    assert compute_interval(1000, 0.1, 0.1, badput_target=0.0004, restart_time_s=0).ceiling_steps == 6
    assert compute_interval(3600, 0.7, 2.1).floor_steps == 3  # 2.1 / 0.7 is 3.0000000000000004


@pytest.mark.parametrize(("stall", "steps"), [(0.125, 2), (0.245, 4), (0.045, 2), (0.005, 1)])
def test_the_optimum_is_rounded_half_to_even(stall: float, steps: int) -> None:
    # sqrt(2 * stall * 100) / 2 is 2.5, 3.5, 1.5 and 0.5
    assert compute_interval(100, 2, 0.001, stall, 0, 0.9).optimum_steps == steps


@given(positive, positive, positive, st.floats(0, 1e6), st.floats(0, 1e5), st.floats(1e-6, 1, exclude_max=True))
def test_an_interval_lies_between_floor_and_ceiling_and_keeps_the_target(
    mtbi: float, step: float, save: float, stall: float, restart: float, target: float
) -> None:
    try:
        interval = compute_interval(mtbi, step, save, stall, restart, target)
    except IntervalError:
        return
    assert 1 <= interval.floor_steps <= interval.save_interval_steps <= interval.ceiling_steps
    assert interval.badput <= target * (1 + 1e-8)
    assert interval.save_interval_steps * step >= save * (1 - 1e-8)


@pytest.mark.parametrize(
    "values",
    [(0, 1, 1), (-1, 1, 1), (math.nan, 1, 1), (math.inf, 1, 1), (3600, 0, 1), (3600, 1, 0), (3600, 1, 1, -1)],
)
def test_numbers_that_mean_nothing_are_refused_in_one_line(values: tuple[float, ...]) -> None:
    with pytest.raises(IntervalError) as refused:
        compute_interval(*values)
    assert "\n" not in str(refused.value)


@given(positive, positive, positive, st.floats(0, 1e6), st.floats(1, 10), st.floats(0.001, 0.99))
def test_retuning_stays_between_floor_and_ceiling_and_never_fails(
    mtbi: float, step: float, save: float, stall: float, slowdown: float, target: float
) -> None:
    new = retuned(
        mtbi_s=mtbi, step_time_s=step, save_time_s=save, save_stall_s=stall, slowdown=slowdown, badput_target=target
    )
    assert new.every_steps >= new.floor_steps >= 1
    assert new.every_steps * step >= 1.25 * save * (1 - 1e-8)
    if new.warning:
        assert new.every_steps == new.floor_steps > new.ceiling_steps
        assert "\n" not in new.warning
    else:
        assert new.every_steps <= new.ceiling_steps
