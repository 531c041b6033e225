"""The background process that writes: how it is started, given work, watched and ended, and how it behaves.

It is torch's (`async_save` in PROCESS mode), one beside each rank. torchrun signals whole process groups, so it
ignores the signals of a reclaim; multiprocessing would then wait for it forever at exit, so it is ended explicitly.
Of torch's private names, those of this process are used in this file alone; `test_private_names.py` says what to do
when they move.
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
from concurrent.futures import Future
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save
from torch.distributed.checkpoint.storage import StorageWriter

from trainer.checkpoint.lease import current_epoch
from trainer.processes import FORWARDED, STACKS

IGNORED = (*FORWARDED, STACKS)
NICENESS = 12  # training first: a fifteenth of a core where training keeps it busy, all of it where not
_ORPHAN_POLL_S = 0.5


# ---------------------------------------------------------------------------------------------------------------------
# In the trainer

_TorchsProcess = executor._AsyncCheckpointProcess


class _Process(_TorchsProcess):
    """torch's process, which prints nothing, ignores signals from its first line on, and exits at once."""

    @staticmethod
    def _checkpointing_subprocess(*arguments: Any) -> None:
        logging.getLogger().addFilter(lambda record: False)  # torch's own; the trainer is told what fails
        _ignore_signals()
        with contextlib.suppress(EOFError, ConnectionError):  # the trainer was killed: nothing is left to do
            _TorchsProcess._checkpointing_subprocess(*arguments)
            for thread in threading.enumerate():  # expired checkpoints are being deleted
                if thread is not threading.main_thread() and not thread.daemon:
                    thread.join()
            os._exit(0)  # the trainer waits, in its grace period: unloading torch would cost it a second


def start(writer: StorageWriter, group: dist.ProcessGroup) -> Future[Any]:
    """Start the process in the background, `writer` being its first request. The future is done when it has served it.

    The process starts with the signals blocked, before it can ignore them: the thread that spawns it inherits the mask
    of this one. The resource tracker comes first, since starting it would unblock signals in that thread.
    """
    executor._AsyncCheckpointProcess = _Process  # type: ignore[misc]
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        future = async_save(
            {},
            storage_writer=writer,
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return cast("Future[Any]", future)


def save(
    state: dict[str, Any], writer: StorageWriter, planner: SavePlanner, stager: AsyncStager, group: dist.ProcessGroup
) -> Future[Any]:
    """Have `state` staged, then written by the process. The future is done when `writer` has finished on all ranks."""
    response = async_save(
        state,
        storage_writer=writer,
        planner=planner,
        process_group=group,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        async_stager=stager,
    )
    return cast("Future[Any]", cast(AsyncSaveResponse, response).upload_completion)


def raise_descriptor_limit() -> None:
    """As many file descriptors as the machine allows, for this process and those it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def alive() -> bool:
    """Whether the process runs; true too while it is still starting."""
    return executor._CHECKPOINT_PROCESS is None or executor._CHECKPOINT_PROCESS._save_process.is_alive()


def end(patience_s: float) -> None:
    """End the process: by a request where it is idle, by SIGKILL after `patience_s`. The next save starts another."""
    handle, executor._CHECKPOINT_PROCESS = executor._CHECKPOINT_PROCESS, None
    # One that hangs in its start has no handle yet.
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

_configured = False


def _ignore_signals() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


def configure_process(run_dir: Path, attempt: int, deadline_s: float) -> None:
    """To be called before each write; does nothing in any other process, and its work once."""
    global _configured
    if _configured or multiprocessing.parent_process() is None:
        return
    _configured = True
    _ignore_signals()
    os.nice(NICENESS)
    torch.set_num_threads(1)
    watch = threading.Thread(
        target=_watch_parent, args=(run_dir, attempt, deadline_s), name="parent watch", daemon=True
    )
    watch.start()


def _watch_parent(run_dir: Path, attempt: int, deadline_s: float) -> None:
    """When the trainer dies: let the present save end, but not past its deadline or the start of the next attempt."""
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
