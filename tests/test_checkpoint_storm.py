"""A few rounds of the kill storm; `tests/benchmarks/kill_storm.py --rounds 200` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STORM = Path(__file__).parent / "benchmarks" / "kill_storm.py"


@pytest.mark.parametrize(
    ("rounds", "seed"), [(2, 3), pytest.param(12, 1, marks=pytest.mark.slow)], ids=["short", "longer"]
)
def test_nothing_committed_is_lost_and_losses_are_those_of_an_undisturbed_run(
    tmp_path: Path, rounds: int, seed: int
) -> None:
    command = [sys.executable, str(STORM), "--rounds", str(rounds), "--seed", str(seed), "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["rounds"] == rounds and verdict["saves_committed"] > 0 and verdict["lines_compared"] > 0
