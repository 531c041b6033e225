"""Signals and notices that come to the launcher, and wake it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import deque
from types import FrameType, TracebackType
from typing import Self

from trainer.processes import STOP_SIGNALS
from trainer.reclaim.request import Action, Request


class Stopped(BaseException):
    """A request to stop came while no rank was running: there is nothing to save."""


class Inbox:
    """Collects signals and notices, and wakes the supervisor. Use as a context manager in the main thread.

    While `idle`, a signal raises `Stopped`; else it waits to be taken.
    """

    def __init__(self) -> None:
        self.idle = True
        self.grace_s = 0.0
        self._requests: deque[Request] = deque()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        numbers = [*STOP_SIGNALS]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a terminal that goes away; not under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # restart.sh blocks them until now
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # What has been decided is not undone by a signal during the exit, where Python drops its handlers.
        self.idle = False
        for number in (*STOP_SIGNALS, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name, person = signal.Signals(number).name, number == signal.SIGINT
        at_terminal = person and os.isatty(0)  # Ctrl-C: no platform kills afterwards
        deadline = None if at_terminal else time.monotonic() + self.grace_s
        self._requests.append(Request(Action.STOP, name, deadline, person))
        if self.idle:
            raise Stopped(name)

    def post(self, request: Request) -> None:
        """Hand in a request from another thread."""
        self._requests.append(request)
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def take(self) -> list[Request]:
        taken = []
        while self._requests:
            taken.append(self._requests.popleft())
        return taken

    def wait(self, seconds: float, *descriptors: int) -> None:
        """Until something has come, one of `descriptors` is readable, or the time is up."""
        if self._requests:
            return
        ready, _, _ = select.select([self._read, *descriptors], [], [], max(0.0, seconds))
        if self._read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, 4096)
