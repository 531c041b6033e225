"""The claim behind `train.reproducible`: a sum of fp32 numbers in float64, rounded once, does not show its order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.float64_sums import cancelling, differences, like_gradients, wide

NUMBER = st.builds(math.ldexp, st.integers(-(2**24) + 1, 2**24 - 1), st.integers(-48, -24))


@given(st.lists(NUMBER, min_size=2, max_size=16), st.randoms(use_true_random=False), st.integers(1, 15))
def test_no_order_and_no_grouping_of_a_sum_shows(numbers: list[float], random: object, cut: int) -> None:
    shuffled = list(numbers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    grouped = sum(shuffled[:cut], 0.0) + sum(shuffled[cut:], 0.0)
    assert np.float32(sum(numbers, 0.0)) == np.float32(grouped) == np.float32(math.fsum(numbers))


@pytest.mark.parametrize("kind", [like_gradients, wide, cancelling])
def test_sums_as_training_makes_them_do_not_differ(kind: object) -> None:
    random = np.random.default_rng(1)
    assert differences(kind(random, (1 << 16, 16)), random) == 0  # type: ignore[operator]
