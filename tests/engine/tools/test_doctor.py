"""The checklist: what it finds on machines, disks and configurations that are wrong in one way each."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer
from trainer import task
from trainer.checkpoint import commit
from trainer.config.fingerprint import fingerprint
from trainer.config.load import load_config
from trainer.config.settings import Config, GpuConfig, ImageConfig, ReclaimConfig, RestartConfig, RunConfig
from trainer.ledger import Ledger
from trainer.machine import gpus as gpus_of
from trainer.reclaim import notices
from trainer.storage import capacity
from trainer.tools import doctor
from trainer.tools.doctor import Check


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that is right in every way, with a finished drill."""
    for name in ("startup", "deploy", "drill"):
        (tmp_path / name).mkdir()
    (tmp_path / "startup" / "requirements.txt").write_text("torch==2.13.0\n")
    (tmp_path / "drill" / "drill.json").write_text('{"passed": true}')
    return tmp_path


@pytest.fixture
def config(project: Path) -> Config:
    return load_config(project=project)


def save(config: Config, step: int, content: bytes = b"metadata") -> Path:
    """A complete checkpoint, as small as they get."""
    directory = config.run_dir / commit.directory_name(step)
    directory.mkdir(parents=True)
    (directory / ".metadata").write_bytes(content)
    files = {".metadata": commit.sum_of(content)}
    made = commit.Commit(directory, step, 0, 1, 1, time.time(), fingerprint(config), "2.13.0", "", files)
    (directory / commit.COMMIT).write_bytes(commit.encode(made))
    return directory


def by_name(checks: object) -> dict[str, Check]:
    found: dict[str, Check] = {}
    for check in checks:  # type: ignore[attr-defined]
        found.setdefault(check.name, check)
    return found


def grades(checks: object) -> dict[str, str]:
    return {name: check.grade for name, check in by_name(checks).items()}


def test_a_good_project_passes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor([], project=project) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("ready to be interrupted: ")
    assert not [line for line in lines if line.startswith("fail")]


def test_json_has_keys_that_stay(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor(["run.provider=aws", "reclaim.notice=none"], as_json=True, project=project) == 1
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"ok", "warn", "fail", "checks"}
    assert all(set(check) == {"name", "grade", "text", "remedy"} for check in found["checks"])
    assert {check["name"] for check in found["checks"] if check["grade"] == "fail"} >= {"gpus"}
    assert [check["name"] for check in found["checks"]] == [
        "configuration", "storage", "commit", "disk", "access", "gpus", "batch", "memory", "torch", "image",
        "interval", "grace", "assumptions", "notices", "exit codes", "checkpoint", "drill", "secrets",
    ]  # fmt: skip


def test_a_wrong_configuration_is_the_only_finding(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "config.yaml").write_text("train:\n  steps: many\n")
    assert doctor.doctor([], project=project) == 1
    assert "train.steps is 'many'" in capsys.readouterr().out


