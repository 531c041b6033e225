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
import faulthandler
import json
import math
import os
import signal
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from trainer.processes import die_with_parent

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STACKS = signal.SIGUSR2  # a rank that receives it writes the stacks of all its threads to stderr
_STOP, _SAVE = "stop.json", "save_early"
_LOADING, _BEAT = "loading_", "beat_"
_BEAT_FORMAT = struct.Struct("ddq")


class Want(enum.IntEnum):
    """What is asked of the training loop; of several wishes the largest number wins."""

    NOTHING = 0
    SAVE = 1  # save now, go on training (a notice that is only likely to be followed by a reclaim)
    STOP = 2  # end this step, save it, stop
    STOP_UNSAVED = 3  # end this step and stop; only a save that is in flight is waited for


def prepare_rank(runtime: Path | None) -> None:
    """First thing in a rank, before torch is imported: die with the launcher, answer stack dumps, keep early signals.

    A signal that arrives before the first step is kept and honoured once `Reclaim` is there.
    """
    faulthandler.enable()
    faulthandler.register(STACKS, file=sys.stderr, all_threads=True)
    for number in SIGNALS:
        signal.signal(number, _remember)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if runtime is not None:
        parent = None
        with contextlib.suppress(OSError, ValueError):
            parent = int((runtime / "torchrun.pid").read_text())
        die_with_parent(parent)
        (runtime / f"{_LOADING}{os.getpid()}").touch()


def worker_ignore_signals(worker_id: int) -> None:
    """`worker_init_fn` of a DataLoader: its workers outlive the signal that asks their rank to stop."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


_received: list[tuple[int, float]] = []  # (signal number, time.monotonic()); appended to by the handler alone


def _remember(number: int, frame: FrameType | None) -> None:
    _received.append((number, time.monotonic()))


class Reclaim:
    """A rank's view of the requests to save or stop. Use as a context manager in the main thread.

    Args:
        runtime: the launcher's directory of this node; None without a launcher.
        grace_s: seconds from a signal to the platform's SIGKILL.
    """

    def __init__(self, runtime: Path | None, grace_s: float) -> None:
        self.grace_s = grace_s
        self.source = ""  # of the strongest request seen: SIGTERM, aws spot notice, ...
        self.deadline: float | None = None  # time.monotonic() at which the platform kills; None: nobody said
        self._runtime = runtime
        self._want = Want.NOTHING
        self._seen = 0  # signals of _received that were looked at
        self._people = True  # whether every request so far was a Ctrl-C
        self._beats: int | None = None  # descriptor of the beat file
        self._count, self._usual_s, self._before = 0, 0.0, 0.0

    def __enter__(self) -> Self:
        for number in SIGNALS:
            signal.signal(number, _remember)
        if self._runtime is not None:
            (self._runtime / f"{_LOADING}{os.getpid()}").touch()
        # Python runs a handler between two bytecodes of the main thread, so not while a collective blocks. The
        # descriptor is written by the C handler at once; its reader tells the launcher, which enforces the deadline.
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._read, True)
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._listener = threading.Thread(target=self._listen, name="reclaim", daemon=True)
        self._listener.start()
        for early, moment in _received:  # while torch was imported
            self._tell_launcher(early, moment)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # The handlers stay: a second signal during the way out must not kill what the first one asked to save.
        signal.set_wakeup_fd(self._previous_wakeup)
        os.write(self._write, b"\0")
        self._listener.join()
        os.close(self._read)
        os.close(self._write)
        if self._beats is not None:
            os.close(self._beats)

    @property
    def interrupted(self) -> bool:
        """Whether a person's Ctrl-C was all that asked to stop."""
        return self._want >= Want.STOP and self._people

    def want(self) -> Want:
        """What this rank has been asked for; asked once a step. A SAVE is answered once, on one rank of the node."""
        while self._seen < len(_received):
            number, moment = _received[self._seen]
            self._seen += 1
            name = signal.Signals(number).name
            self._ask(Want.STOP, name, moment + self.grace_s, person=number == signal.SIGINT)
        if self._runtime is not None:
            self._beat()
            if (request := read_request(self._runtime)) is not None:
                self._ask(*request)
            if self._want == Want.NOTHING:
                with contextlib.suppress(OSError):
                    (self._runtime / _SAVE).unlink()  # whoever removes it has the request
                    return Want.SAVE
        return self._want

    def _ask(self, want: Want, source: str, deadline: float | None, person: bool) -> None:
        self._people = self._people and person
        if deadline is not None:
            self.deadline = deadline if self.deadline is None else min(self.deadline, deadline)
        if want > self._want:
            self._want, self.source = want, source

    def _beat(self) -> None:
        """Tell the launcher that this rank makes steps."""
        assert self._runtime is not None
        now = time.monotonic()
        if self._beats is None:
            beating = self._runtime / f"{_BEAT}{os.getpid()}"
            try:
                (self._runtime / f"{_LOADING}{os.getpid()}").rename(beating)
            except FileNotFoundError:
                while True:  # the launcher has revoked the start: it is killing this process
                    time.sleep(1)
            self._beats = os.open(beating, os.O_WRONLY | os.O_CLOEXEC)
        elif self._count > 1:  # the first steps compile and warm up
            interval = now - self._before
            self._usual_s = interval if not self._usual_s else 0.9 * self._usual_s + 0.1 * interval
        self._count, self._before = self._count + 1, now
        os.pwrite(self._beats, _BEAT_FORMAT.pack(now, self._usual_s, self._count), 0)

    def _listen(self) -> None:
        while byte := os.read(self._read, 1):
            number = byte[0]
            if number == 0:
                return
            if number in SIGNALS:
                self._tell_launcher(number, time.monotonic())

    def _tell_launcher(self, number: int, moment: float) -> None:
        if self._runtime is None:
            return
        name, person = signal.Signals(number).name, number == signal.SIGINT
        with contextlib.suppress(OSError):
            post_request(self._runtime, Want.STOP, name, moment + self.grace_s, person=person)


