"""How many ranks a node runs, from its GPUs, its cores and the settings."""

from __future__ import annotations

import pytest

from trainer.config.settings import GpuConfig
from trainer.machine.gpus import decide_ranks
from trainer.outcome import ConfigError, UnavailableError


@pytest.mark.parametrize(
    ("given", "gpus", "cores", "settings", "provider", "expected"),
    [
        (None, 8, 64, GpuConfig(count=8), "aws", 8),
        (None, 4, 64, GpuConfig(count=8), "aws", 4),
        (None, 16, 64, GpuConfig(count=8), "aws", 16),
        (None, 0, 2, GpuConfig(count=8), "local", 2),
        (None, 0, 64, GpuConfig(count=4, on_count_change="fail"), "local", 4),
        (3, 8, 64, GpuConfig(count=8, min_count=8, on_count_change="fail"), "aws", 3),
        (4, 0, 2, GpuConfig(count=8, on_count_change="hold"), "aws", 4),
        (9, 8, 64, GpuConfig(count=8), "aws", ConfigError),
        (None, 4, 64, GpuConfig(count=8, on_count_change="hold"), "aws", UnavailableError),
        (None, 4, 64, GpuConfig(count=8, on_count_change="fail"), "aws", ConfigError),
        (None, 1, 64, GpuConfig(count=8, min_count=2), "aws", UnavailableError),
        (None, 1, 64, GpuConfig(count=8, min_count=2, on_count_change="fail"), "aws", ConfigError),
        (None, 0, 64, GpuConfig(count=8), "aws", UnavailableError),
        (None, 0, 1, GpuConfig(count=8, min_count=2), "local", UnavailableError),
    ],
)
def test_the_number_of_ranks(
    given: int | None, gpus: int, cores: int, settings: GpuConfig, provider: str, expected: int | type[Exception]
) -> None:
    if isinstance(expected, int):
        assert decide_ranks(given, gpus, cores, settings, provider).count == expected
        return
    with pytest.raises(expected):
        decide_ranks(given, gpus, cores, settings, provider)


def test_a_machine_without_gpus_says_so() -> None:
    with pytest.raises(UnavailableError, match="no GPU was found"):
        decide_ranks(None, 0, 8, GpuConfig(count=8), "gcp")
    assert "no GPU" in decide_ranks(2, 0, 8, GpuConfig(count=8), "gcp").why
