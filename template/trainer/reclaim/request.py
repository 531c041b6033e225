"""From "the machine is being taken away" to a request that all ranks act on at the same step.

A rank's signal handlers set a flag and nothing else. Each rank offers what it was asked for to the reduction of every
step, and the strongest request of any rank is what all of them do.

The launcher of a node and its ranks communicate through files in the runtime directory, a fresh one on the local disk:

| file               | written by               | read by  | says                                               |
|--------------------|--------------------------|----------|----------------------------------------------------|
| stop.json          | launcher                 | ranks    | the request to stop, which stays                   |
| save_early         | launcher                 | ranks    | save and go on; the rank that removes it does so   |
| signalled.json     | ranks                    | launcher | a signal came to a rank directly                   |
| loading_<pid>      | ranks (launcher removes) | launcher | this rank has made no step, and may be killed      |
| beat_<pid>         | ranks                    | launcher | steps: the last one's moment, usual time, how many |
| status_<rank>.json | ranks (`outcome.Status`) | launcher | why the rank ended                                 |
| starter.pid        | `launch/spawn.py`        | ranks    | the process that started them                      |
| starter.json       | torchrun, several nodes  | launcher | how the ranks ended, as torchrun saw it            |

Deadlines are `time.monotonic()` seconds, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import struct
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

STOP, SAVE_EARLY, SIGNALLED = "stop.json", "save_early", "signalled.json"
LOADING, BEAT = "loading_", "beat_"
BEAT_FORMAT = struct.Struct("ddq")
STARTER_PID, STARTER_REPORT = "starter.pid", "starter.json"


class Action(enum.IntEnum):
    """What is asked of the training loop; of several requests the largest number wins."""

    NOTHING = 0
    SAVE = 1  # save now, go on training (a notice that is only likely to be followed by a reclaim)
    STOP = 2  # end this step, save it, stop
    STOP_UNSAVED = 3  # end this step and stop; only a pending save is waited for


@dataclass(frozen=True)
class Request:
    """A request to save or to stop; `deadline` is `time.monotonic()` of the platform's SIGKILL, None: not known."""

    action: Action
    source: str  # SIGTERM, AWS spot instance-action, ...
    deadline: float | None = None
    person: bool = False  # a Ctrl-C

    def write(self, path: Path) -> None:
        """In one piece, in place of whatever was there."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """None where nothing was written."""
        try:
            fields = json.loads(path.read_text())
        except OSError:
            return None
        return cls(**fields | {"action": Action(fields["action"])})


@dataclass(frozen=True)
class Beat:
    """A rank's last sign of life: `time.monotonic()`, its usual seconds per step (0: not known), steps so far."""

    moment: float
    usual_s: float
    count: int


def read_beats(runtime: Path) -> dict[int, Beat]:
    """The ranks of this node that make steps, by process id."""
    beats = {}
    for path in runtime.glob(f"{BEAT}*"):
        with contextlib.suppress(OSError, struct.error):
            beats[int(path.name.removeprefix(BEAT))] = Beat(*BEAT_FORMAT.unpack(path.read_bytes()))
    return beats


def rank_processes(runtime: Path) -> list[int]:
    """Process ids of this node's ranks, from the moment on at which they answer a request for their stacks."""
    return [
        int(path.name.rpartition("_")[2]) for pattern in (LOADING, BEAT) for path in runtime.glob(f"{pattern}[0-9]*")
    ]


def revoke_start(runtime: Path) -> bool:
    """Take the right to make a first step from ranks that have not made it. Returns whether killing them loses no step.

    That is so if one of them had not asked for the first time: no step ends without all ranks having asked.
    """
    revoked = False
    for path in runtime.glob(f"{LOADING}*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            revoked = True
    return revoked or not any(runtime.glob(f"{BEAT}*"))


def usable_s(left_s: float) -> float:
    """What may be used of the time until the platform's SIGKILL: a margin is kept for ending the ranks before it."""
    return left_s - min(3.0, left_s / 4)


def decide(left_s: float, step_s: float, save_s: float | None, pending_s: float) -> tuple[Action, str]:
    """What the time until the platform's SIGKILL is enough for, and why, for the log.

    Args:
        left_s: seconds that may be used; infinite where nothing kills.
        step_s: until the ranks act on the request: a step, or two where they agree one late.
        save_s: of a save until it is durable, as measured in this run; None before the first: it is tried.
        pending_s: until the pending save is durable; 0 where there is none.
    """
    left = "no time limit" if math.isinf(left_s) else f"{left_s:.0f} s left"
    if save_s is None:
        return Action.STOP, f"{left} and no save measured yet: ending the step and trying to save it"
    needed = step_s + pending_s + save_s
    if needed <= left_s:
        return Action.STOP, f"{left}, about {needed:.0f} s needed: ending the step and saving it"
    pending = "; the pending save is waited for" if 0 < pending_s <= left_s else ""
    pending = "; the pending save will probably not finish in time" if pending_s > left_s else pending
    return Action.STOP_UNSAVED, f"{left}, about {needed:.0f} s needed for a save: stopping without one{pending}"
