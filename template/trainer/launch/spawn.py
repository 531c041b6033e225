"""Starts the ranks of this node: itself where it is the only one, else through torchrun.

With one node there is nothing to agree on with others, so the ranks are the launcher's own children and import torch
at once, instead of after a torchrun has. That saves a fifth of a restart: from `launch` to the first step of one rank
of a tiny model 23.9 s instead of 29.6 s, and 4.2 CPU seconds instead of 5.2 (medians of 9 on 2 busy cores).

`python -m trainer.launch.spawn LAUNCHER_PID RUNTIME SECONDS [torchrun's arguments]` is that torchrun. It dies with the
launcher, and the ranks with it; SECONDS pass between a signal that it forwards to the ranks and their SIGKILL. It
writes down how they ended, since its exit code means nothing: 1 for a reclaim, a crash and a wrong configuration alike.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.settings import Config
from trainer.machine.gpus import Ranks, usable_cores
from trainer.machine.nodes import Nodes
from trainer.processes import FORWARDED, die_with_parent
from trainer.reclaim.request import STARTER_PID, STARTER_REPORT


@dataclass(frozen=True)
class StartSpec:
    """What the ranks of this node are started with; `attempt` is None on nodes other than the first."""

    config: Config
    runtime: Path
    ranks: Ranks
    nodes: Nodes
    overrides: Sequence[str] = ()
    accepted: Sequence[str] = ()
    attempt: int | None = None


def rank_command(start: StartSpec) -> list[str]:
    """The command line of a rank, without the interpreter."""
    return [
        "-m", "trainer", "train", *start.overrides,
        *(["--accept", ",".join(start.accepted)] if start.accepted else []),
        "--runtime", str(start.runtime),
        *(["--attempt", str(start.attempt)] if start.attempt is not None else []),
    ]  # fmt: skip


def start_ranks(start: StartSpec, words: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of this node as `python WORDS`. Returns their processes by rank; with several nodes torchrun."""
    if start.nodes.count > 1:
        return [_popen(start, torchrun_arguments(start, words), {})]
    (start.runtime / STARTER_PID).write_text(str(os.getpid()))
    ranks = start.ranks.count
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alike: dict[str, Any] = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    alike |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    alike |= {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}  # the host's name need not resolve
    return [_popen(start, ["-u", *words], alike | {"RANK": rank, "LOCAL_RANK": rank}) for rank in range(ranks)]


def torchrun_arguments(start: StartSpec, words: Sequence[str]) -> list[str]:
    """Of the interpreter: the torchrun of this node among others, which restarts nothing itself."""
    nodes = start.nodes
    patience_s = int(max(30, start.config.reclaim.grace_s)) + 15  # above the largest grace
    return [
        "-m", "trainer.launch.spawn", str(os.getpid()), str(start.runtime), str(patience_s),
        f"--nnodes={nodes.count}", f"--rdzv-id={start.config.run_name}{nodes.job and '.' + nodes.job}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={nodes.endpoint}",
        f"--rdzv-conf=is_host={int(nodes.is_first)},read_timeout=300",
        f"--nproc-per-node={start.ranks.count}", "--max-restarts=0", *words,
    ]  # fmt: skip


def environment(ranks: int) -> dict[str, str]:
    """The environment of torchrun and the ranks; what the user has set stays."""
    ours = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        # Else workers of a restart read the addresses of dead ones from the store that they share with torchrun.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "LOGLEVEL": "ERROR",  # torchrun's; its reports of failed ranks are made into one by the launcher
    }
    return ours | os.environ


def _popen(start: StartSpec, arguments: Sequence[str], more: dict[str, Any]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=start.config.project,
        env=environment(start.ranks.count) | {name: str(value) for name, value in more.items()},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a signal to our process group is ours to pass on
    )


def main() -> int:
    """Be torchrun. Writes what went wrong: `failures` (exit code by rank), `signal` it received, or `error`."""
    parent, runtime, seconds, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    (Path(runtime) / STARTER_PID).write_text(str(os.getpid()))
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
        return 0
    except ChildFailedError as error:
        report: dict[str, Any] = {"failures": {rank: failure.exitcode for rank, failure in error.failures.items()}}
    except SignalException as error:
        report = {"signal": int(error.sigval)}
    except Exception as error:  # the rendezvous: nodes that do not come, an address that does not answer
        report = {"error": f"{type(error).__name__}: {error}"}
    (Path(runtime) / STARTER_REPORT).write_text(json.dumps(report))
    return 1


if __name__ == "__main__":
    sys.exit(main())
