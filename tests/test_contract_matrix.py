"""What a platform sees of a run: {child process, process 1, systemd unit, Slurm job} x {TERM, INT, USR1, KILL, notice,
finished, wrong configuration, crash loop} -> exit code, newest checkpoint, ledger. Always through the rendered
startup/onstart.sh and restart.sh; with ranks that stand in for training, and in some cells with the real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.deployed import Deployed
from tests.slurm_cluster import Cluster, slurm_cluster, until
from tests.systemd_manager import Manager, first_child, systemd_manager
from trainer.checkpoint.commit import complete
from trainer.records import read_records

KILLED = (128 + signal.SIGKILL, 1, 75)  # 1: what unshare makes of it; 75: Slurm warns the tasks before it kills them

# In place of trainer/cli.py: the launcher with ranks that import no torch.
STAND_IN = f"""\
import runpy
import sys

from trainer.launch.supervisor import launch

command = runpy.run_path({str(Path(__file__).parent / "engine/launch/fake_ranks.py")!r})["command"]


def main():
    words = sys.argv[2:]
    if "--help" in words:
        return
    overrides = [word for word in words if "=" in word]
    sys.exit(launch(overrides, gpus=1, command=command))
"""
SETTINGS = ("reclaim.notice=file:going-away", "restart.backoff_s=0.1", "train.steps=1000000", "volume.mount=")
REAL = (
    "data.global_batch=4", "data.micro_batch=2", "data.sequence_length=32", "model.layers=1", "model.width=32",
    "model.heads=2", "train.eval_every_steps=0", "logging.tensorboard=false", "checkpoint.every_steps=25",
)  # fmt: skip


class Project:
    """A rendered project whose checkpoints lie inside it, and what its runs left there."""

    def __init__(self, path: Path, settings: tuple[str, ...]) -> None:
        self.path, self.settings = path, (*settings, f"checkpoint.dir={path}/checkpoints")
        self.run_dir = path / "checkpoints" / "demo"
        self.log = path.parent / "log"
        self.environment = dict(os.environ)

    def behave(self, **fake: Any) -> None:
        """What the ranks that stand in do: see tests/engine/launch/fake_ranks.py."""
        self.environment["FAKE_RANKS"] = json.dumps(fake)

    @property
    def saved(self) -> int:
        return max((found.step for found in complete(self.run_dir)), default=0)

    @property
    def last_line(self) -> int:
        return max((line["step"] for line in read_records(self.run_dir, "metrics")), default=0)

    def ends(self) -> list[tuple[str, int]]:
        return [
            (event["reason"], event["step"])
            for event in read_records(self.run_dir, "ledger")
            if event["event"] == "stopped"
        ]

    def reaches(self, step: int) -> None:
        until(lambda: self.last_line >= step, f"step {step} ({self.log})", 120)


class Started(Protocol):
    """A run that was started: signals reach it as the platform's do."""

    def send(self, number: signal.Signals) -> None: ...

    def code(self) -> int: ...


Engine = Callable[..., Started]  # (project, *words) -> a run that was started


class Process:
    """A child, or process 1 of a PID namespace of its own."""

    def __init__(self, process: subprocess.Popen[bytes], target: int) -> None:
        self.process, self.target = process, target

    def send(self, number: signal.Signals) -> None:
        os.kill(self.target, number)

    def code(self) -> int:
        code = self.process.wait(120)
        return code if code >= 0 else 128 - code


@pytest.fixture
def child() -> Iterator[Engine]:
    yield from _processes([])


@pytest.fixture
def process_1() -> Iterator[Engine]:
    mapped = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    yield from _processes(["unshare", *mapped, "--pid", "--fork", "--mount-proc", "--kill-child"])


