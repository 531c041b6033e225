"""From "the machine is being taken away" to a request that all ranks act on at the same step.

A rank's signal handlers set a flag and nothing else; the launcher speaks to the ranks of its node through two small
files in the runtime directory: `stop.json`, which stays, and `save_early`, which one rank takes. Each rank offers what
it wants to the reduction of every step, and the strongest wish of any rank is what all of them do. Deadlines are
`time.monotonic()` seconds, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STACKS = signal.SIGUSR2  # a rank that receives it writes the stacks of all its threads to stderr
_STOP, _SAVE = "stop.json", "save_early"


class Want(enum.IntEnum):
    """What is asked of the training loop; of several wishes the largest number wins."""

    NOTHING = 0
    SAVE = 1  # save now, go on training (a notice that is only likely to be followed by a reclaim)
    STOP = 2  # end this step, save it, stop
    STOP_UNSAVED = 3  # end this step and stop; only a save that is in flight is waited for


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the one that started it dies (prctl(2), Linux only).

    Args:
        parent: its process id, where known: ends at once when it is gone already.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def prepare_rank(runtime: Path | None) -> None:
    """First thing in a rank, before torch is imported: die with the launcher, answer stack dumps, keep early signals.

    A signal that arrives before the first step is kept and honoured once `Reclaim` is there.
    """
    if runtime is not None:
        die_with_parent()
    faulthandler.register(STACKS, file=sys.stderr, all_threads=True)
    for number in SIGNALS:
        signal.signal(number, _remember)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


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
        self._previous: dict[int, signal.Handlers | int | object] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, _remember)
        # Python runs a handler between two bytecodes of the main thread, so not while a collective blocks. The
        # descriptor is written by the C handler at once; its reader tells the launcher, which enforces the deadline.
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._read, True)
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._listener = threading.Thread(target=self._listen, name="reclaim", daemon=True)
        self._listener.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # The handlers stay: a second signal during the way out must not kill what the first one asked to save.
        signal.set_wakeup_fd(self._previous_wakeup)
        os.write(self._write, b"\0")
        self._listener.join()
        os.close(self._read)
        os.close(self._write)

    @property
    def interrupted(self) -> bool:
        """Whether a person's Ctrl-C was all that asked to stop."""
        return self._want >= Want.STOP and self._people

    def want(self) -> Want:
        """What this rank has been asked for; cheap enough for every step. A SAVE is answered once, on one rank."""
        while self._seen < len(_received):
            number, moment = _received[self._seen]
            self._seen += 1
            name = signal.Signals(number).name
            self._ask(Want.STOP, name, moment + self.grace_s, person=number == signal.SIGINT)
        if self._runtime is not None:
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

    def _listen(self) -> None:
        while byte := os.read(self._read, 1):
            number = byte[0]
            if number == 0:
                return
            if self._runtime is not None and number in SIGNALS:
                with contextlib.suppress(OSError):
                    post_request(
                        self._runtime,
                        Want.STOP,
                        signal.Signals(number).name,
                        time.monotonic() + self.grace_s,
                        person=number == signal.SIGINT,
                    )


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


def clear_requests(runtime: Path) -> None:
    """Forget every request, before the ranks are started again."""
    for name in (_STOP, _SAVE):
        (runtime / name).unlink(missing_ok=True)
