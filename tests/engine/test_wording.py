"""Counts, durations and bytes as they are read."""

from __future__ import annotations

import pytest

from trainer.wording import counted, size, span


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


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (999_600, "1 MB"),
        (1e13, "10 TB"),
        (16.2e9, "16.2 GB"),
        (1e13, "10 TB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert size(count) == text
