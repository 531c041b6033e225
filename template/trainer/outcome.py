"""How a run of the trainer ended: the reason, its exit code, the errors that carry it, and the ranks' status files.

torchrun's own exit code means nothing (it is 1 for a reclaim, a crash and a wrong configuration alike), so each
rank writes why it stopped into the runtime directory of its node, and the launcher translates.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FINISHED = 0
CRASHED = 1
RECLAIMED = 75  # EX_TEMPFAIL: state saved, start me again
CONFIG = 78  # EX_CONFIG: a person has to change something first


class Reason(enum.StrEnum):
    """Why the ranks stopped; the `reason` of the ledger's `stopped`."""

    FINISHED = "finished"
    RECLAIMED = "reclaimed"  # a signal or a notice of the platform
    INTERRUPTED = "interrupted"  # a person's Ctrl-C
    UNAVAILABLE = "unavailable"  # temporarily: a held lease, an I/O error, missing GPUs
    CONFIG = "config"
    CRASHED = "crashed"

    def line(self, text: str) -> str:
        """`text` as a message that begins with the kind of error."""
        return f"{'temporarily unavailable' if self is Reason.UNAVAILABLE else 'error'}: {text}"

    @property
    def is_clean(self) -> bool:
        """Whether the ranks ended as they were asked to."""
        return self in (Reason.FINISHED, Reason.RECLAIMED, Reason.INTERRUPTED)


def exit_code(reason: Reason, again: int = RECLAIMED) -> int:
    """The exit code that tells the platform; `again` is `restart.exit_reclaimed`."""
    return {Reason.FINISHED: FINISHED, Reason.CONFIG: CONFIG, Reason.CRASHED: CRASHED}.get(reason, again)


class Damaged(Exception):
    """A checkpoint is not what was committed. The text is one line: which file, and what is wrong with it."""


class Expected(Exception):
    """An error that needs no traceback: its text is one line, which says what to do."""

    reason = Reason.CRASHED


class ConfigError(Expected):
    """Something that a person has to change before another start can work. Exit 78."""

    reason = Reason.CONFIG


class UnavailableError(Expected):
    """Something that may work at another start (lease held, I/O error, too few GPUs). Exit 75."""

    reason = Reason.UNAVAILABLE


class SavesFailed(Expected):
    """`checkpoint.max_failed_saves` saves in a row have failed on all ranks alike. Exit 1."""


@dataclass(frozen=True)
class Status:
    """Why a rank stopped, after which step, and the error."""

    reason: Reason
    step: int = 0
    message: str = ""
    rank: int = 0

    def write(self, runtime: Path) -> None:
        """Tell the launcher of this node."""
        path = runtime / f"status_{self.rank}.json"
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(path)


def read_statuses(runtime: Path) -> list[Status]:
    """What the ranks of this node wrote, in the order in which they ended."""
    found = []
    for path in runtime.glob("status_*.json"):
        with contextlib.suppress(OSError, ValueError):
            fields = json.loads(path.read_text())
            found.append((path.stat().st_mtime, Status(**fields | {"reason": Reason(fields["reason"])})))
    return [status for _, status in sorted(found, key=lambda one: one[0])]
