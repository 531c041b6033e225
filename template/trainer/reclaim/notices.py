"""Notices of a coming reclaim: the metadata servers of the clouds, a file that appears, a command of the user's own.

One thread of a node's launcher asks; ranks never do. A metadata server is not trusted: no proxy, no redirect, a
time-out, at most 64 KiB, and whatever it answers that is not a notice in its documented form is no notice.

| `reclaim.notice` | asked                                       | a notice is                              |
|------------------|---------------------------------------------|------------------------------------------|
| aws              | IMDSv2 spot/instance-action                 | an action and its time                   |
|                  | IMDSv2 recommendations/rebalance            | "save early"                             |
| gcp              | instance/preempted, a long poll             | TRUE                                     |
| azure            | scheduledevents                             | Preempt, Terminate                       |
|                  |                                             | Reboot, Redeploy: "save early"           |
| alibaba          | instance/spot/termination-time              | a time                                   |
| file:PATH        | whether PATH exists                         | it does                                  |
| command:COMMAND  | COMMAND, by `sh -c`                         | exit code 0                              |
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import logging
import os
import random
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from pathlib import Path
from typing import Protocol

from trainer.config.settings import Config
from trainer.processes import waited_for
from trainer.reclaim.request import Action

log = logging.getLogger(__name__)

LINK_LOCAL = "http://169.254.169.254"
TIMEOUT_S = 2.0
MOST_BYTES = 64 << 10
_OLD_S = 300.0  # a time of termination that long ago was not kept, and stays in the metadata


@dataclass(frozen=True)
class Notice:
    """What a platform said. `seconds` until it kills; None where it did not say."""

    want: Action
    source: str
    seconds: float | None = None


class Poller(Protocol):
    """Asks once. Raises whatever goes wrong on the way; the caller treats that as no notice."""

    interval_s: float

    def poll(self) -> list[Notice]: ...


# ---------------------------------------------------------------------------------------------------------------------
# Metadata servers


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def fetch(
    url: str, headers: Mapping[str, str], method: str = "GET", timeout_s: float | None = None
) -> tuple[int, str, Mapping[str, str]]:
    """Status, body and headers (names in lower case) of one request.

    Raises:
        OSError, ValueError: also where the body is above `MOST_BYTES`.
    """
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with _opener.open(request, timeout=timeout_s or TIMEOUT_S) as response:
            body = response.read(MOST_BYTES + 1)
            if len(body) > MOST_BYTES:
                raise ValueError(f"{url} answers with more than {MOST_BYTES} bytes")
            return response.status, body.decode(), _lower(response.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", _lower(error.headers)
    except http.client.HTTPException as error:
        raise ValueError(f"{url} does not speak HTTP ({error!r})") from None


def _lower(headers: Message) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _seconds_until(moment: datetime) -> float:
    return (moment - datetime.now(UTC)).total_seconds()


def _timestamp(text: str) -> datetime:
    """`2015-01-05T18:02:00Z`. Raises ValueError."""
    return datetime.strptime(text.strip(), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


class Aws:
    """Spot instance-action (about 2 minutes ahead) and the rebalance recommendation ("elevated risk")."""

    interval_s = 5.0

    def __init__(self, base: str = LINK_LOCAL) -> None:
        self.base, self._token, self._recommended = base, "", ""

    def poll(self) -> list[Notice]:
        notices = []
        if recommendation := self._get("events/recommendations/rebalance"):
            moment = str(json.loads(recommendation)["noticeTime"])
            if moment != self._recommended:
                self._recommended = moment
                notices.append(Notice(Action.SAVE, "AWS rebalance recommendation"))
        if action := self._get("spot/instance-action"):
            said = json.loads(action)
            seconds = _seconds_until(_timestamp(said["time"]))
            if said["action"] == "hibernate":
                notices.append(Notice(Action.STOP, "AWS spot instance-action hibernate"))  # begins at once
            elif said["action"] in ("stop", "terminate") and seconds > -_OLD_S:
                notices.append(Notice(Action.STOP, f"AWS spot instance-action {said['action']}", seconds))
        return notices

    def _get(self, path: str) -> str:
        for _ in range(2):
            if not self._token:
                self._token = self.token()
            headers = {"X-aws-ec2-metadata-token": self._token}
            status, body, _ = fetch(f"{self.base}/latest/meta-data/{path}", headers)
            if status == 401:
                self._token = ""
                continue
            return body if status == 200 else ""
        return ""

    def token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        status, body, _ = fetch(f"{self.base}/latest/api/token", headers, "PUT")
        if status != 200 or not body.isascii() or not body.isprintable() or not body:
            raise ValueError(f"no IMDSv2 token (HTTP {status})")
        return body

    def present(self) -> bool:
        return bool(self.token())


class Gcp:
    """`preempted` turns TRUE up to 30 s before the end (up to 120 s where the instance is set to say so)."""

    interval_s = 1.0  # between long polls
    WAIT_S = 60

    def __init__(self, base: str = LINK_LOCAL) -> None:
        self.base, self._etag = base, ""

    def poll(self) -> list[Notice]:
        query = f"?wait_for_change=true&timeout_sec={self.WAIT_S}&last_etag={self._etag}" if self._etag else ""
        url = f"{self.base}/computeMetadata/v1/instance/preempted{query}"
        timeout_s = self.WAIT_S + 10 if self._etag else TIMEOUT_S
        status, body, headers = fetch(url, {"Metadata-Flavor": "Google"}, timeout_s=timeout_s)
        if status != 200:
            raise ValueError(f"HTTP {status}")
        etag = headers.get("etag", "")
        self._etag = etag if etag.isalnum() else ""
        if body.strip().upper() == "TRUE":
            return [Notice(Action.STOP, "GCP preemption")]
        return []

    def present(self) -> bool:
        url = f"{self.base}/computeMetadata/v1/instance/preempted"
        status, _, headers = fetch(url, {"Metadata-Flavor": "Google"})
        return status == 200 and headers.get("metadata-flavor") == "Google"


class Azure:
    """Scheduled events. The first call switches them on and may take two minutes."""

    interval_s = 5.0

    def __init__(self, base: str = LINK_LOCAL) -> None:
        self.base, self._name = base, ""
        self._first_s, self._later_s = 125.0, 10.0  # time-outs
        self._saved: set[str] = set()

    def poll(self) -> list[Notice]:
        url = f"{self.base}/metadata/scheduledevents?api-version=2020-07-01"
        timeout_s, self._first_s = self._first_s, self._later_s
        status, body, _ = fetch(url, {"Metadata": "true"}, timeout_s=timeout_s)
        if status != 200:
            raise ValueError(f"HTTP {status}")
        notices = []
        for event in json.loads(body)["Events"]:
            kind, resources = event["EventType"], event.get("Resources", [])
            if resources and self.name() and self.name() not in resources:
                continue  # another machine of the scale set
            if kind in ("Preempt", "Terminate"):
                seconds = None
                with contextlib.suppress(ValueError, TypeError):  # empty once it has begun
                    seconds = _seconds_until(email.utils.parsedate_to_datetime(event.get("NotBefore")))
                notices.append(Notice(Action.STOP, f"Azure {kind}", seconds))
            elif kind in ("Reboot", "Redeploy") and event["EventId"] not in self._saved:
                self._saved.add(event["EventId"])
                notices.append(Notice(Action.SAVE, f"Azure {kind}"))
        return notices

    def name(self) -> str:
        """This machine's name in the events."""
        if not self._name:
            url = f"{self.base}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            status, body, _ = fetch(url, {"Metadata": "true"})
            self._name = body.strip() if status == 200 else ""
        return self._name

    def present(self) -> bool:
        url = f"{self.base}/metadata/instance?api-version=2021-02-01"
        status, body, _ = fetch(url, {"Metadata": "true"})
        return status == 200 and "compute" in json.loads(body)


