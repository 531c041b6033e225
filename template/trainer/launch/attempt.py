"""The command line and the environment that the ranks of a node are started with."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.machine.gpus import Ranks
from trainer.machine.nodes import Nodes


@dataclass(frozen=True)
class Start:
    """What the ranks of this node are started with; `attempt` is None on nodes other than the first."""

    runtime: Path
    attempt: int | None
    ranks: int
    nodes: Nodes
    run_name: str
    shutdown_s: int
    overrides: Sequence[str]
    accepted: Sequence[str]


def torchrun_command(start: Start) -> list[str]:
    """torchrun (or what stands for it on one node) and the ranks' own command line; it restarts nothing itself."""
    nodes = start.nodes
    rendezvous = [f"--nnodes={nodes.count}", f"--rdzv-id={start.run_name}{nodes.job and '.' + nodes.job}"]
    if nodes.count > 1:
        host = int(nodes.is_first)
        rendezvous += [f"--rdzv-endpoint={nodes.endpoint}", f"--rdzv-conf=is_host={host},read_timeout=300"]
    return [
        sys.executable, "-m", "trainer.launch.spawn", str(os.getpid()), str(start.runtime), str(start.shutdown_s),
        *rendezvous, "--rdzv-backend=c10d", f"--nproc-per-node={start.ranks}", "--max-restarts=0",
        "-m", "trainer", "train", *start.overrides,
        *(["--accept", ",".join(start.accepted)] if start.accepted else []),
        "--runtime", str(start.runtime),
        *(["--attempt", str(start.attempt)] if start.attempt is not None else []),
    ]  # fmt: skip


def rank_environment(ranks: Ranks, nodes: Nodes, cores: int) -> dict[str, str]:
    """The environment of torchrun and the ranks; what the user has set stays."""
    ours = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks.count)),
        # Else workers of a restart read the addresses of dead ones from the store that they share with torchrun.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "LOGLEVEL": "ERROR",  # torchrun's; its reports of failed ranks are made into one here
    }
    if nodes.count == 1:
        ours["GLOO_SOCKET_IFNAME"] = "lo"  # the name of the host need not resolve
    return ours | os.environ
