"""Requests to save and to stop: from signals and files to what a rank wants, and the decision about the time left."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer
from trainer.processes import STOP_SIGNALS
from trainer.reclaim import rank as rank_signals
from trainer.reclaim.rank import Reclaim
from trainer.reclaim.request import (
    SAVE_EARLY,
    SIGNALLED,
    STOP,
    Action,
    Request,
    decide,
    rank_processes,
    read_beats,
    revoke_start,
)

PROJECT = Path(trainer.__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    """The handlers of the test runner come back, and no signal is left over."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    rank_signals._received.clear()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_asks_to_stop(number: signal.Signals) -> None:
    with Reclaim(None, grace_s=30) as asked:
        assert asked.requested() is Action.NOTHING
        os.kill(os.getpid(), number)
        assert asked.requested() is Action.STOP
        assert asked.interrupted == (number == signal.SIGINT)


def test_ctrl_c_and_a_reclaim_is_a_reclaim() -> None:
    with Reclaim(None, 30) as asked:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.requested() is Action.STOP
        assert not asked.interrupted


def test_the_strongest_request_wins_and_a_weaker_one_does_not_undo_it(tmp_path: Path) -> None:
    with Reclaim(tmp_path, 30) as asked:
        Request(Action.STOP_UNSAVED, "notice", 5.0).write(tmp_path / STOP)
        assert asked.requested() is Action.STOP_UNSAVED
        Request(Action.STOP, "later", 1.0).write(tmp_path / STOP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.requested() is Action.STOP_UNSAVED


def test_an_early_save_is_answered_once_by_one_rank(tmp_path: Path) -> None:
    with Reclaim(tmp_path, 30) as one, Reclaim(tmp_path, 30) as other:
        (tmp_path / f"loading_{os.getpid()}").touch()
        one.requested()
        (tmp_path / f"loading_{os.getpid()}").touch()
        other.requested()
        (tmp_path / SAVE_EARLY).touch()
        assert [one.requested(), other.requested(), one.requested()] == [Action.SAVE, Action.NOTHING, Action.NOTHING]


def test_the_launcher_hears_of_a_signal_while_the_rank_is_busy(tmp_path: Path) -> None:
    """A collective holds the main thread, so no Python handler runs: the wake-up descriptor is what tells."""
    code = """
import ctypes, sys
from pathlib import Path
from trainer.reclaim.rank import Reclaim
with Reclaim(Path(sys.argv[1]), 30):
    print("ready", flush=True)
    ctypes.CDLL(None).sleep(60); ctypes.CDLL(None).sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout and rank.stdout.readline() == "ready\n"
        signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert signal.SIGTERM not in signal_mask
        rank.terminate()
        end = time.monotonic() + 10
        while (request := Request.read(tmp_path / SIGNALLED)) is None:
            assert time.monotonic() < end
        rank.kill()
    assert (request.action, request.source) == (Action.STOP, "SIGTERM")
    assert request.deadline is not None and 19 < request.deadline - time.monotonic() <= 30


def test_the_launcher_hears_of_a_signal_that_came_before(tmp_path: Path) -> None:
    rank_signals._received.append((signal.SIGTERM, 100.0))
    with Reclaim(tmp_path, 30):
        assert Request.read(tmp_path / SIGNALLED) == Request(Action.STOP, "SIGTERM", 130.0, person=False)


def test_beats_tell_how_long_a_step_usually_takes(tmp_path: Path) -> None:
    with Reclaim(tmp_path, 30) as asked:
        assert rank_processes(tmp_path) == [os.getpid()]
        assert read_beats(tmp_path) == {}
        for _ in range(4):
            asked.requested()
        beat = read_beats(tmp_path)[os.getpid()]
        assert beat.count == 4 and 0 < beat.usual_s < 1
        assert 0 <= time.monotonic() - beat.moment < 10


def test_a_start_can_be_revoked_until_the_first_step_and_not_after(tmp_path: Path) -> None:
    with Reclaim(tmp_path, 30) as asked:
        asked.requested()
        assert not revoke_start(tmp_path)
        (tmp_path / "loading_1").touch()  # another rank that has not asked yet: no step can have ended
        assert revoke_start(tmp_path)
        assert not (tmp_path / "loading_1").exists()


@pytest.mark.parametrize(
    ("left", "step", "save", "pending", "action"),
    [
        (30, 1, 10, 0, Action.STOP),
        (30, 1, 10, 19, Action.STOP),
        (30, 1, 10, 25, Action.STOP_UNSAVED),
        (10, 1, 10, 0, Action.STOP_UNSAVED),
        (0, 1, 10, 0, Action.STOP_UNSAVED),
        (5, 1, None, 0, Action.STOP),
        (float("inf"), 100, 1000, 1000, Action.STOP),
    ],
)
def test_what_the_time_is_enough_for(
    left: float, step: float, save: float | None, pending: float, action: Action
) -> None:
    decision, why = decide(left, step, save, pending)
    assert decision is action
    assert "inf" not in why


def test_handlers_set_a_flag_and_nothing_else() -> None:
    tree = ast.parse(Path(rank_signals.__file__).read_text())
    (handler,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_remember")
    assert len(handler.body) == 1
    assert ast.unparse(handler.body[0]).startswith("_received.append(")


def test_asking_costs_less_than_a_hundredth_of_a_demo_step(tmp_path: Path) -> None:
    with Reclaim(tmp_path, 30) as asked:
        asked.requested()
        began = time.perf_counter()
        for _ in range(1000):
            asked.requested()
        assert (time.perf_counter() - began) / 1000 < 0.001