class Alibaba:
    """The spot instance's time of release, five minutes ahead."""

    interval_s = 5.0

    def __init__(self, base: str = "http://100.100.100.200") -> None:
        self.url = f"{base}/latest/meta-data/instance/spot/termination-time"

    def poll(self) -> list[Notice]:
        status, body, _ = fetch(self.url, {})
        if status != 200 or not body.strip():
            return []
        seconds = _seconds_until(_timestamp(body))
        return [Notice(Action.STOP, "Alibaba spot termination", seconds)] if seconds > -_OLD_S else []

    def present(self) -> bool:
        return fetch(self.url.rpartition("/spot/")[0], {})[0] == 200


# ---------------------------------------------------------------------------------------------------------------------
# On this machine


class File:
    """A file that appears."""

    interval_s = 1.0

    def __init__(self, path: Path) -> None:
        self.path = path

    def poll(self) -> list[Notice]:
        return [Notice(Action.STOP, f"file {self.path}")] if self.path.exists() else []


class Command:
    """A command that exits with 0."""

    interval_s = 5.0
    TIMEOUT_S = 30.0

    def __init__(self, command: str, directory: Path) -> None:
        self.command, self.directory = command, directory

    def poll(self) -> list[Notice]:
        with waited_for:
            process = subprocess.Popen(
                ["sh", "-c", self.command],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code = process.wait(self.TIMEOUT_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        return [Notice(Action.STOP, f"command {self.command!r}")] if code == 0 else []


# ---------------------------------------------------------------------------------------------------------------------


def choose(config: Config, stop: threading.Event) -> Poller | None:
    """The poller that `reclaim.notice` names; for `auto` the provider's, or whichever metadata server answers."""
    kinds: dict[str, Callable[[], Aws | Gcp | Azure | Alibaba]] = {
        "aws": Aws, "gcp": Gcp, "azure": Azure, "alibaba": Alibaba,
    }  # fmt: skip
    notice = config.reclaim.notice
    name, _, argument = notice.partition(":")
    if name == "file":
        return File(config.project / Path(argument).expanduser())
    if name == "command":
        return Command(argument, config.project)
    if notice == "auto" and config.run.provider in kinds:
        notice = config.run.provider
    if notice in kinds:
        return kinds[notice]()
    if notice == "none":
        return None
    for pause in (0.0, 10.0, 60.0):  # at boot the network may come after us
        if stop.wait(pause):
            return None
        for kind in kinds.values():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                poller = kind()
                if poller.present():
                    return poller
    return None


class Watcher:
    """Asks in a thread of its own until the first notice to stop, and tells `report` of each notice.

    Args:
        report: called in the thread with the notice and `time.monotonic()` at which the platform kills, where known.
    """

    def __init__(self, config: Config, report: Callable[[Notice, float | None], None]) -> None:
        self._config, self._report = config, report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="notices", daemon=True)

    def start(self) -> None:
        if self._config.reclaim.notice != "none":
            self._thread.start()

    def stop(self) -> None:
        """Ask no more; a request under way is not waited for."""
        self._stop.set()

    def _watch(self) -> None:
        poller = choose(self._config, self._stop)
        failures = 0
        while poller is not None and not self._stop.is_set():
            notices: list[Notice] = []
            try:
                notices = poller.poll()
                failures = 0
            except Exception as error:  # a dead or lying server, whatever it does, is no notice
                failures += 1
                if failures == 12:
                    log.warning("%s does not answer (%s); notices may be missed", type(poller).__name__, error)
            for notice in notices:
                now = time.monotonic()
                seconds = notice.seconds
                if seconds is None and notice.want >= Action.STOP:
                    seconds = self._config.reclaim.grace_s - poller.interval_s  # it may have come just after we asked
                self._report(notice, None if seconds is None else now + max(0.0, seconds))
                if notice.want >= Action.STOP:
                    return
            backoff = min(3, 1 + failures)
            self._stop.wait(poller.interval_s * backoff * random.uniform(0.8, 1.2))
