"""What starts the ranks of one node: torchrun's environment, signals handed on, nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainer
from trainer.launch.spawn import REPORT
from trainer.processes import alive

PROJECT = Path(trainer.__file__).resolve().parents[1]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(code, ranks)` runs the Python `code` as each rank, in the place of `-m trainer train`."""
    (tmp_path / "ranks").mkdir()
    started = []

    def run(code: str, ranks: int = 2, seconds: float = 20.0) -> subprocess.Popen[str]:
        (tmp_path / "ranks" / "rank.py").write_text(code)
        words = [str(os.getpid()), str(tmp_path), str(seconds), "--nnodes=1", f"--nproc-per-node={ranks}", "-m", "rank"]
        environment = {**os.environ, "PYTHONPATH": f"{PROJECT}:{tmp_path / 'ranks'}"}
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.launch.spawn", *words], env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def _report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / REPORT).read_text())
    return found


def _pids(process: subprocess.Popen[str], count: int) -> list[int]:
    """What `count` ranks have printed: their process ids."""
    assert process.stdout
    return [int(process.stdout.readline()) for _ in range(count)]


WAITS = """
import os, time
from trainer.processes import die_with_parent
die_with_parent()
os.write(1, b"%d\\n" % os.getpid())
while True: time.sleep(1)
"""


# Rank 0 fails once rank 1 has failed, and has been collected.
LATER = """
import os, sys, time
from pathlib import Path
pid = Path({file!r})
if os.environ["RANK"] == "1":
    pid.with_suffix(".part").write_text(str(os.getpid()))
    pid.with_suffix(".part").rename(pid)
    sys.exit(3)
while not pid.exists() or Path("/proc", pid.read_text()).exists():
    time.sleep(0.01)
sys.exit(4)
"""


def test_each_rank_has_torchruns_environment(start: Start) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    line = f"' '.join(os.environ[name] for name in {names}) + '\\n'"
    process = start(f"import os; os.write(1, ({line}).encode())", 3)  # in one piece: they share the pipe
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert sorted(out.splitlines()) == [f"{rank} {rank} 3 3 127.0.0.1" for rank in range(3)]


def test_torch_is_left_to_the_ranks(start: Start, tmp_path: Path) -> None:
    process = start(WAITS, 1)
    _pids(process, 1)
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_handed_on_and_noted(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    process = start(f"import signal; signal.signal({int(number)}, lambda *_: exit(0))\n" + WAITS)
    pids = _pids(process, 2)
    process.send_signal(number)
    process.wait(30)
    assert _report(tmp_path) == {"signal": number}
    assert not any(map(alive, pids))


def test_ranks_that_do_not_answer_a_signal_are_killed_in_time(start: Start, tmp_path: Path) -> None:
    process = start("import signal; signal.signal(15, signal.SIG_IGN)\n" + WAITS, seconds=0.5)
    pids = _pids(process, 2)
    process.terminate()
    process.wait(30)
    assert _report(tmp_path) == {"failures": {"0": -9, "1": -9}, "signal": 15}
    assert not any(map(alive, pids))


def test_the_rank_that_failed_first_is_the_first_in_the_report(start: Start, tmp_path: Path) -> None:
    process = start(LATER.format(file=str(tmp_path / "pid")), 2)
    process.wait(30)
    assert list(_report(tmp_path)["failures"].items()) == [("1", 3), ("0", 4)]


def test_ranks_die_with_it(start: Start) -> None:
    process = start(WAITS)
    pids = _pids(process, 2)
    process.kill()
    end = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < end
