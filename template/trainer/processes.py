"""Processes and signals of this node, on Linux: ending with a parent, collecting orphans, seeing who is alive."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Collection
from pathlib import Path

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # a request to stop, to the launcher or to a rank
# What torchrun forwards to the ranks. Unless told it leaves SIGUSR1 out, which would end it and make them orphans.
FORWARDED = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)
STACKS = signal.SIGUSR2  # a rank that receives it writes the stacks of all its threads to stderr

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)

waited_for = threading.Lock()  # held while another thread waits for a child of its own, which `reap` must leave alone


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the one that started it dies.

    Args:
        parent: its process id, where known: ends at once when it is gone already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies, as process 1 is anyway; `reap` collects them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap(spared: Collection[int] = ()) -> bool:
    """Collect children that have ended, except `spared`. Returns whether there may be other children left."""
    if not waited_for.acquire(blocking=False):
        return True
    try:
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in spared:
                return True
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        return False
    finally:
        waited_for.release()


def alive(pid: int) -> bool:
    """Whether the process exists and has not ended, waiting to be collected."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"
