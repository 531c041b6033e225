"""How a run of the trainer ended: exit codes, the errors that carry them, and the status file.

torchrun's own exit code means nothing (it is 1 for a reclaim, a crash and a wrong configuration alike), so each
rank writes why it stopped into the runtime directory of its node, and the launcher translates.
"""

from __future__ import annotations

import enum
import json
import os
from pathlib import Path
from typing import Any

FINISHED = 0
RECLAIMED = 75  # EX_TEMPFAIL: state saved, start me again
CONFIG = 78  # EX_CONFIG: a person has to change something first


class Reason(enum.StrEnum):
    """Why the ranks stopped; the `reason` of the ledger's `stopped`."""

    FINISHED = "finished"
    RECLAIMED = "reclaimed"  # a signal or a notice of the platform
    INTERRUPTED = "interrupted"  # a person's Ctrl-C
    UNAVAILABLE = "unavailable"  # something outside is not there now: held lease, I/O error, missing GPUs
    CONFIG = "config"
    CRASHED = "crashed"


class ConfigError(Exception):
    """Something that a person has to change before another start can work. Exit 78. The text is one line."""


class UnavailableError(Exception):
    """Something that another start may find mended (lease held, I/O error, too few GPUs). Exit 75. One line."""


class Damaged(Exception):
    """A checkpoint is not what was committed. The text is one line: which file, and what is wrong with it."""


class SavesFailed(Exception):
    """`checkpoint.max_failed_saves` saves in a row have failed on all ranks alike. Exit 1. One line."""


def write_status(runtime: Path | None, rank: int, reason: Reason, step: int, message: str = "") -> None:
    """Record why this rank stopped, for the launcher of its node; nothing to do without a launcher."""
    if runtime is None:
        return
    path = runtime / f"status_{rank}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"reason": reason, "step": step, "message": message, "rank": rank}))
    temporary.replace(path)


def read_statuses(runtime: Path) -> list[dict[str, Any]]:
    """The status of every rank of this node that wrote one, by rank."""
    found = [json.loads(path.read_text()) for path in runtime.glob("status_*.json")]
    return sorted(found, key=lambda status: status["rank"])
