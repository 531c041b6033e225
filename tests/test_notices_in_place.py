"""Launchers that hear of a reclaim from a metadata server on its true address, in a network namespace of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from tests.slurm_cluster import until
from trainer.checkpoint.commit import complete
from trainer.records import read_records

pytestmark = pytest.mark.slow  # needs root
ROOT = Path(__file__).resolve().parent.parent
ENGINE_TESTS = ROOT / "tests" / "engine"
VALIDATORS = Path(os.environ.get("DEPLOY_VALIDATORS", ROOT / ".venv/validators"))  # with ec2-metadata in it
ADDRESSES = """
ip link set lo up && ip addr add 169.254.169.254/32 dev lo && ip addr add 100.100.100.200/32 dev lo || exit 1
"$1" "$2" 100.100.100.200 80 "$3" &
exec "$1" "$2" 169.254.169.254 80 "$3"
"""


class Cloud:
    """A network namespace with a metadata server in it."""

    def __init__(self, pid: int, state: Path) -> None:
        self.pid, self.state = pid, state

    def announce(self, **state: Any) -> None:
        temporary = self.state.with_suffix(".new")
        temporary.write_text(json.dumps(state))
        temporary.replace(self.state)

    def asked(self) -> int:
        """How often it has been asked something."""
        return self.state.with_suffix(".asked").read_text().count("\n")

    def inside(self, *command: str | Path) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", *map(str, command)]


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    state = tmp_path / "state.json"
    state.write_text("{}")
    server = subprocess.Popen(
        ["unshare", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", ADDRESSES, "sh", sys.executable,
         str(ENGINE_TESTS / "reclaim/fake_metadata.py"), str(state)]
    )  # fmt: skip
    found = Cloud(server.pid, state)
    connect = "import socket; socket.create_connection(('169.254.169.254', 80), 1)"
    until(
        lambda: subprocess.run(found.inside(sys.executable, "-c", connect), stderr=subprocess.DEVNULL).returncode == 0,
        "the metadata server",
    )
    yield found
    server.kill()
    server.wait()


def _in(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _preempt() -> dict[str, Any]:
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    return {
        "EventId": "1",
        "EventType": "Preempt",
        "Resources": ["me"],
        "EventStatus": "Scheduled",
        "NotBefore": when,
    }


class Run:
    def __init__(self, launcher: subprocess.Popen[bytes], project: Path) -> None:
        self.launcher, self.run_dir = launcher, project / "checkpoints" / "project"

    def last_line(self) -> int:
        return max((line["step"] for line in read_records(self.run_dir, "metrics")), default=0)

    def saved(self) -> list[int]:
        return [found.step for found in complete(self.run_dir)]

    def noticed(self) -> list[dict[str, Any]]:
        return [event for event in read_records(self.run_dir, "ledger") if event["event"] == "reclaim_noticed"]


@pytest.fixture
def start(cloud: Cloud, tmp_path: Path) -> Iterator[Callable[[], Run]]:
    """Starts a launcher with `reclaim.notice=auto` in the cloud, over ranks that only pretend to train."""
    launchers: list[subprocess.Popen[bytes]] = []

    def launch() -> Run:
        project = tmp_path / "project"
        project.mkdir()
        words = ("train.steps=1000000", "checkpoint.every_steps=100000000", "reclaim.grace_s=25")
        launcher = subprocess.Popen(
            cloud.inside(sys.executable, ENGINE_TESTS / "launch/fake_ranks.py", "launch", *words), cwd=project
        )
        launchers.append(launcher)
        run = Run(launcher, project)
        until(lambda: run.last_line() >= 3, "step 3")
        return run

    yield launch
    for launcher in launchers:
        launcher.kill()
        launcher.wait()


@pytest.mark.parametrize(
    ("provider", "announced", "source", "seconds"),
    [
        ("aws", lambda: {"action": {"action": "terminate", "time": _in(120)}}, "AWS spot", 120),
        ("gcp", lambda: {"preempted": True}, "GCP preemption", 25),
        ("azure", lambda: {"events": [_preempt()]}, "Azure Preempt", 30),
        ("alibaba", lambda: {"termination": _in(300)}, "Alibaba", 300),
    ],
)
def test_auto_finds_the_provider_and_its_notice_saves_and_exits_75(
    cloud: Cloud,
    start: Callable[[], Run],
    provider: str,
    announced: Callable[[], dict[str, Any]],
    source: str,
    seconds: float,
) -> None:
    cloud.announce(provider=provider)
    run = start()
    cloud.announce(provider=provider, **announced())
    assert run.launcher.wait(60) == 75
    assert run.saved() == [run.last_line()]
    (noticed,) = run.noticed()
    assert source in noticed["source"]
    assert seconds - 10 < noticed["deadline_s"] <= seconds


def test_a_rebalance_recommendation_saves_early_and_training_goes_on(cloud: Cloud, start: Callable[[], Run]) -> None:
    cloud.announce(provider="aws")
    run = start()
    recommendation = {"noticeTime": _in(0)}
    cloud.announce(provider="aws", recommendation=recommendation)
    until(lambda: run.saved(), "an early save")
    early = run.saved()[0]
    until(lambda: run.last_line() > early + 5, "training that goes on")
    cloud.announce(provider="aws", recommendation=recommendation, action={"action": "terminate", "time": _in(100)})
    assert run.launcher.wait(60) == 75
    assert run.saved() == [run.last_line(), early]
    assert run.noticed()[0]["decision"].startswith("saving early")


@pytest.mark.parametrize("lie", ["redirect", "huge", "garbage", "slow", "unauthorized"])
def test_a_metadata_server_that_lies_never_disturbs_training(cloud: Cloud, start: Callable[[], Run], lie: str) -> None:
    cloud.announce(provider="aws")
    run = start()
    cloud.announce(provider="aws", action={"action": "terminate", "time": _in(100)}, lie=lie)
    asked = cloud.asked()
    until(lambda: cloud.asked() > asked + 2 or run.launcher.poll() is not None, "more polls")
    before = run.last_line()
    until(lambda: run.last_line() > before, "training that goes on")
    assert run.launcher.poll() is None and run.noticed() == []
    run.launcher.terminate()
    assert run.launcher.wait(30) == 75


def test_the_fake_is_one_that_the_ec2_metadata_package_takes_for_real(cloud: Cloud) -> None:
    code = """
from ec2_metadata import ec2_metadata
action = ec2_metadata.spot_instance_action
print(action and (action.action, action.time.isoformat()))
"""
    ask = cloud.inside(VALIDATORS / "bin/python", "-c", code)
    cloud.announce(provider="aws")
    assert subprocess.run(ask, capture_output=True, text=True).stdout == "None\n"
    cloud.announce(provider="aws", action={"action": "stop", "time": "2026-09-18T08:22:00Z"})
    done = subprocess.run(ask, capture_output=True, text=True)
    assert "('stop', '2026-09-18T08:22:00" in done.stdout, done.stderr
