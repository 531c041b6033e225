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
from pathlib import Path
from typing import Any

from trainer.config.settings import Config
from trainer.machine.gpus import usable_cores
from trainer.machine.nodes import Nodes
from trainer.processes import FORWARDED, die_with_parent
from trainer.reclaim.request import STARTER_PID, STARTER_REPORT


def rank_command(overrides: Sequence[str], accepted: Sequence[str], runtime: Path, attempt: int | None) -> list[str]:
    """What the interpreter of a rank is started with; `attempt` is None on nodes other than the first."""
    return [
        "-m", "trainer", "train", *overrides,
        *(["--accept", ",".join(accepted)] if accepted else []),
        "--runtime", str(runtime),
        *(["--attempt", str(attempt)] if attempt is not None else []),
    ]  # fmt: skip


def start_ranks(
    words: Sequence[str], config: Config, runtime: Path, ranks: int, nodes: Nodes
) -> list[subprocess.Popen[bytes]]:
    """Start this node's ranks as `python WORDS`. Returns their processes by rank; with several nodes torchrun's."""

    def start(words: Sequence[str], **more: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=config.project,
            env=environment(ranks) | {name: str(value) for name, value in more.items()},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a signal to our process group is ours to pass on
        )

    if nodes.count > 1:
        return [start(torchrun_arguments(words, config, runtime, ranks, nodes))]
    (runtime / STARTER_PID).write_text(str(os.getpid()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        alike = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "GROUP_RANK": 0}
    alike |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    alike |= {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}  # the host's name need not resolve
    return [start(["-u", *words], RANK=rank, LOCAL_RANK=rank, **alike) for rank in range(ranks)]


def torchrun_arguments(words: Sequence[str], config: Config, runtime: Path, ranks: int, nodes: Nodes) -> list[str]:
    """Of the interpreter: the torchrun of this node among others, which restarts nothing itself."""
    patience_s = int(max(30, config.reclaim.grace_s)) + 15  # above the largest grace
    return [
        "-m", "trainer.launch.spawn", str(os.getpid()), str(runtime), str(patience_s),
        f"--nnodes={nodes.count}", f"--rdzv-id={config.run_name}{nodes.job and '.' + nodes.job}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={nodes.endpoint}",
        f"--rdzv-conf=is_host={int(nodes.is_first)},read_timeout=300",
        f"--nproc-per-node={ranks}", "--max-restarts=0", *words,
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
