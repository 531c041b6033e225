"""One reason from what the ranks wrote and what was seen of them."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.launch.exit_reason import translate
from trainer.outcome import Reason, Status
from trainer.reclaim.request import Action, Request


def _status(reason: str, step: int = 5, rank: int = 0, message: str = "") -> Status:
    return Status(Reason(reason), step, message, rank)


STOP = Request(Action.STOP, "SIGTERM", None)
BOTH_STOPPED = [_status("reclaimed"), _status("interrupted", rank=1)]


@pytest.mark.parametrize(
    ("statuses", "report", "code", "stop", "reason"),
    [
        ([_status("finished"), _status("finished", rank=1)], {}, 0, None, Reason.FINISHED),
        ([_status("finished"), _status("finished", rank=1)], {}, 0, STOP, Reason.FINISHED),
        (BOTH_STOPPED, {"signal": 15}, 1, None, Reason.INTERRUPTED),
        (BOTH_STOPPED, {}, 0, STOP, Reason.RECLAIMED),
        ([_status("config", message="no")], {"failures": {"0": 78, "1": -15}}, 1, STOP, Reason.CONFIG),
        ([_status("unavailable", message="no")], {"failures": {"0": 75}}, 1, None, Reason.UNAVAILABLE),
        ([_status("crashed", message="Boom")], {"failures": {"0": 1, "1": -15}}, 1, None, Reason.CRASHED),
        ([], {"failures": {"0": -11, "1": -15}}, 1, None, Reason.CRASHED),
        ([_status("reclaimed")], {"failures": {"1": -9}}, 1, None, Reason.CRASHED),
        ([], {"failures": {"1": -15}}, 1, None, Reason.RECLAIMED),
        ([], {"signal": 15}, 1, None, Reason.RECLAIMED),
        ([], {}, -9, STOP, Reason.RECLAIMED),
        ([], {}, -9, None, Reason.CRASHED),
        ([], {}, 1, None, Reason.CRASHED),
        ([], {"error": "RendezvousTimeoutError: "}, 1, None, Reason.UNAVAILABLE),
    ],
)
def test_one_reason_from_what_ranks_and_torchrun_left(
    statuses: list[Status], report: dict[str, Any], code: int, stop: Request | None, reason: Reason
) -> None:
    assert translate(statuses, report, code, 2, stop).reason is reason


def test_the_first_rank_that_crashed_is_the_one_that_is_shown() -> None:
    statuses = [_status("crashed", rank=1, message="KeyError: 'x'"), _status("crashed", message="Connection closed")]
    assert "rank 1: KeyError: 'x'" in translate(statuses, {"failures": {"0": 1, "1": 1}}, 1, 2, None).message


def test_a_rank_that_was_killed_is_shown_before_what_its_peers_say_of_it() -> None:
    statuses = [_status("crashed", message="Connection reset by peer")]
    ended = translate(statuses, {"failures": {"1": -9, "0": 1}}, 1, 2, None)
    assert ended.message == "rank 1 was killed by SIGKILL (out of memory?)" and ended.outside
    later = translate(statuses, {"failures": {"0": 1, "1": -9}}, 1, 2, None)  # the launcher ended the one that hung
    assert "Connection reset by peer" in later.message and not later.outside
