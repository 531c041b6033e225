"""A real Slurm cluster of two nodes on this machine, for tests: free ports, no munge, nothing left behind.

    with slurm_cluster(tmp_path / "slurm") as cluster:
        job = cluster.submit("deploy/train.sbatch", cwd=project)
        cluster.wait(job, "COMPLETED")

Needs root and Debian's `slurm-wlm`. Two partitions: `low` (the default; its jobs are requeued when `high` wants the
nodes, with a warning and 15 s of grace) and `high`. Both nodes pretend to have GPUs, which no job may touch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
KillWait=5
SlurmdTimeout=15
MpiDefault=none
SwitchType=switch/none
GresTypes=gpu
SlurmctldPort={ports[0]}
SlurmctldPidFile={directory}/ctld.pid
SlurmdPidFile={directory}/d-%n.pid
SlurmctldLogFile={directory}/ctld.log
SlurmdLogFile={directory}/d-%n.log
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000 Gres=gpu:{gpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000 Gres=gpu:{gpus}
PartitionName=low  Nodes=n1,n2 Default=YES MaxTime=INFINITE PriorityTier=1  PreemptMode=REQUEUE GraceTime=15
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Wait for `condition()`; AssertionError naming `what` when it has not come true within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:.0f} s"
        time.sleep(0.1)


@dataclass(frozen=True)
class Cluster:
    """A running cluster. `environment` is what every Slurm command needs."""

    directory: Path
    environment: dict[str, str]

    def command(self, *words: str | Path, cwd: Path | None = None) -> str:
        """Standard output of a Slurm command; AssertionError with its words when it fails."""
        done = subprocess.run(
            [str(word) for word in words], env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str | Path, *arguments: str, cwd: Path, options: tuple[str, ...] = ()) -> str:
        """Job id of `sbatch OPTIONS SCRIPT ARGUMENTS`, run in `cwd`."""
        return self.command("sbatch", "--parsable", *options, script, *arguments, cwd=cwd).strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, ExitCode ("75:0"), Reason and the rest."""
        words = self.command("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, *states: str, timeout_s: float = 60.0) -> dict[str, str]:
        """The job once it is in one of `states`."""
        try:
            until(lambda: self.job(job)["JobState"] in states, f"job {job} in {states}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.job(job)}") from None
        return self.job(job)

    def start_now(self, job: str) -> None:
        """Have a requeued job start without waiting for its credential to expire."""
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now")


@contextlib.contextmanager
def slurm_cluster(directory: Path, *, requeue_exit: int | None = None, gpus: int = 8) -> Iterator[Cluster]:
    """Start controller and two node daemons below `directory`; stop everything, jobs included, at the end.

    Args:
        requeue_exit: the exit code that slurm.conf requeues by itself; None: none, as on a cluster out of the box.
        gpus: how many GPUs each node pretends to have.
    """
    assert os.geteuid() == 0 and shutil.which("slurmctld"), "needs root and Debian's package slurm-wlm"
    directory.mkdir(parents=True)
    for name in ("state", "spool-n1", "spool-n2"):
        (directory / name).mkdir()
    text = CONFIGURATION.format(directory=directory, ports=_free_ports(3), host=socket.gethostname(), gpus=gpus)
    if requeue_exit is not None:
        text += f"RequeueExit={requeue_exit}\n"
    (directory / "slurm.conf").write_text(text)
    for gpu in range(gpus):
        (directory / f"gpu{gpu}").touch()
    (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu[0-{gpus - 1}]\n")
    environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
    cluster = Cluster(directory, environment)
    try:
        for words in (["slurmctld", "-i"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"]):
            subprocess.run(words, env=environment, check=True, timeout=30, stdout=subprocess.DEVNULL)
        until(lambda: _idle_nodes(environment) == 2, f"two idle nodes (see {directory}/ctld.log)")
        yield cluster
    finally:
        _reap(directory)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _idle_nodes(environment: dict[str, str]) -> int:
    words = ["sinfo", "--noheader", "--Node", "--partition=low", "--states=idle"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30)
    return len(done.stdout.splitlines()) if done.returncode == 0 else 0


def _reap(directory: Path) -> None:
    """Kill every process of this cluster, which all carry its SLURM_CONF, until there is none left."""

    def processes() -> list[int]:
        mark = f"SLURM_CONF={directory}/slurm.conf".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != os.getpid()]

    def kill_all() -> bool:
        for pid in processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not processes()

    until(kill_all, "the end of all of Slurm's processes", 30)
