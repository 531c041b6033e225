"""The fixture `ranks`: run a function of a test file on several real processes, joined like those of torchrun."""

from __future__ import annotations

import faulthandler
import multiprocessing.connection
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer

PATIENCE_S = 300.0  # with a call on all ranks; then their stacks are shown
JOB = "job of this rank"  # a global of this file in a child: what to run
# What the server imports that the ranks are forked from. One that has `prepare_rank()` is called first in each of them.
PRELOADED = ["pytest", "torch._dynamo", "trainer.train"]

torch.set_num_threads(1)  # tests share the cores with their ranks, and a forked rank must not inherit a pool


def _be_a_rank(
    rank: int,
    size: int,
    port: int,
    file: str,
    function: str,
    arguments: tuple[Any, ...],
    out: Path,
    preloaded: Sequence[str],
) -> None:
    for name in preloaded:
        if hasattr(sys.modules.get(name), "prepare_rank"):
            sys.modules[name].prepare_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CPU ranks, also where there are GPUs
    stacks = (out / f"{rank}.stacks").open("w")
    faulthandler.dump_traceback_later(PATIENCE_S - 10, file=stacks)
    try:
        result = runpy.run_path(file)[function](*arguments)
    except BaseException:
        (out / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    torch.save(result, out / f"{rank}.pt")
    os._exit(0)


if JOB in globals():
    _be_a_rank(*globals()[JOB])


def server() -> ForkServerContext:
    """Starts processes by forking one that has imported torch and done nothing else: they cost milliseconds."""
    project = str(Path(trainer.__file__).resolve().parents[1])
    if project not in os.environ.get("PYTHONPATH", ""):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (project, os.environ.get("PYTHONPATH"))))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """`ranks(size, function, *arguments)` calls a module-level function on `size` processes.

    Returns:
        What the function returned, by rank.
    """
    context = server()
    started: list[Process] = []

    def run(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        out = tmp_path_factory.mktemp("ranks")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        file = function.__code__.co_filename
        mine = []
        for rank in range(size):
            job = (rank, size, port, file, function.__name__, arguments, out, PRELOADED)
            process = context.Process(target=runpy.run_path, args=(__file__, {JOB: job}, "rank"))
            process.start()
            mine.append(process)
        started.extend(mine)
        _wait(mine)
        errors = [path.read_text() for path in sorted(out.glob("*.error")) or sorted(out.glob("*.stacks"))]
        errors = [error for error in errors if error]
        assert not errors, "\n".join(errors)
        assert [process.exitcode for process in mine] == [0] * size
        return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(size)]

    yield run
    _end(started)


def _wait(processes: Sequence[Process]) -> None:
    """Until all have ended, or one has failed: then its peers wait for it in a collective, and are killed."""
    deadline = time.monotonic() + PATIENCE_S
    while alive := [process for process in processes if process.exitcode is None]:
        multiprocessing.connection.wait([one.sentinel for one in alive], max(0.0, deadline - time.monotonic()))
        if any(process.exitcode for process in processes) or time.monotonic() >= deadline:
            _end(processes)


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