def test_doctor_needs_no_torch(project: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from trainer.tools import doctor; from trainer.tools.report import text as report\n"
        "sys.exit(doctor.doctor([], project=Path(sys.argv[1])))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(trainer.__file__).resolve().parents[1])}
    run = subprocess.run([sys.executable, "-c", code, str(project)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_task_that_builds_no_model_leaves_the_list_its_other_checks(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_task(_: Config) -> None:
        raise KeyError("no such layer")

    monkeypatch.setattr(task, "build_task", build_task)
    found = by_name(doctor.check_storage(config))
    assert (found["storage"].grade, found["disk"].grade) == ("ok", "warn")
    assert "KeyError: 'no such layer'" in found["disk"].text
    assert by_name(doctor.check_history(config))["grace"].text.startswith("a save takes 30.0 s (assumed)")


# ---------------------------------------------------------------------------------------------------------------------
# Disk


def test_a_missing_volume_fails_with_the_launchers_words(config: Config) -> None:
    found = list(doctor.examine(["volume.mount=/nowhere/at/all"], config.project))
    assert by_name(found)["storage"].text.startswith("volume.mount is '/nowhere/at/all'")
    assert [check.name for check in found if check.grade == "fail"] == ["storage"]


@pytest.mark.parametrize(("provider", "grade"), [("local", "warn"), ("aws", "fail")])
def test_checkpoints_in_memory_fail_where_the_machine_is_rented(config: Config, provider: str, grade: str) -> None:
    place = Path("/dev/shm") / f"doctor_{os.getpid()}"
    where = dataclasses.replace(config.checkpoint, dir=str(place))
    rented = dataclasses.replace(config, checkpoint=where, run=RunConfig("run", provider))  # type: ignore[arg-type]
    try:
        check = by_name(doctor.check_storage(rented))["storage"]
    finally:
        for directory in (place / "run", place):
            for file in directory.glob(".*.json"):
                file.unlink()
            directory.rmdir()
    assert (check.grade, "in memory" in check.text) == (grade, True)


def test_a_full_disk_fails_with_the_numbers(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "size_of_checkpoint", lambda _: (1 << 60, "estimated from the model", 0))
    found = by_name(doctor.check_storage(config))
    assert found["disk"].grade == "fail"
    assert "lower checkpoint.keep_last" in found["disk"].text
    assert found["storage"].grade == found["commit"].grade == "ok"  # the list goes on


def test_a_directory_that_everybody_can_write_fails(config: Config) -> None:
    config.run_dir.mkdir(parents=True)
    assert grades(doctor.check_access(config)) == {"access": "ok"}
    config.run_dir.chmod(0o777)
    check = by_name(doctor.check_access(config))["access"]
    assert (check.grade, check.remedy) == ("fail", f"chmod o-w {config.run_dir}")


# ---------------------------------------------------------------------------------------------------------------------
# Machine


@pytest.mark.parametrize(
    ("gpus", "settings", "provider", "grade"),
    [
        (8, GpuConfig(count=8), "aws", "ok"),
        (4, GpuConfig(count=8), "aws", "warn"),
        (4, GpuConfig(count=8, on_count_change="fail"), "aws", "fail"),
        (4, GpuConfig(count=8, on_count_change="hold"), "aws", "fail"),
        (0, GpuConfig(count=8), "aws", "fail"),
        (0, GpuConfig(count=1), "local", "ok"),
    ],
)
def test_gpus_are_compared_with_the_configuration(
    config: Config, monkeypatch: pytest.MonkeyPatch, gpus: int, settings: GpuConfig, provider: str, grade: str
) -> None:
    monkeypatch.setattr(gpus_of, "count_gpus", lambda: gpus)
    run = RunConfig("run", provider)  # type: ignore[arg-type]
    assert grades(doctor.check_ranks(dataclasses.replace(config, gpu=settings, run=run)))["gpus"] == grade


def test_too_little_memory_for_a_save_fails(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "free_shared_memory", lambda: 64_000)
    check = by_name(doctor.check_ranks(config))["memory"]
    assert check.grade == "fail"
    assert "--shm-size" in check.text


@pytest.mark.parametrize(
    ("version", "pin", "grade"),
    [
        ("2.13.0+cpu", "2.13.0", "ok"),
        ("2.14.1", "2.13.0", "warn"),
        ("2.10.0", "2.10.0", "fail"),
        ("2.16.0", "2.16.0", "fail"),
        ("2.9.1", "2.13.0", "fail"),
        (None, "2.13.0", "fail"),
    ],
)
def test_torch_is_compared_with_the_range_and_the_pin(
    config: Config, version: str | None, pin: str, grade: str
) -> None:
    (config.project / "startup/requirements.txt").write_text(f"# pins\ntorch=={pin}\n")
    assert grades(doctor.check_packages(config, {"torch": version}.get))["torch"] == grade


def test_packages_that_differ_from_their_pins_are_named(config: Config) -> None:
    (config.project / "startup/requirements.txt").write_text(
        "torch==2.13.0\nnumpy==2.3.0 \\\n    --hash=sha256:0\ncolorama==1 ; sys_platform == 'win32'\n"
    )
    installed = {"torch": "2.13.0", "numpy": "2.2.0"}
    check = by_name(doctor.check_packages(config, installed.get))["pins"]
    assert (check.grade, check.text) == ("warn", "other versions than pinned: numpy 2.2.0 (2.3.0)")


def test_an_image_is_best_named_by_its_digest(config: Config) -> None:
    def grade(ref: str) -> str:
        return grades(doctor.check_image(dataclasses.replace(config, image=ImageConfig(ref, True))))["image"]

    assert grade(f"pytorch/pytorch@sha256:{'a' * 64}") == "ok"
    assert grade("pytorch/pytorch:2.13.0") == "warn"


# ---------------------------------------------------------------------------------------------------------------------
# Plan


@pytest.mark.parametrize(
    ("changes", "grade", "said"),
    [
        ({}, "ok", "a save every 500 steps"),
        ({"every_steps": 10}, "warn", "before the next is due"),
        ({"every_steps": 5000}, "warn", "badput_target"),
        ({"mtbi_s": 200}, "fail", "no interval fits"),
    ],
)
def test_the_interval_is_possible_and_kept(config: Config, changes: dict[str, float], grade: str, said: str) -> None:
    settings = dataclasses.replace(config.checkpoint, **changes)  # type: ignore[arg-type]
    check = by_name(doctor.check_interval(dataclasses.replace(config, checkpoint=settings)))["interval"]
    assert check.grade == grade
    assert said in check.text


@pytest.mark.parametrize(
    ("grace_s", "save_s", "grade", "said"),
    [
        (30, 10, "ok", "no step is lost at a reclaim"),
        (30, 20, "ok", "up to 20 while a save is being written"),
        (30, 40, "warn", "loses about 290 steps (4.83 min), 540 at most"),
        (0, 1, "warn", "loses about 251 steps"),
    ],
)
def test_what_a_reclaim_would_cost_is_said(
    config: Config, grace_s: float, save_s: float, grade: str, said: str
) -> None:
    check = doctor.check_grace(
        dataclasses.replace(config, reclaim=ReclaimConfig(grace_s)), 500, 1.0, save_s, "measured"
    )
    assert check.grade == grade
    assert said in check.text


def test_measured_saves_decide_and_wrong_assumptions_are_said(config: Config) -> None:
    config.run_dir.mkdir(parents=True)
    ledger = Ledger(config.run_dir, 1)
    ledger.record("attempt_started", world_size=1, step=0)
    found = by_name(doctor.check_history(config))
    assert (found["grace"].grade, found["assumptions"].grade) == ("ok", "ok")
    assert "estimated from a write of that size" in found["grace"].text
    assert [path.name for path in config.run_dir.iterdir()] == ["ledger.jsonl"]
    ledger.record("save_started", step=10)
    ledger.record("save_staged", step=10, stall_s=0.01)
    ledger.record("save_committed", step=10, write_s=0.01, bytes=1)
    found = by_name(doctor.check_history(config))
    assert found["grace"].grade == "ok"
    assert "measured" in found["grace"].text
    assert found["assumptions"].grade == "warn"
    assert found["assumptions"].text.startswith("checkpoint.save_time_s: ")


# ---------------------------------------------------------------------------------------------------------------------
# Notices and exit codes


@pytest.fixture
def metadata_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Answers as AWS does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"token")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setitem(notices.CLOUDS, "aws", lambda: notices.Aws(base))
        yield
        server.shutdown()


def notice(config: Config, text: str, provider: str = "local") -> Check:
    run = RunConfig("run", provider)  # type: ignore[arg-type]
    return by_name(doctor.check_notices(dataclasses.replace(config, reclaim=ReclaimConfig(notice=text), run=run)))[
        "notices"
    ]


@pytest.mark.usefixtures("metadata_server")
def test_a_metadata_server_that_answers_is_found(config: Config) -> None:
    assert notice(config, "auto", "aws").grade == "ok"


def test_a_metadata_server_that_is_silent_fails(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(notices.CLOUDS, "aws", lambda: notices.Aws("http://127.0.0.1:1"))
    assert notice(config, "aws").grade == "fail"
    assert notice(config, "auto").grade == "ok"  # provider local: nobody is asked


def test_a_notice_by_file_or_command_is_tried(config: Config, project: Path) -> None:
    assert notice(config, "file:reclaim").grade == "ok"
    assert notice(config, "file:missing/reclaim").grade == "warn"
    (project / "reclaim").touch()
    assert notice(config, "file:reclaim").grade == "fail"
    assert notice(config, "command:test -e notice").grade == "ok"
    assert notice(config, "command:true").grade == "fail"
    assert notice(config, "command:no-such-command-here").grade == "fail"


def test_another_exit_code_must_be_known_to_the_deploy_files(config: Config, project: Path) -> None:
    changed = dataclasses.replace(config, restart=RestartConfig(exit_reclaimed=99))
    assert grades(doctor.check_exit_codes(changed))["exit codes"] == "ok"
    (project / "deploy" / "train.service").write_text("RestartForceExitStatus=75\n")
    check = by_name(doctor.check_exit_codes(changed))["exit codes"]
    assert check.grade == "warn"
    assert "deploy/train.service" in check.text
    assert grades(doctor.check_exit_codes(config))["exit codes"] == "ok"


# ---------------------------------------------------------------------------------------------------------------------
# What there is already


def test_the_newest_checkpoint_is_read_whole(config: Config) -> None:
    assert by_name(doctor.check_checkpoints(config))["checkpoint"].text == "none yet"
    save(config, 10)
    newest = save(config, 20)
    found = by_name(doctor.check_checkpoints(config))
    assert found["checkpoint"].text.startswith("step 20, ")
    assert (found["checkpoint"].grade, found["resume"].grade) == ("ok", "ok")
    (newest / ".metadata").write_bytes(b"metadatA")
    check = by_name(doctor.check_checkpoints(config))["checkpoint"]
    assert (check.grade, "goes on from step 10" in check.remedy) == ("fail", True)


def test_checkpoints_there_but_none_complete_fails(config: Config) -> None:
    (save(config, 10) / commit.COMMIT).unlink()
    assert grades(doctor.check_checkpoints(config)) == {"damage": "warn", "checkpoint": "fail"}


def test_a_configuration_that_may_not_go_on_is_said_before_the_start(config: Config) -> None:
    save(config, 10)
    changed = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=1.0))
    check = by_name(doctor.check_checkpoints(changed))["resume"]
    assert (check.grade, f"optim.lr was {config.optim.lr} and is 1.0" in check.text) == ("fail", True)


@pytest.mark.parametrize(
    ("text", "age_days", "grade"),
    [
        (None, 0, "warn"),
        ('{"passed": true}', 0, "ok"),
        ('{"passed": true}', 100, "warn"),
        ('{"passed": false, "checks": [{"name": "loss", "passed": false, "found": "0.1"}]}', 0, "fail"),
        ("{", 0, "warn"),
        ("[]", 0, "warn"),
    ],
)
def test_the_last_drill_is_remembered(config: Config, text: str | None, age_days: int, grade: str) -> None:
    verdict = config.project / "drill" / "drill.json"
    verdict.unlink()
    if text is not None:
        verdict.write_text(text)
        then = time.time() - age_days * 86_400
        os.utime(verdict, (then, then))
    assert grades(doctor.check_drill(config)) == {"drill": grade}


def test_an_environment_file_is_for_its_owner_alone(config: Config, project: Path) -> None:
    assert grades(doctor.check_secrets(config)) == {"secrets": "ok"}
    env = project / ".env"
    env.write_text("WANDB_API_KEY=0123\n")
    env.chmod(0o600)
    assert grades(doctor.check_secrets(config)) == {"secrets": "ok"}
    env.chmod(0o644)
    assert grades(doctor.check_secrets(config)) == {"secrets": "fail"}
