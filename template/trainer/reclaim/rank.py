"""Signals and requests in a rank: handlers that set a flag, and one look at the requests per step."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from trainer.processes import STACKS, STOP_SIGNALS, die_with_parent
from trainer.reclaim import request as files
from trainer.reclaim.request import Action, Request

_received: list[tuple[int, float]] = []  # (signal number, time.monotonic()); appended to by the handler alone


def _remember(number: int, frame: FrameType | None) -> None:
    _received.append((number, time.monotonic()))


def prepare_rank(runtime: Path | None) -> None:
    """First thing in a rank, before torch is imported: die with the launcher, answer stack dumps, keep early signals.

    A signal that arrives before the first step is kept and honoured once `Reclaim` is there.
    """
    faulthandler.enable()
    faulthandler.register(STACKS, file=sys.stderr, all_threads=True)
    for number in STOP_SIGNALS:
        signal.signal(number, _remember)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if runtime is not None:
        parent = None
        with contextlib.suppress(OSError, ValueError):
            parent = int((runtime / files.STARTER_PID).read_text())
        die_with_parent(parent)
        (runtime / f"{files.LOADING}{os.getpid()}").touch()


def worker_ignore_signals(worker_id: int) -> None:
    """`worker_init_fn` of a DataLoader: the signal that asks their rank to stop does not end them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Reclaim:
    """A rank's view of the requests to save or stop. Use as a context manager in the main thread.

    Args:
        runtime: the launcher's directory of this node; None without a launcher.
        grace_s: seconds from a signal to the platform's SIGKILL.
    """

    def __init__(self, runtime: Path | None, grace_s: float) -> None:
        self.grace_s = grace_s
        self._runtime = runtime
        self._strongest = Action.NOTHING  # of the requests to stop
        self._seen = 0  # signals of _received that were looked at
        self._people = True  # whether every request so far was a Ctrl-C
        self._beats: int | None = None  # descriptor of the beat file
        self._count, self._usual_s, self._before = 0, 0.0, 0.0

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            signal.signal(number, _remember)
        if self._runtime is not None:
            (self._runtime / f"{files.LOADING}{os.getpid()}").touch()
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
        # The handlers stay: a second signal during the exit must not kill what the first one asked to save.
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
        return self._strongest >= Action.STOP and self._people

    def requested(self) -> Action:
        """What this rank has been asked for; called once a step. A SAVE is answered once, on one rank of the node."""
        while self._seen < len(_received):
            number, moment = _received[self._seen]
            self._seen += 1
            self._note(self._of_signal(number, moment))
        if self._runtime is not None:
            self._beat()
            if request := Request.read(self._runtime / files.STOP):
                self._note(request)
            if self._strongest == Action.NOTHING:
                with contextlib.suppress(OSError):
                    (self._runtime / files.SAVE_EARLY).unlink()  # the rank that removes it has the request
                    return Action.SAVE
        return self._strongest

    def _note(self, request: Request) -> None:
        self._people = self._people and request.person
        self._strongest = max(self._strongest, request.action)

    def _beat(self) -> None:
        """Tell the launcher that this rank makes steps."""
        assert self._runtime is not None
        now = time.monotonic()
        if self._beats is None:
            beating = self._runtime / f"{files.BEAT}{os.getpid()}"
            try:
                (self._runtime / f"{files.LOADING}{os.getpid()}").rename(beating)
            except FileNotFoundError:
                while True:  # the launcher has revoked the start: it is killing this process
                    time.sleep(1)
            self._beats = os.open(beating, os.O_WRONLY | os.O_CLOEXEC)
        elif self._count > 1:  # the first steps compile and warm up
            interval = now - self._before
            self._usual_s = interval if not self._usual_s else 0.9 * self._usual_s + 0.1 * interval
        self._count, self._before = self._count + 1, now
        os.pwrite(self._beats, files.BEAT_FORMAT.pack(now, self._usual_s, self._count), 0)

    def _listen(self) -> None:
        while number := os.read(self._read, 1)[0]:
            if number in STOP_SIGNALS:
                self._tell_launcher(number, time.monotonic())

    def _tell_launcher(self, number: int, moment: float) -> None:
        if self._runtime is not None and not (self._runtime / files.SIGNALLED).exists():
            with contextlib.suppress(OSError):
                self._of_signal(number, moment).write(self._runtime / files.SIGNALLED)

    def _of_signal(self, number: int, moment: float) -> Request:
        name, person = signal.Signals(number).name, number == signal.SIGINT
        return Request(Action.STOP, name, moment + self.grace_s, person)
