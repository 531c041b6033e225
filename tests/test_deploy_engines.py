"""The deploy files on the real thing: Slurm, systemd, cloud-init, process 1, runc, and each format's own validator.

Every validator is also given a file that it must refuse. Needs root, the packages that .ci/run installs, and the
validators in a virtual environment of their own: $DEPLOY_VALIDATORS, or .venv/validators, as .ci/run makes it.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployed import Deployed, fake_project
from tests.slurm_cluster import Cluster, slurm_cluster, until
from tests.systemd_manager import first_child, systemd_manager
from trainer.records import read_records

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
VALIDATORS = Path(os.environ.get("DEPLOY_VALIDATORS", ROOT / ".venv/validators"))


def run(*words: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture
def deploy(deployed: Deployed, tmp_path: Path) -> Path:
    """A copy of deploy/, of two nodes on AWS, that a test may change."""
    return Path(shutil.copytree(deployed(provider="aws", nodes=2) / "deploy", tmp_path / "deploy"))


# ---------------------------------------------------------------------------------------------------------------------
# Validators

DSTACK = """\
import sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))
"""

CHECKS = {
    # format: the file, the validator, and what to replace by what so that it must be refused
    "kubernetes": ("k8s/job.yaml", ["bin/kubernetes-validate", "--strict"], "completions: 2", "completion: 2"),
    "kubernetes service": ("k8s/service.yaml", ["bin/kubernetes-validate", "--strict"], "port: 29400", "port: '29400'"),
    "kubernetes volume": ("k8s/volume.yaml", ["bin/kubernetes-validate", "--strict"], "accessModes", "accessMode"),
    "cloudformation": ("aws-launch-template.yaml", ["bin/cfn-lint"], "MarketType: spot", "MarketType: spots"),
    "compose": (
        "compose.yaml",
        ["bin/check-jsonschema", "--builtin-schema", "vendor.compose-spec"],
        "stop_grace_period",
        "stop_grace",
    ),
    "dockerfile": ("Dockerfile", ["bin/hadolint"], ":2.13.0", ""),
    "dstack": ("train.dstack.yml", ["bin/python", "-c", DSTACK], "interruption]", "interrupted]"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_formats_own_validator_accepts_it_and_refuses_a_wrong_one(name: str, deploy: Path) -> None:
    file, (program, *options), right, wrong = CHECKS[name]
    assert (VALIDATORS / program).exists(), f"{VALIDATORS} is not there: build it as .ci/run does"
    path = deploy / file
    done = run(VALIDATORS / program, *options, path)
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text()
    assert right in text
    path.write_text(re.sub(re.escape(right) + r"\S*" if not wrong else re.escape(right), wrong, text))
    done = run(VALIDATORS / program, *options, path)
    assert done.returncode != 0, f"{program} lets {wrong!r} pass"


def test_the_vast_template_is_what_its_own_client_would_send(deploy: Path) -> None:
    template = json.loads((deploy / "vast.json").read_text())
    received: list[dict[str, Any]] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def answer(self, body: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self) -> None:
            self.answer({"id": 1})

        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.answer({"success": True, "template": {}})

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = ["--name", template["name"], "--image", template["image"], "--image_tag", template["tag"]]
        words += ["--env", template["env"], "--onstart-cmd", template["onstart"], "--desc", template["desc"]]
        words += ["--readme", template["readme"], "--disk_space", template["recommended_disk_space"]]
        words += ["--ssh", "--direct", "--url", f"http://127.0.0.1:{server.server_port}", "--api-key", "none"]
        done = run(VALIDATORS / "bin/vastai", "create", "template", *map(str, words))
        server.shutdown()
    assert len(received) == 1, done.stdout + done.stderr
    (sent,) = received
    login = {"docker_login_repo", "docker_login_user", "docker_login_pass"}
    assert template.keys() - login <= sent.keys()
    for key in template.keys() - login - {"extra_filters", "recommended_disk_space"}:
        assert template[key] == sent[key], key

    split = "import json, sys; from vastai.utils import parse_env; print(json.dumps(parse_env(sys.argv[1])))"

    def options(text: str) -> Any:
        return json.loads(run(VALIDATORS / "bin/python", "-c", split, text).stdout)

    assert options(template["env"]) == {
        "-v V.VOLUME_ID:/data": "1",
        "REPO_URL": "https://github.com/OWNER/demo.git",
    }
    assert list(options(template["env"].replace("/data", "/da-ta"))) == ["REPO_URL"], "a hyphen drops the volume"


# ---------------------------------------------------------------------------------------------------------------------
# systemd


def test_systemd_has_nothing_to_say_about_the_unit(deploy: Path) -> None:
    unit = deploy / "train.service"
    done = run("systemd-analyze", "verify", unit)
    assert (done.returncode, done.stderr) == (0, ""), "most mistakes are only warnings"
    unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=mixd"))
    assert run("systemd-analyze", "verify", unit).stderr


def test_systemd_restarts_after_75_and_neither_after_the_end_nor_after_78(deployed: Deployed, tmp_path: Path) -> None:
    def unit(project: Path, words: str) -> str:
        """The rendered unit as a user's: what only the system's manager can do is left out, and the pause."""
        text = (project / "deploy/train.service").read_text()
        for pattern, instead in (
            (r"(?m)^(User|RequiresMountsFor|After|Wants|LimitNOFILE|LimitMEMLOCK|NoNewPrivileges)=.*\n", ""),
            (r"RestartSec=30", "RestartSec=0.1"),
            (r"WorkingDirectory=.*", f"WorkingDirectory={project}"),
            (r"(?m)^ExecStart=.*", rf"ExecStart=/bin/bash startup/onstart.sh {words}"),
            (r"multi-user.target", "default.target"),
        ):
            text, count = re.subn(pattern, instead, text)
            assert count, pattern
        return text

    rendered = deployed()
    project = {name: fake_project(tmp_path / name, rendered) for name in ("again", "wrong", "stopped")}
    with systemd_manager(tmp_path) as manager:
        manager.start("again.service", unit(project["again"], "steps=4 stop_after=2"))
        manager.start("wrong.service", unit(project["wrong"], "exit=78"))
        manager.start("stopped.service", unit(project["stopped"], "steps=100000"))

        again = manager.wait("again.service", "ActiveState", "inactive")
        assert (again["Result"], again["NRestarts"]) == ("success", "1")
        wrong = manager.wait("wrong.service", "ActiveState", "failed")
        assert (wrong["ExecMainStatus"], wrong["NRestarts"]) == ("78", "0")

        until(lambda: (project["stopped"] / "events-0").exists(), "the first step")
        manager.command("stop", "stopped.service")
        stopped = manager.show("stopped.service")
        assert (stopped["ActiveState"], stopped["Result"], stopped["ExecMainStatus"]) == ("inactive", "success", "75")
        assert "SIGTERM" in (project["stopped"] / "events-0").read_text()
    assert (project["again"] / "events-0").read_text().count("started") == 2


# ---------------------------------------------------------------------------------------------------------------------
# cloud-init

# What a boot needs, on an overlay of this machine's own root: nothing of the real one changes.
BOOT = r"""
set -e
mount -t tmpfs tmpfs "$1"; mkdir "$1"/up "$1"/work "$1"/root
mount -t overlay overlay -o lowerdir=/,upperdir="$1"/up,workdir="$1"/work "$1"/root
cd "$1"/root
for each in proc sys dev; do mount --rbind /$each $each; done
mount -t tmpfs tmpfs run; mount -t tmpfs tmpfs tmp; mkdir -p srv/demo
cp -r "$2"/. srv/demo
printf '[safe]\n\tdirectory = *\n' > etc/gitconfig
mkdir -p var/lib/cloud/seed/nocloud etc/cloud/cloud.cfg.d
rm -rf var/lib/cloud/instance* etc/systemd/system/demo.service
cp "$3" var/lib/cloud/seed/nocloud/user-data
echo 'instance-id: i-1' > var/lib/cloud/seed/nocloud/meta-data
cat > etc/cloud/cloud.cfg.d/99-test.cfg <<'END'
datasource_list: [NoCloud]
network: {config: disabled}
preserve_hostname: true
ssh_deletekeys: false
ssh_genkeytypes: []
locale: false
END
export SYSTEMD_OFFLINE=1 # enable writes its links, what needs the running manager is passed over
boot() {
    rm -rf run/cloud-init
    chroot . cloud-init init --local; chroot . cloud-init init
    chroot . cloud-init modules --mode=config; chroot . cloud-init modules --mode=final
}
boot > "$4"/boot.log 2>&1 || true
chroot . stat -c '%U %a %n' /workspace/checkpoints /opt/trainer/project/deploy > "$4"/found || true
readlink etc/systemd/system/multi-user.target.wants/demo.service >> "$4"/found || true
chroot . systemd-analyze verify /etc/systemd/system/demo.service 2> "$4"/verify || true
touch opt/trainer/project/kept || true
boot > "$4"/second.log 2>&1 || true
ls opt/trainer/project >> "$4"/found || true
"""


def test_cloud_init_sets_the_vm_up_once_and_leaves_an_enabled_unit(deployed: Deployed, tmp_path: Path) -> None:
    project = fake_project(tmp_path / "project", deployed())
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        run("git", "-c", "user.name=A", "-c", "user.email=a@example.org", "-C", project, *words)
    data = tmp_path / "user-data"

    def boot(device: str, kind: str) -> list[str]:
        """Two boots with the two lines edited, and no packages: there is no network here."""
        text = (project / "deploy/cloud-init.yaml").read_text()
        for pattern, instead in (
            (r"package_update: true\npackages: .*\n", ""),
            (r'\["SERVER:/EXPORT", "/workspace", nfs4, "[^"]*"', f'["{device}", "/workspace", {kind}, "nofail"'),
            (r"https://\S+demo.git", "file:///srv/demo"),
        ):
            text, count = re.subn(pattern, instead, text)
            assert count == 1, pattern
        data.write_text(text)
        valid = run("cloud-init", "schema", "--config-file", data)
        assert valid.returncode == 0, valid.stderr
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        for name in ("out", "mount"):
            (tmp_path / name).mkdir(exist_ok=True)
        script = tmp_path / "boot.sh"
        script.write_text(BOOT)
        isolated = ["unshare", "--mount", "--propagation=private", "bash"]
        done = run(*isolated, script, tmp_path / "mount", project, data, tmp_path / "out")
        assert done.returncode == 0, done.stdout + done.stderr
        return (tmp_path / "out/found").read_text().splitlines()

    found = boot("tmpfs", "tmpfs")
    log = (tmp_path / "out/boot.log").read_text()
    assert found[:2] == ["trainer 700 /workspace/checkpoints", "trainer 755 /opt/trainer/project/deploy"], log
    assert found[2] == "/etc/systemd/system/demo.service", log
    assert "kept" in found, "the second boot must not start from nothing"
    assert (tmp_path / "out/verify").read_text() == ""

    found = boot(
        "/dev/no-such-disk", "ext4"
    )  # the volume is missing: nothing may start that would write to the root disk
    assert "/etc/systemd/system/demo.service" not in found

    data.write_text(data.read_text().replace("runcmd:", "runcmd: no\nruncmds:"))
    assert run("cloud-init", "schema", "--config-file", data).returncode != 0


# ---------------------------------------------------------------------------------------------------------------------
# Process 1


@pytest.mark.parametrize("command", ["deploy/until-done.sh", "startup/onstart.sh"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_as_process_1_a_signal_ends_it_with_75(command: str, name: str, deployed: Deployed, tmp_path: Path) -> None:
    project = fake_project(tmp_path / "project", deployed())
    isolate = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    process = subprocess.Popen([*isolate, "bash", command, "steps=100000"], cwd=project)
    try:
        until(lambda: (project / "events-0").exists(), "the first step")
        os.kill(first_child(process.pid), getattr(signal, name))
        assert process.wait(timeout=60) == 75
    finally:
        process.kill()
        process.wait()
    assert "stopped" in (project / "events-0").read_text()


# The image is this machine's own root, as an overlay that is dropped at the end.
CONTAINER = """
mount -t tmpfs tmpfs "$1"; mkdir "$1"/up "$1"/work "$1"/root
mount -t overlay overlay -o lowerdir=/,upperdir="$1"/up,workdir="$1"/work "$1"/root
exec runc run --bundle "$2" "$3"
"""


def test_in_a_real_container_without_root_a_stop_ends_it_with_75(deployed: Deployed, tmp_path: Path) -> None:
    root, bundle = tmp_path / "root", tmp_path / "bundle"
    root.mkdir()
    bundle.mkdir()
    project = fake_project(tmp_path / "project", deployed())
    for path in (project, tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o777 if path == project else 0o755)
    assert run("runc", "spec", cwd=bundle).returncode == 0
    spec = json.loads((bundle / "config.json").read_text())
    python = shutil.which("python3", path="/usr/bin:/bin")
    assert python, "the system's python3, which a user without root can run"
    spec["process"] |= {
        "terminal": False,
        "user": {"uid": 10001, "gid": 10001},
        "cwd": str(project),
        "args": ["bash", "startup/onstart.sh", "steps=100000"],
        "env": ["PATH=/usr/bin:/bin"],
        "noNewPrivileges": True,
    }
    spec["process"].pop("rlimits", None)
    spec["root"] = {"path": str(root / "root"), "readonly": True}
    spec["mounts"] = [mount for mount in spec["mounts"] if mount["type"] != "cgroup"]
    spec["mounts"].append({"destination": str(project), "type": "bind", "source": str(project), "options": ["rbind"]})
    (bundle / "config.json").write_text(json.dumps(spec))
    name = f"deploy-test-{os.getpid()}"
    isolated = ["unshare", "--mount", "--propagation=private", "bash", "-ec", CONTAINER]
    process = subprocess.Popen([*isolated, "container", root, bundle, name])
    try:
        until(lambda: (project / "events-0").exists(), "the first step")
        assert run("runc", "kill", name, "TERM").returncode == 0
        assert process.wait(timeout=60) == 75
    finally:
        run("runc", "delete", "--force", name)
        process.wait()
    assert (project / "state-0").stat().st_uid == 10001


# ---------------------------------------------------------------------------------------------------------------------
# Slurm


@pytest.fixture(scope="module", params=[None, 75], ids=["as it comes", "RequeueExit=75"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster", requeue_exit=request.param) as running:
        yield running


@pytest.fixture
def project(deployed: Deployed, tmp_path: Path) -> Path:
    return fake_project(tmp_path / "project", deployed(provider="slurm", nodes=2))


def preempt(cluster: Cluster, job: str, folder: Path) -> None:
    """Take the nodes away from `job` for a moment, as a job of the other partition does."""
    script = folder / "high.sh"
    script.write_text("#!/bin/sh\nexit 0\n")
    options = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")
    cluster.wait(cluster.submit(script, cwd=folder, options=options), "COMPLETED")
    until(lambda: cluster.job(job)["JobState"] != "COMPLETING", f"the end of job {job}")


def events(project: Path, rank: int) -> list[list[str]]:
    path = project / f"events-{rank}"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_a_preempted_job_saves_is_requeued_and_carries_on(cluster: Cluster, project: Path, tmp_path: Path) -> None:
    job = cluster.submit("deploy/train.sbatch", "steps=40", cwd=project)
    until(lambda: events(project, 0) and events(project, 1), "both tasks")
    preempt(cluster, job, tmp_path)
    pending = cluster.job(job)
    assert (pending["JobState"], pending["Restarts"]) == ("PENDING", "1")
    cluster.start_now(job)
    done = cluster.wait(job, "COMPLETED", "FAILED")
    assert (done["JobState"], done["ExitCode"], done["Restarts"]) == ("COMPLETED", "0:0", "1")
    for rank in (0, 1):
        (_, zero, *words), (_, saved, *signals), (_, resumed, *_), (_, last) = events(project, rank)
        assert (zero, words) == ("0", ["steps=40"]) and "SIGTERM" in signals
        assert saved == resumed and last == "40"


def test_a_wrong_configuration_is_not_requeued(cluster: Cluster, project: Path) -> None:
    job = cluster.submit("deploy/train.sbatch", "exit=78", cwd=project)
    failed = cluster.wait(job, "FAILED", "COMPLETED")
    assert (failed["JobState"], failed["ExitCode"], failed["Restarts"]) == ("FAILED", "78:0", "0")


def test_a_warning_before_the_tasks_are_there_reaches_them(cluster: Cluster, project: Path) -> None:
    options = ("--export=ALL,SETUP_S=2",)
    job = cluster.submit("deploy/train.sbatch", "steps=100000", cwd=project, options=options)
    until((project / "set-up").exists, "the batch script's set-up")
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    until(lambda: cluster.job(job)["Restarts"] == "1", "the requeue")
    cluster.command("scancel", job)
    for rank in (0, 1):  # a task that was only starting may have been ended by it
        assert all("SIGTERM" in words for words in events(project, rank) if words[0] == "stopped")


def test_signals_sent_to_srun_itself_lose_everything(cluster: Cluster, project: Path) -> None:
    """Why the script goes through scancel: the wrong way must be seen to fail by these tests."""
    script = project / "deploy/train.sbatch"
    text = script.read_text()
    wrong = re.sub(r"while \[ -n \"\$step\" \] && kill -0 .*", 'kill -TERM "$step"', text)
    assert wrong != text
    script.write_text(wrong)
    job = cluster.submit(script, "steps=100000", cwd=project)
    until(lambda: events(project, 0) and events(project, 1), "both tasks")
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    until(lambda: cluster.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), "the end")
    cluster.command("scancel", job)
    assert not any(words[0] == "stopped" for rank in (0, 1) for words in events(project, rank))


@pytest.mark.parametrize("cluster", [None], ids=["as it comes"], indirect=True)
def test_a_real_run_on_two_nodes_is_preempted_and_carries_on_on_one(
    cluster: Cluster, deployed: Deployed, tmp_path: Path
) -> None:
    project = tmp_path / "demo"
    shutil.copytree(deployed(nodes=2), project, symlinks=True)
    (project / ".venv").symlink_to(sys.prefix)
    (project / "startup/requirements.txt").write_text("# the environment of the tests\n")
    settings = (
        "data.global_batch=4", "data.micro_batch=2", "data.sequence_length=32", "model.layers=1", "model.width=32",
        "model.heads=2", "train.steps=60", "train.eval_every_steps=0", "checkpoint.every_steps=20",
    )  # fmt: skip
    run_dir = project / "checkpoints/demo"
    options = ("--export=ALL,MASTER_ADDR=127.0.0.1",)  # the names n1 and n2 mean nothing outside Slurm
    job = cluster.submit("deploy/train.sbatch", "--gpus", "1", *settings, cwd=project, options=options)
    until(lambda: len(read_records(run_dir, "metrics")) >= 5, f"five steps ({project})", 180)
    preempt(cluster, job, tmp_path)
    assert cluster.job(job)["Restarts"] == "1"
    last = read_records(run_dir, "metrics")[-1]["step"]
    for change in ("NumTasks=1", "NumCPUs=1", "NumNodes=1-1"):  # in this order
        cluster.command("scontrol", "update", f"JobId={job}", change)
    cluster.start_now(job)
    done = cluster.wait(job, "COMPLETED", "FAILED", timeout_s=240)
    assert (done["JobState"], done["ExitCode"]) == ("COMPLETED", "0:0"), (project / f"demo-{job}.log").read_text()
    events = read_records(run_dir, "ledger")
    assert [event["world_size"] for event in events if event["event"] == "attempt_started"] == [2, 1]
    (resumed,) = (event for event in events if event["event"] == "resumed")
    assert (resumed["step"], resumed["lost_steps"]) == (last, 0)
    assert read_records(run_dir, "metrics")[-1]["step"] == 60


def test_slurm_refuses_a_wrong_script(cluster: Cluster, project: Path) -> None:
    script = project / "deploy/train.sbatch"
    script.write_text(script.read_text().replace("--nodes=2", "--nodes=two"))
    with pytest.raises(AssertionError, match="node count"):
        cluster.submit(script, cwd=project)
