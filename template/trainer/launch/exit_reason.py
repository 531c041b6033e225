"""Why the ranks of a node ended: one reason from their status files and their exit codes."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.outcome import Reason, Status
from trainer.processes import STOP_SIGNALS
from trainer.reclaim.request import Request


@dataclass(frozen=True)
class Ended:
    """Why the ranks of this node ended, after which step, and the error of the one that failed first."""

    reason: Reason
    step: int
    message: str = ""
    outside: bool = False  # killed from outside (SIGKILL): the next try may well do better


def translate(
    statuses: Sequence[Status], report: Mapping[str, Any], returncode: int, ranks: int, stop: Request | None
) -> Ended:
    """One reason from what the ranks wrote (in the order of their end) and what their starter saw of them.

    Args:
        report: the starter's: `failures` (exit code by rank, in the order of their end), `signal` it received, `error`
            of the rendezvous.
        returncode: of the starter.
        stop: the request to stop that the launcher passed on, if any.
    """
    step = max((status.step for status in statuses), default=0)
    by_reason: dict[Reason, Status] = {}
    for status in statuses:
        by_reason.setdefault(status.reason, status)
    for reason in (Reason.CONFIG, Reason.UNAVAILABLE):
        if reason in by_reason:
            return Ended(reason, step, by_reason[reason].message)
    if len(statuses) == ranks and set(by_reason) == {Reason.FINISHED}:
        return Ended(Reason.FINISHED, step)
    interrupted = stop.person if stop else Reason.INTERRUPTED in by_reason
    stopped = Reason.INTERRUPTED if interrupted else Reason.RECLAIMED
    crash = by_reason.get(Reason.CRASHED)
    if len(statuses) == ranks and not crash:
        return Ended(stopped, step)
    failures = {int(rank): int(code) for rank, code in report.get("failures", {}).items()}
    hard = {rank: code for rank, code in failures.items() if -code not in STOP_SIGNALS}
    if stop or (not crash and not hard and (failures or "signal" in report)):
        return Ended(stopped, step, crash.message if crash else "")
    first, how = next(iter(failures.items()), (None, 0))
    if how == -signal.SIGKILL and first not in [
        status.rank for status in statuses
    ]:  # what its peers say follows from it
        return Ended(Reason.CRASHED, step, f"rank {first} {_ending(how)}", outside=True)
    if crash:
        words = crash.message.strip()
        separator = "\n" if "\n" in words else " "
        return Ended(Reason.CRASHED, step, f"rank {crash.rank}:{separator}{words}")
    if hard:
        rank, code = min(hard.items(), key=lambda item: item[1] >= 0)
        return Ended(Reason.CRASHED, step, f"rank {rank} {_ending(code)}", outside=code == -signal.SIGKILL)
    if "error" in report:
        return Ended(Reason.UNAVAILABLE, step, f"the ranks could not connect to each other: {report['error']}")
    what = f"a process of the ranks {_ending(returncode)}"
    return Ended(Reason.CRASHED, step, what, outside=returncode == -signal.SIGKILL)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} without a status"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
