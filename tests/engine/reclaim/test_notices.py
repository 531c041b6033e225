"""Notices as the clouds document them, and what servers that lie cannot do."""

from __future__ import annotations

import json
import runpy
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from trainer.config.settings import Config, ReclaimConfig
from trainer.reclaim import notices
from trainer.reclaim.notices import CLOUDS, Alibaba, Aws, Azure, Gcp, Poller, command, file
from trainer.reclaim.request import Action, Request

Say = Callable[..., str]
serve = runpy.run_path(str(Path(__file__).with_name("fake_metadata.py")))["serve"]


@pytest.fixture
def say(tmp_path: Path) -> Iterator[Say]:
    """`say(provider="aws", action=...)` sets what the server announces; returns the server's address."""
    state = tmp_path / "state.json"
    state.write_text("{}")
    server = serve(("127.0.0.1", 0), state)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def setting(**values: Any) -> str:
        temporary = state.with_suffix(".new")
        temporary.write_text(json.dumps(values))
        temporary.replace(state)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield setting
    server.shutdown()
    server.server_close()


def _in(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _left(notice: Request) -> float:
    """Seconds until the deadline."""
    assert notice.deadline is not None
    return notice.deadline - time.monotonic()


def test_aws_without_a_notice_says_nothing(say: Say) -> None:
    assert Aws(say(provider="aws")).poll() == []


@pytest.mark.parametrize("action", ["stop", "terminate"])
def test_aws_action_and_time(say: Say, action: str) -> None:
    (notice,) = Aws(say(provider="aws", action={"action": action, "time": _in(120)})).poll()
    assert notice.action is Action.STOP and action in notice.source
    assert 117 < _left(notice) <= 120


def test_aws_hibernation_begins_at_once(say: Say) -> None:
    (notice,) = Aws(say(provider="aws", action={"action": "hibernate", "time": _in(-1)})).poll()
    assert notice.action is Action.STOP and notice.deadline is None


def test_aws_rebalance_recommendation_saves_early_and_once(say: Say) -> None:
    base = say(provider="aws", recommendation={"noticeTime": "2026-10-27T08:22:00Z"})
    aws = Aws(base)
    assert [notice.action for notice in aws.poll()] == [Action.SAVE]
    assert aws.poll() == []
    say(provider="aws", recommendation={"noticeTime": "2026-10-27T09:00:00Z"})
    assert [notice.action for notice in aws.poll()] == [Action.SAVE]


def test_aws_action_that_was_left_over_is_ignored(say: Say) -> None:
    assert Aws(say(provider="aws", action={"action": "stop", "time": _in(-4000)})).poll() == []


def test_aws_token_that_expired_is_asked_for_again(say: Say) -> None:
    aws = Aws(say(provider="aws", action={"action": "stop", "time": _in(120)}))
    aws._token = "expired"
    assert len(aws.poll()) == 1


def test_gcp_is_told_within_a_moment_by_its_long_poll(say: Say) -> None:
    gcp = Gcp(say(provider="gcp"))
    assert gcp.poll() == []
    threading.Timer(0.3, say, kwargs={"provider": "gcp", "preempted": True}).start()
    began = time.monotonic()
    (notice,) = gcp.poll()
    assert notice.action is Action.STOP
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("kind", "want"),
    [("Preempt", Action.STOP), ("Terminate", Action.STOP), ("Reboot", Action.SAVE), ("Redeploy", Action.SAVE)],
)
def test_azure_events(say: Say, kind: str, want: Action) -> None:
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    event = {"EventId": "1", "EventType": kind, "Resources": ["me"], "EventStatus": "Scheduled", "NotBefore": when}
    azure = Azure(say(provider="azure", events=[event]))
    (notice,) = azure.poll()
    assert notice.action is want
    if want is Action.STOP:
        assert 27 < _left(notice) <= 30
    else:
        assert azure.poll() == []


def test_azure_event_that_has_begun_has_no_time(say: Say) -> None:
    event = {"EventId": "1", "EventType": "Preempt", "Resources": ["me"], "EventStatus": "Started", "NotBefore": ""}
    (notice,) = Azure(say(provider="azure", events=[event])).poll()
    assert notice.deadline is None


def test_azure_events_of_other_machines_and_a_freeze_are_no_notice(say: Say) -> None:
    events = [
        {"EventId": "1", "EventType": "Preempt", "Resources": ["other"], "NotBefore": ""},
        {"EventId": "2", "EventType": "Freeze", "Resources": ["me"], "NotBefore": ""},
    ]
    assert Azure(say(provider="azure", events=events)).poll() == []


def test_alibaba_time_of_release(say: Say) -> None:
    base = say(provider="alibaba")
    assert Alibaba(base).poll() == []
    say(provider="alibaba", termination=_in(300))
    (notice,) = Alibaba(base).poll()
    assert 297 < _left(notice) <= 300


@pytest.mark.parametrize("provider", ["aws", "gcp", "azure", "alibaba"])
def test_a_provider_is_found_by_its_own_answer_only(say: Say, provider: str) -> None:
    base = say(provider=provider)
    found = []
    for name, kind in CLOUDS.items():
        try:
            present = kind(base).present()
        except (OSError, ValueError):
            present = False
        if present:
            found.append(name)
    assert found == [provider]


@pytest.mark.parametrize("lie", ["redirect", "huge", "garbage", "slow", "unauthorized"])
@pytest.mark.parametrize("kind", [Aws, Gcp, Azure, Alibaba])
def test_a_server_that_lies_is_no_notice(
    say: Say, kind: Callable[[str], Poller], lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(Azure, "FIRST_TIMEOUT_S", 0.3)
    monkeypatch.setattr(Azure, "TIMEOUT_S", 0.3)
    provider = kind.__name__.lower()
    poller = kind(say(provider=provider, preempted=True, lie=lie))
    try:
        assert poller.poll() == []
    except (OSError, ValueError, KeyError):
        return


def test_a_redirect_is_not_followed(say: Say) -> None:
    status, body, _ = notices.fetch(say(provider="aws", lie="redirect") + "/latest/meta-data/x", {})
    assert (status, body) == (302, "")


def test_no_proxy_is_used(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert Gcp(say(provider="gcp")).present()


def test_file_and_command(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    assert file(sign).poll() == command(f"test -e '{sign}'", tmp_path).poll() == []
    sign.touch()
    assert file(sign).poll()[0].action is command("test -e sign", tmp_path).poll()[0].action is Action.STOP


def test_a_notice_without_a_time_leaves_the_grace_less_the_time_between_two_questions(tmp_path: Path) -> None:
    (tmp_path / "sign").touch()
    config = replace(Config(project=tmp_path), reclaim=ReclaimConfig(grace_s=20, notice="file:sign"))
    reported: list[Request] = []
    notices.watch(config, reported.append, threading.Event())
    (notice,) = reported
    assert notice.action is Action.STOP
    assert 18 < _left(notice) <= 19