def _processes(prefix: list[str]) -> Iterator[Engine]:
    started: list[subprocess.Popen[bytes]] = []

    def start(project: Project, *words: str) -> Process:
        with project.log.open("a") as log:
            process = subprocess.Popen(
                [*prefix, "bash", "startup/onstart.sh", *project.settings, *words],
                cwd=project.path,
                env=project.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        started.append(process)
        return Process(process, first_child(process.pid) if prefix else process.pid)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


class Unit:
    """A systemd service that is not restarted, so that its exit code can be seen."""

    def __init__(self, manager: Manager, name: str) -> None:
        self.manager, self.name = manager, name

    def send(self, number: signal.Signals) -> None:
        self.manager.command("kill", f"--signal={number.name}", "--kill-whom=main", self.name)

    def code(self) -> int:
        shown = self.manager.wait(self.name, "ActiveState", "inactive", "failed", timeout_s=120)
        status = int(shown["ExecMainStatus"])
        return status if shown["ExecMainCode"] == "1" else 128 + status  # 1: exited; 2: killed


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    with systemd_manager(tmp_path_factory.mktemp("systemd")) as found:
        yield found


@pytest.fixture
def systemd_unit(manager: Manager, request: pytest.FixtureRequest) -> Engine:
    def start(project: Project, *words: str) -> Unit:
        name = f"run-{abs(hash(request.node.name))}.service"
        keep = ("PATH", "FAKE_RANKS", "PYTHONPATH")
        lines = [f"Environment='{key}={project.environment[key]}'" for key in keep if key in project.environment]
        text = "\n".join(
            [
                "[Service]",
                "Type=exec",
                f"WorkingDirectory={project.path}",
                f"ExecStart=/bin/bash startup/onstart.sh {' '.join((*project.settings, *words))}",
                f"StandardError=append:{project.log}",
                "KillMode=mixed",
                *lines,
                "[Install]",
                "WantedBy=default.target",
                "",
            ]
        )
        manager.start(name, text)
        return Unit(manager, name)

    return start


class Job:
    """A Slurm job of the rendered deploy/train.sbatch; a signal goes to the batch script, as Slurm's warnings do."""

    def __init__(self, cluster: Cluster, number: str) -> None:
        self.cluster, self.number = cluster, number

    def send(self, number: signal.Signals) -> None:
        where = [] if number == signal.SIGKILL else ["--batch"]  # SIGKILL: to the tasks
        self.cluster.command("scancel", *where, f"--signal={number.name.removeprefix('SIG')}", self.number)

    def code(self) -> int:
        job = self.cluster.wait(self.number, "COMPLETED", "FAILED", "CANCELLED", timeout_s=120)
        exited, killed = job["ExitCode"].split(":")
        return int(exited) or (128 + int(killed) if int(killed) else 0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as found:
        yield found


@pytest.fixture
def slurm_job(cluster: Cluster) -> Engine:
    def start(project: Project, *words: str) -> Job:
        options = ("--no-requeue", f"--output={project.log}", "--export=ALL")
        environment = {**cluster.environment, **project.environment, "SLURM_CONF": cluster.environment["SLURM_CONF"]}
        here = Cluster(cluster.directory, environment)
        job = here.submit("deploy/train.sbatch", *project.settings, *words, cwd=project.path, options=options)
        return Job(cluster, job)

    return start


@pytest.fixture(
    params=[
        "child",
        "process_1",
        pytest.param("systemd_unit", marks=pytest.mark.slow),
        pytest.param("slurm_job", marks=pytest.mark.slow),
    ]
)
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def real_project(deployed: Deployed, tmp_path: Path) -> Project:
    """A rendered project whose environment is that of the tests."""
    path = tmp_path / "demo"
    shutil.copytree(deployed(provider="local"), path, symlinks=True)
    (path / ".venv").symlink_to(sys.prefix)
    (path / "startup/requirements.txt").write_text("# the environment of the tests\n")
    return Project(path, (*SETTINGS, *REAL, "gpu.count=1"))


@pytest.fixture
def project(real_project: Project) -> Project:
    """The same with ranks that stand in."""
    (real_project.path / "trainer/cli.py").write_text(STAND_IN)
    real_project.settings = (*SETTINGS, *real_project.settings[-1:])
    return real_project


SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda one: one.name)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that stand in


@SIGNALS
def test_a_signal_saves_the_step_in_hand_and_exits_75(engine: Engine, project: Project, number: signal.Signals) -> None:
    run = engine(project)
    project.reaches(5)
    run.send(number)
    assert run.code() == 75
    reason = "interrupted" if number == signal.SIGINT and not isinstance(run, Job) else "reclaimed"
    assert project.ends() == [(reason, project.saved)]
    assert project.saved == project.last_line


def test_after_a_kill_the_next_start_carries_on_from_the_newest_checkpoint(engine: Engine, project: Project) -> None:
    run = engine(project, "checkpoint.every_steps=5")
    until(lambda: project.saved >= 10, "a checkpoint", 120)
    run.send(signal.SIGKILL)
    assert run.code() in KILLED
    until(lambda: not _written_to(project), "the end of its ranks")
    saved, last = project.saved, project.last_line
    assert 10 <= saved <= last
    assert engine(project, f"train.steps={last + 5}").code() == 0
    assert project.ends()[-1] == ("finished", last + 5)
    assert [event["step"] for event in read_records(project.run_dir, "ledger") if event["event"] == "attempt_started"][
        -1
    ] == saved


def _written_to(project: Project) -> bool:
    """Whether some process still has the run's ledger open."""
    found = subprocess.run(["sh", "-c", f"ls -l /proc/[0-9]*/fd 2>/dev/null | grep -q '{project.run_dir}/ledger'"])
    return found.returncode == 0


def test_a_notice_saves_and_exits_75(engine: Engine, project: Project) -> None:
    run = engine(project)
    project.reaches(5)
    (project.path / "going-away").touch()
    assert run.code() == 75
    assert project.ends() == [("reclaimed", project.saved)]
    assert project.saved == project.last_line
    (noticed,) = [event for event in read_records(project.run_dir, "ledger") if event["event"] == "reclaim_noticed"]
    assert "going-away" in noticed["source"]


def test_a_finished_run_exits_0_every_time(engine: Engine, project: Project) -> None:
    assert engine(project, "train.steps=5").code() == 0
    assert engine(project, "train.steps=5").code() == 0
    assert project.ends() == [("finished", 5)]
    assert project.saved == 5


def test_a_wrong_configuration_exits_78_with_one_line(engine: Engine, project: Project) -> None:
    assert engine(project, "train.stepz=5").code() == 78
    assert "unknown key 'train.stepz'" in project.log.read_text()
    assert not project.run_dir.exists()


def test_a_crash_loop_ends_with_another_code_and_the_traceback(engine: Engine, project: Project) -> None:
    project.behave(crash_at=3, crash_words="no such tensor")
    assert engine(project).code() not in (0, 75, 78)
    assert "RuntimeError: no such tensor" in project.log.read_text()
    assert {reason for reason, _ in project.ends()} == {"crashed"}


def test_a_process_1_collects_what_dead_ranks_leave(process_1: Engine, project: Project) -> None:
    run = process_1(project)
    project.reaches(5)
    assert isinstance(run, Process)
    orphan = "import os, time; os.fork() or (os.fork() or os._exit(0), os._exit(0))"
    subprocess.run(["nsenter", f"--target={run.target}", "--pid", "--mount", sys.executable, "-c", orphan], check=True)
    until(lambda: "Z" not in _states(run.target), "no zombies", 10)
    run.send(signal.SIGTERM)
    assert run.code() == 75


def _states(parent: int) -> str:
    listed = subprocess.run(["ps", "-o", "stat=", "--ppid", str(parent)], capture_output=True, text=True)
    return listed.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Real ranks: slow, but for SIGTERM and SIGKILL to a child in template/tests/test_interruptions.py


@pytest.mark.slow
@pytest.mark.parametrize("name", ["child", "process_1"])
@SIGNALS
def test_real_ranks_save_the_step_in_hand(
    name: str, number: signal.Signals, real_project: Project, request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(name)
    run = engine(real_project, "--gpus", "2")
    real_project.reaches(10)
    run.send(number)
    assert run.code() == 75
    assert real_project.ends() == [("interrupted" if number == signal.SIGINT else "reclaimed", real_project.saved)]
    assert real_project.saved == real_project.last_line


@pytest.mark.slow
@pytest.mark.parametrize("name", ["child", "process_1", "systemd_unit"])
def test_real_ranks_after_a_kill_on_another_count(
    name: str, real_project: Project, request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(name)
    run = engine(real_project, "--gpus", "2")
    until(lambda: real_project.saved >= 50, "a checkpoint", 120)
    run.send(signal.SIGKILL)
    assert run.code() in KILLED
    until(lambda: not _written_to(real_project), "the end of its ranks")
    last = real_project.last_line
    assert engine(real_project, "--gpus", "1", f"train.steps={last + 5}").code() == 0
    assert real_project.ends()[-1] == ("finished", last + 5)
    hashes: dict[int, set[str]] = {}
    for line in read_records(real_project.run_dir, "metrics"):
        hashes.setdefault(line["step"], set()).add(line["batch_hash"])
    assert all(len(seen) == 1 for seen in hashes.values())


@pytest.mark.slow
def test_real_ranks_at_a_notice(child: Engine, real_project: Project) -> None:
    run = child(real_project, "--gpus", "2")
    real_project.reaches(10)
    (real_project.path / "going-away").touch()
    assert run.code() == 75
    assert real_project.saved == real_project.last_line


@pytest.mark.slow
def test_real_ranks_that_finish(process_1: Engine, real_project: Project) -> None:
    assert process_1(real_project, "train.steps=8").code() == 0
    assert process_1(real_project, "train.steps=8").code() == 0
    assert real_project.ends() == [("finished", 8)]


@pytest.mark.slow
def test_real_ranks_that_crash_at_once(child: Engine, real_project: Project) -> None:
    model = real_project.path / "tasks/language_model/model.py"
    model.write_text(model.read_text() + "\nraise RuntimeError('no such layer')\n")
    assert child(real_project, "--gpus", "2").code() not in (0, 75, 78)
    assert "RuntimeError: no such layer" in real_project.log.read_text()


@pytest.mark.slow
def test_real_ranks_that_refuse_their_configuration(child: Engine, real_project: Project) -> None:
    assert child(real_project, "train.steps=8").code() == 0
    assert child(real_project, "train.steps=9", "model.width=64").code() == 78
    assert "model.width was 32 and is 64" in real_project.log.read_text()


@pytest.mark.slow
@SIGNALS
def test_real_ranks_in_a_slurm_job(slurm_job: Engine, real_project: Project, number: signal.Signals) -> None:
    run = slurm_job(real_project, "--gpus", "2")
    real_project.reaches(10)
    run.send(number)
    assert run.code() == 75
    assert real_project.saved == real_project.last_line
