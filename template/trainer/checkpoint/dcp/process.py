"""The background process that writes: how it is started, watched and ended, and how it behaves once it runs.

It is torch's (`async_save` in PROCESS mode), one beside each rank. torchrun signals whole process groups, so it
ignores the signals of a reclaim; multiprocessing would then wait for it for ever at exit, so it is ended explicitly.
Of torch's private names, those of this process are used in this file alone; `tests/test_checkpoint_torch.py` says what
to do when they move.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import _async_process_executor as executor

from trainer.checkpoint.lease import current_epoch
from trainer.processes import FORWARDED, STACKS

log = logging.getLogger(__name__)

IGNORED = (*FORWARDED, STACKS)
NICENESS = 12  # training first: a fifteenth of a core where training keeps it busy, all of it where not
_ORPHAN_POLL_S = 0.5


# ---------------------------------------------------------------------------------------------------------------------
# In the trainer


_TorchsProcess = executor._AsyncCheckpointProcess


class _Process(_TorchsProcess):
    """torch's process, which is silent, deaf to signals from its first line on, and quick to leave."""

    @staticmethod
    def _checkpointing_subprocess(*arguments: Any) -> None:
        logging.getLogger().addFilter(lambda record: False)  # torch's own; what fails is told to the trainer
        _ignore_signals()
        with contextlib.suppress(EOFError, ConnectionError):  # the trainer was killed: nobody to serve or to tell
            _TorchsProcess._checkpointing_subprocess(*arguments)
            for thread in threading.enumerate():  # what was pruned is being deleted
                if thread is not threading.main_thread() and not thread.daemon:
                    thread.join()
            os._exit(0)  # the trainer waits, in its grace period: taking torch apart would cost it a second


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around the `async_save` that starts the process: it is born with the signals blocked, before it can ignore them.

    The thread that spawns it inherits the mask of this one. The resource tracker comes first: starting it would
    unblock signals in that thread.
    """
    executor._AsyncCheckpointProcess = _Process  # type: ignore[misc]
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def raise_descriptor_limit() -> None:
    """As many file descriptors as the machine allows, for this process and those it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def alive() -> bool:
    """Whether the process runs; true too while it is still starting."""
    return executor._CHECKPOINT_PROCESS is None or executor._CHECKPOINT_PROCESS._save_process.is_alive()


def pid() -> int | None:
    """Its process id, once it has started."""
    return executor._CHECKPOINT_PROCESS._save_process.pid if executor._CHECKPOINT_PROCESS is not None else None


def end(patience_s: float) -> None:
    """End the process: by asking where it is idle, by SIGKILL after `patience_s`. The next save starts another one."""
    handle, executor._CHECKPOINT_PROCESS = executor._CHECKPOINT_PROCESS, None
    # One that is stuck in its start has no handle yet.
    children = [child for child in multiprocessing.active_children() if isinstance(child, SpawnProcess)]
    processes = [handle._save_process] if handle is not None else children
    if handle is not None and patience_s > 0:
        with contextlib.suppress(OSError, ValueError):
            handle._send(executor._CheckpointSaveProcessControlOpts.TERMINATE)
        handle._save_process.join(patience_s)
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join(5.0)


# ---------------------------------------------------------------------------------------------------------------------
# In the process itself

_settled = False


def _ignore_signals() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


def settle_in(run_dir: Path, attempt: int, deadline_s: float) -> None:
    """Called by the writer before it writes; does nothing in any other process, and its work once."""
    global _settled
    if _settled or multiprocessing.parent_process() is None:
        return
    _settled = True
    _ignore_signals()
    os.nice(NICENESS)
    torch.set_num_threads(1)
    threading.Thread(target=_outlive, args=(run_dir, attempt, deadline_s), name="parent watch", daemon=True).start()


def _outlive(run_dir: Path, attempt: int, deadline_s: float) -> None:
    """When the trainer dies: let the save in hand end, but not past its deadline or the start of the next attempt."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.pid == os.getppid():
        multiprocessing.connection.wait([parent.sentinel], timeout=1.0)
        time.sleep(0.01)  # the sentinel fires before the kernel has given this process a new parent
    give_up = time.monotonic() + deadline_s
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError):
            if current_epoch(run_dir) > attempt:
                break
        time.sleep(_ORPHAN_POLL_S)
    os._exit(1)
