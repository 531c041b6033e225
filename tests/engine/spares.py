"""Processes that have imported torch already, for what a rank starts by `spawn`: its checkpoint process, nearly always.

A spawned Python takes 2.5 s of a core to import torch, in nearly every test that trains or saves. Here each rank forks
a few processes before it does anything else. `spawn` then hands its command line, environment and descriptors to one of
them instead of to a new Python: it is the rank's child as before, and knows as little of the rank as before. Tests that
start launchers, and those of limits that a process is started with, spawn for real.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing.util
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from ranks import server

_LARGEST_MESSAGE = 1 << 17
_spares: list[tuple[int, socket.socket]] = []
_spawn = multiprocessing.util.spawnv_passfds


def prepare_rank(spares: int = 2) -> None:
    """In a rank, before it has threads and process groups. What it spawns after as many `spares` is real."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # as where the engine spawns
    for _ in range(spares):
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rank = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_a_spare(its, rank)
        its.close()
        _spares.append((pid, ours))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    multiprocessing.util.spawnv_passfds = _hand_over  # type: ignore[assignment]


def _hand_over(path: Any, words: Iterable[Any], descriptors: Iterable[int]) -> int:
    """In place of `multiprocessing.util.spawnv_passfds`. Returns the process id."""
    words, descriptors = list(words), sorted(set(map(int, descriptors)))
    if not _spares or "--multiprocessing-fork" not in words:
        return _spawn(path, words, descriptors)
    pid, channel = _spares.pop()
    with channel:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        message = pickle.dumps((words, dict(os.environ), str(Path.cwd()), descriptors, mask))
        socket.send_fds(channel, [message], descriptors)
    return pid


def _be_a_spare(channel: socket.socket, rank: int) -> None:
    """Wait for work, do it, and end."""
    code = 1
    try:
        high = fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD, 500)
        channel.detach()
        os.closerange(3, high)
        os.closerange(high + 1, high + 500)
        with socket.socket(fileno=high) as channel:
            while not select.select([channel], [], [], 1.0)[0]:
                if os.getppid() != rank:
                    os._exit(0)
            message, received, _, _ = socket.recv_fds(channel, _LARGEST_MESSAGE, 100)
        if not message:  # the rank has ended
            os._exit(0)
        words, environment, folder, descriptors, mask = pickle.loads(message)
        moved = [fcntl.fcntl(one, fcntl.F_DUPFD, 500) for one in received]
        os.closerange(3, 500)
        for one, number in zip(moved, descriptors, strict=True):
            os.dup2(one, number)
            os.close(one)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = ["-c", "--multiprocessing-fork"]
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with contextlib.suppress(KeyboardInterrupt):
            exec(words[words.index("-c") + 1], {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


# ---------------------------------------------------------------------------------------------------------------------
# Scripts


class Script:
    """What `subprocess.Popen` gives for `python FILE WORD...` in a session of its own, without the import of torch."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        ours, its = os.pipe()
        self.stdout = os.fdopen(ours)
        with contextlib.closing(os.fdopen(its)):
            context = server()
            self._process = context.Process(target=_run_script, args=(_Later(its), list(words), dict(env)))
            self._process.start()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        with self.stdout:
            return self.stdout.read(), None


class _Later:
    """A descriptor that goes along where the process is started."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> Any:
        return _detach, (DupFd(self.descriptor),)


def _detach(sent: Any) -> int:
    return int(sent.detach())


def _run_script(out: int, words: Sequence[str], env: Mapping[str, str]) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(out, stream)
    os.close(out)
    prepare_rank(spares=16)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")
