"""From "the machine is being taken away" to a request that all ranks act on at the same step.

A rank's signal handlers set a flag and nothing else. Each rank offers what it wants to the reduction of every step,
and the strongest wish of any rank is what all of them do. The launcher and the ranks of its node speak through files
in the runtime directory:

    stop.json       the request to stop; stays
    save_early      the request to save and go on; one rank takes it
    loading_<pid>   a rank that has not asked for the first time: it has made no step, and may be killed
    beat_<pid>      a rank that makes steps: when it last asked, how far apart it usually asks, how often it has

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
from dataclasses import dataclass
from pathlib import Path

STOP_FILE, SAVE_FILE = "stop.json", "save_early"
LOADING, BEAT = "loading_", "beat_"
BEAT_FORMAT = struct.Struct("ddq")


class Action(enum.IntEnum):
    """What is asked of the training loop; of several wishes the largest number wins."""

    NOTHING = 0
    SAVE = 1  # save now, go on training (a notice that is only likely to be followed by a reclaim)
    STOP = 2  # end this step, save it, stop
    STOP_UNSAVED = 3  # end this step and stop; only a save that is in flight is waited for


def post_request(
    runtime: Path, want: Action, source: str, deadline: float | None = None, *, person: bool = False
) -> None:
    """Ask the ranks of this node; a weaker request than one that stands is dropped.

    Args:
        deadline: `time.monotonic()` seconds at which the platform kills.
        person: a Ctrl-C.
    """
    if want == Action.NOTHING:
        return
    if want == Action.SAVE:
        (runtime / SAVE_FILE).touch()
        return
    if (standing := read_request(runtime)) is not None and standing[0] >= want:
        return
    temporary = runtime / f".{STOP_FILE}.{os.getpid()}.{threading.get_ident()}"
    temporary.write_text(json.dumps({"want": want, "source": source, "deadline": deadline, "person": person}))
    temporary.replace(runtime / STOP_FILE)


def read_request(runtime: Path) -> tuple[Action, str, float | None, bool] | None:
    """The request to stop that stands: what, who asked, deadline (monotonic seconds), whether it was a Ctrl-C."""
    try:
        text = (runtime / STOP_FILE).read_text()
    except OSError:
        return None
    request = json.loads(text)
    return Action(request["want"]), request["source"], request["deadline"], request["person"]


@dataclass(frozen=True)
class Beat:
    """A rank's last sign of life: `time.monotonic()`, its usual seconds per step (0: not known), steps asked."""

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


def decide(left_s: float, step_s: float, save_s: float | None, pending_s: float) -> tuple[Action, str]:
    """What the time until the platform's SIGKILL is enough for, and why, for the log.

    Args:
        left_s: seconds that may be used; infinite where nobody kills.
        step_s: until the ranks act on the request: a step, or two where they agree one late.
        save_s: of a save until it is durable, as measured in this run; None before the first: it is tried.
        pending_s: until the save in flight is durable; 0 where there is none.
    """
    left = "no time limit" if math.isinf(left_s) else f"{left_s:.0f} s left"
    if save_s is None:
        return Action.STOP, f"{left} and no save measured yet: ending the step and trying to save it"
    needed = step_s + pending_s + save_s
    if needed <= left_s:
        return Action.STOP, f"{left}, about {needed:.0f} s needed: ending the step and saving it"
    flush = "; the save in flight is waited for" if 0 < pending_s <= left_s else ""
    flush = "; the save in flight will hardly make it" if pending_s > left_s else flush
    return Action.STOP_UNSAVED, f"{left}, about {needed:.0f} s needed for a save: stopping without{flush}"
