"""Which node of the run this machine is, from the platform's environment or the startup config."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config.settings import NodesConfig
from trainer.outcome import ConfigError


@dataclass(frozen=True)
class Nodes:
    """This machine's place among the nodes of the run.

    `rank` is None where nothing says it; `endpoint` (HOST:PORT of node 0) and `job` are empty for one node.
    """

    count: int
    rank: int | None
    endpoint: str
    job: str  # what tells this start's nodes from those of an earlier one
    source: str

    @property
    def is_first(self) -> bool:
        """Whether this is node 0, which holds the run's lease."""
        return self.rank == 0 if self.rank is not None else _is_local(self.endpoint.rpartition(":")[0])


# What a platform calls: the number of nodes, this one's rank, the addresses of all or of the first, and the job.
_PLATFORMS = {
    "Slurm": ("SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"),
    "SkyPilot": ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_TASK_ID"),
    "dstack": ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP", "DSTACK_RUN_ID"),
    "Kubeflow": ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", ""),
}


def find_nodes(settings: NodesConfig, environment: Mapping[str, str] = os.environ, hostname: str = "") -> Nodes:
    """Number of nodes, this one's rank and the rendezvous, from the platform's environment or the startup config.

    Known platforms: Slurm (inside `srun`), SkyPilot, dstack, Kubernetes Indexed Jobs, Kubeflow (`PET_*`), and plain
    `MASTER_ADDR`, `NODE_RANK`, `NNODES`. `nodes.rendezvous` wins over the platform's address.

    Raises:
        ConfigError: more than one node and no address of the first.
    """
    env = environment
    count, rank, master, job, source = settings.count, None, "", "", "the startup config"
    for platform, (number, own_rank, addresses, job_id) in _PLATFORMS.items():
        if number in env:
            source, job, master = platform, env.get(job_id, ""), first_host(env.get(addresses, ""))
            count, rank = _whole(number, env[number].split(":")[-1]), _whole(own_rank, env.get(own_rank, "0"))
            break
    else:
        if "JOB_COMPLETION_INDEX" in env:
            source, rank = "Kubernetes", _whole("JOB_COMPLETION_INDEX", env["JOB_COMPLETION_INDEX"])
            hostname = hostname or socket.gethostname()  # NAME-INDEX, and NAME's service gives the pods their names
            job_name = hostname.removesuffix(f"-{rank}")
            master = f"{job_name}-0.{job_name}"
        elif "MASTER_ADDR" in env:
            source, count = "MASTER_ADDR", _whole("NNODES", env.get("NNODES", str(count)))
    if source == "Slurm":
        job += f".{env.get('SLURM_RESTART_COUNT', '0')}"
        master = master or first_host(env.get("SLURM_JOB_NODELIST", ""))
    for name in ("NODE_RANK", "GROUP_RANK"):
        if rank is None and env.get(name, "").isdigit():
            rank = int(env[name])
    if count == 1:
        return Nodes(1, 0, "", "", source)
    endpoint = settings.rendezvous or env.get("MASTER_ADDR", "") or master
    if not endpoint:
        raise ConfigError(
            f"nodes.count is {count} and nothing says where node 0 is; set nodes.rendezvous=HOST:PORT, or start "
            f"through Slurm's srun, SkyPilot, dstack, Kubernetes, or with MASTER_ADDR and NODE_RANK"
        )
    if not re.search(r":\d+$", endpoint):
        endpoint += f":{_whole('MASTER_PORT', env.get('MASTER_PORT', str(settings.port)))}"
    if not 0 < int(endpoint.rpartition(":")[2]) < 65536:
        raise ConfigError(f"the rendezvous of the nodes is {endpoint!r}; its port must be from 1 to 65535")
    return Nodes(count, rank, endpoint, job, source)


def _whole(name: str, text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"the environment has {name}={text!r}; it must be a whole number")
    return int(text)


def first_host(nodes: str) -> str:
    """The first of a list of addresses, or of a Slurm node list: `n[03-07,9],m2` is `n03`."""
    bracket = re.match(r"([^,\[]*)\[([^\]]*)\]([^,]*)", nodes)
    if bracket:
        return bracket[1] + re.split(r"[-,]", bracket[2])[0] + bracket[3]
    return re.split(r"[,\s]", nodes.strip())[0]


def _is_local(host: str) -> bool:
    """Whether `host` is an address of this machine: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return host == socket.gethostname()
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False
