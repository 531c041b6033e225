"""Counts and durations as they are read."""

from __future__ import annotations

import pytest

from trainer.wording import counted, span


def test_a_noun_agrees_with_its_number() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert counted(2, "batch", "batches") == "2 batches"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (0.0123, "12.3 ms"),
        (1.5, "1.50 s"),
        (61, "61.0 s"),
        (600, "10.0 min"),
        (9000, "2.50 h"),
    ],
)
def test_spans_have_three_figures(seconds: float | None, text: str) -> None:
    assert span(seconds) == text
