"""Starts the ranks of one node and writes down how they ended; dies with the launcher, and the ranks with it.

`python -m trainer.torchrun LAUNCHER_PID RUNTIME SECONDS [torchrun's arguments]`; SECONDS pass between a signal that it
hands on to the ranks and their SIGKILL. With several nodes it is torchrun. On one node there is nothing to agree on
with others, so it does the same without importing torch: the ranks import it at once instead of after torchrun has.
Its exit code means nothing: torchrun's is 1 for a reclaim, a crash and a wrong configuration alike.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.processes import FORWARDED, die_with_parent

REPORT = "torchrun.json"
PARENT = "torchrun.pid"  # so that a rank knows whether its parent is still the one that started it
LINGER_S = 10.0  # for the other ranks, once one has failed
LEAVE_S = 120.0  # once one has ended well: all do so after the same step


def main() -> int:
    parent, runtime, seconds, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    (Path(runtime) / PARENT).write_text(str(os.getpid()))
    if "--nnodes=1" in arguments:
        ranks = next(int(word.partition("=")[2]) for word in arguments if word.startswith("--nproc-per-node="))
        report = run_ranks(ranks, arguments[arguments.index("-m") :], float(seconds))
    else:
        report = run_torchrun(arguments, seconds)
    if report:
        (Path(runtime) / REPORT).write_text(json.dumps(report))
    return int(bool(report))


def run_torchrun(arguments: list[str], seconds: str) -> dict[str, Any]:
    """The ranks of this node among those of others. Returns what went wrong: failures, signal or error."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

    names = ",".join(number.name for number in FORWARDED)
    for name, option in (
        ("shutdown_timeout", f"--shutdown-timeout={seconds}"),
        ("signals_to_handle", f"--signals-to-handle={names}"),
    ):
        if name in LaunchConfig.__dataclass_fields__:  # older versions know neither
            arguments.insert(0, option)
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        return {"failures": {rank: failure.exitcode for rank, failure in error.failures.items()}}
    except SignalException as error:
        return {"signal": int(error.sigval)}
    except Exception as error:  # the rendezvous: nodes that do not come, an address that does not answer
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def run_ranks(ranks: int, words: Sequence[str], seconds: float) -> dict[str, Any]:
    """All ranks of a run on one node, in the environment that torchrun gives. Returns what went wrong."""
    received: list[signal.Signals] = []
    awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    for number in FORWARDED:
        signal.signal(number, note)
    processes = [_start(rank, ranks, port, words) for port in [_free_port()] for rank in range(ranks)]
    descriptors = {os.pidfd_open(process.pid): process for process in processes}
    handed_on, kill_at = 0, float("inf")
    failures: dict[int, int] = {}
    while descriptors:
        pause = None if kill_at == float("inf") else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select([awake, *descriptors], [], [], pause)
        if awake in ready:
            os.read(awake, 4096)
        for descriptor in set(ready) & descriptors.keys():
            process = descriptors.pop(descriptor)
            os.close(descriptor)
            if code := process.wait():
                failures[processes.index(process)] = code
            kill_at = min(kill_at, time.monotonic() + (LINGER_S if code else LEAVE_S))
        for request in received[handed_on:]:
            handed_on += 1
            kill_at = min(kill_at, time.monotonic() + seconds)
            for process in descriptors.values():
                process.send_signal(request)
        if time.monotonic() >= kill_at:
            for process in descriptors.values():
                process.kill()
            kill_at = float("inf")
    report: dict[str, Any] = {"failures": failures} if failures else {}
    return report | ({"signal": received[0]} if received else {})


def _start(rank: int, ranks: int, port: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen([sys.executable, "-u", *words], env=environment, start_new_session=True)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main())