# ---------------------------------------------------------------------------------------------------------------------
# The launcher's side


def post_request(
    runtime: Path, want: Want, source: str, deadline: float | None = None, *, person: bool = False
) -> None:
    """Ask the ranks of this node; a weaker request than one that stands is dropped.

    Args:
        deadline: `time.monotonic()` seconds at which the platform kills.
        person: a Ctrl-C.
    """
    if want == Want.NOTHING:
        return
    if want == Want.SAVE:
        (runtime / _SAVE).touch()
        return
    if (standing := read_request(runtime)) is not None and standing[0] >= want:
        return
    temporary = runtime / f".{_STOP}.{os.getpid()}.{threading.get_ident()}"
    temporary.write_text(json.dumps({"want": want, "source": source, "deadline": deadline, "person": person}))
    temporary.replace(runtime / _STOP)


def read_request(runtime: Path) -> tuple[Want, str, float | None, bool] | None:
    """The request to stop that stands: what, who asked, deadline (monotonic seconds), whether it was a Ctrl-C."""
    try:
        text = (runtime / _STOP).read_text()
    except OSError:
        return None
    request = json.loads(text)
    return Want(request["want"]), request["source"], request["deadline"], request["person"]


@dataclass(frozen=True)
class Beat:
    """A rank's last sign of life: `time.monotonic()`, its usual seconds per step (0: not known), steps asked."""

    moment: float
    usual_s: float
    count: int


def read_beats(runtime: Path) -> dict[int, Beat]:
    """The ranks of this node that make steps, by process id."""
    beats = {}
    for path in runtime.glob(f"{_BEAT}*"):
        with contextlib.suppress(OSError, struct.error):
            beats[int(path.name.removeprefix(_BEAT))] = Beat(*_BEAT_FORMAT.unpack(path.read_bytes()))
    return beats


def rank_processes(runtime: Path) -> list[int]:
    """Process ids of this node's ranks, from the moment on at which they answer a request for their stacks."""
    return [
        int(path.name.rpartition("_")[2]) for pattern in (_LOADING, _BEAT) for path in runtime.glob(f"{pattern}[0-9]*")
    ]


def revoke_start(runtime: Path) -> bool:
    """Take the right to make a first step from ranks that have not made it. Returns whether killing them loses no step.

    That is so if one of them had not asked for the first time: no step ends without all ranks having asked.
    """
    revoked = False
    for path in runtime.glob(f"{_LOADING}*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            revoked = True
    return revoked or not any(runtime.glob(f"{_BEAT}*"))


def decide(left_s: float, step_s: float, save_s: float | None, pending_s: float) -> tuple[Want, str]:
    """What the time until the platform's SIGKILL is enough for, and why, for the log.

    Args:
        left_s: seconds that may be used; infinite where nobody kills.
        step_s: until the ranks act on the request: a step, or two where they agree one late.
        save_s: of a save until it is durable, as measured in this run; None before the first: it is tried.
        pending_s: until the save in flight is durable; 0 where there is none.
    """
    left = "no time limit" if math.isinf(left_s) else f"{left_s:.0f} s left"
    if save_s is None:
        return Want.STOP, f"{left} and no save measured yet: ending the step and trying to save it"
    needed = step_s + pending_s + save_s
    if needed <= left_s:
        return Want.STOP, f"{left}, about {needed:.0f} s needed: ending the step and saving it"
    flush = "; the save in flight is waited for" if 0 < pending_s <= left_s else ""
    flush = "; the save in flight will hardly make it" if pending_s > left_s else flush
    return Want.STOP_UNSAVED, f"{left}, about {needed:.0f} s needed for a save: stopping without{flush}"
