"""Notices of a coming reclaim: the metadata servers of the clouds, a file that appears, a command of the user's own.

One thread of a node's launcher asks; ranks never do. A metadata server is not trusted: no proxy, no redirect, a
time-out, at most 64 KiB, and an answer that is not a notice in its documented form is ignored.

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
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

from trainer.config.settings import Config
from trainer.processes import waited_for
from trainer.reclaim.request import Action, Request

log = logging.getLogger(__name__)

TIMEOUT_S, COMMAND_TIMEOUT_S = 2.0, 30.0
MOST_BYTES = 64 << 10
_OLD_S = 300.0  # a time of termination that long ago was not kept, and stays in the metadata


class Poller(Protocol):
    """Asks once. Raises any error; the caller treats it as no notice."""

    interval_s: float

    def poll(self) -> list[Request]: ...


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
            return response.status, body.decode(), {name.lower(): value for name, value in response.headers.items()}
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", {}
    except http.client.HTTPException as error:
        raise ValueError(f"{url} does not speak HTTP ({error!r})") from None


def _deadline(moment: datetime) -> float:
    """The `time.monotonic()` of a moment of the calendar."""
    return time.monotonic() + (moment - datetime.now(UTC)).total_seconds()


def _timestamp(text: str) -> datetime:
    """`2015-01-05T18:02:00Z`. Raises ValueError."""
    return datetime.strptime(text.strip(), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


class MetadataServer:
    """A cloud's server of facts about this machine; a subclass knows what a notice looks like there."""

    base = "http://169.254.169.254"
    headers: ClassVar[Mapping[str, str]] = {}
    interval_s = 5.0

    def __init__(self, base: str = "") -> None:
        self.base = base or self.base
        self.answered: Mapping[str, str] = {}  # headers of the last answer
        self._saved_for: set[str] = set()

    def get(self, path: str, timeout_s: float | None = None) -> str:
        """What is found there, empty where nothing is. Raises OSError, ValueError."""
        status, body, self.answered = fetch(f"{self.base}/{path}", self.headers, timeout_s=timeout_s)
        return body if status == 200 else ""

    def save_once(self, event: str, source: str) -> list[Request]:
        """The request for an early save, the first time that `event` is seen."""
        if event in self._saved_for:
            return []
        self._saved_for.add(event)
        return [Request(Action.SAVE, source)]

    def stop_at(self, moment: datetime, source: str) -> list[Request]:
        """The request to stop by `moment`, unless it is one that an earlier instance has left behind."""
        deadline = _deadline(moment)
        return [Request(Action.STOP, source, deadline)] if deadline > time.monotonic() - _OLD_S else []


class Aws(MetadataServer):
    """Spot instance-action (about 2 minutes ahead) and the rebalance recommendation ("elevated risk")."""

    def __init__(self, base: str = "") -> None:
        super().__init__(base)
        self._token = ""

    def poll(self) -> list[Request]:
        found = []
        if recommendation := self.get("latest/meta-data/events/recommendations/rebalance"):
            found += self.save_once(str(json.loads(recommendation)["noticeTime"]), "AWS rebalance recommendation")
        if answer := self.get("latest/meta-data/spot/instance-action"):
            said = json.loads(answer)
            source, moment = f"AWS spot instance-action {said['action']}", _timestamp(said["time"])
            if said["action"] == "hibernate":
                found.append(Request(Action.STOP, source))  # begins at once
            elif said["action"] in ("stop", "terminate"):
                found += self.stop_at(moment, source)
        return found

    def get(self, path: str, timeout_s: float | None = None) -> str:
        for _ in range(2):
            self._token = self._token or self.token()
            status, body, _ = fetch(f"{self.base}/{path}", {"X-aws-ec2-metadata-token": self._token})
            if status != 401:
                return body if status == 200 else ""
            self._token = ""  # it has expired
        return ""

    def token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        status, body, _ = fetch(f"{self.base}/latest/api/token", headers, "PUT")
        if status != 200 or not body.isascii() or not body.isprintable() or not body:
            raise ValueError(f"no IMDSv2 token (HTTP {status})")
        return body

    def present(self) -> bool:
        return bool(self.token())


class Gcp(MetadataServer):
    """`preempted` turns TRUE up to 30 s before the end (up to 120 s where the instance is set to say so)."""

    headers: ClassVar[Mapping[str, str]] = {"Metadata-Flavor": "Google"}
    interval_s = 1.0  # between long polls
    WAIT_S = 60
    path = "computeMetadata/v1/instance/preempted"
    _etag = ""

    def poll(self) -> list[Request]:
        query, timeout_s = "", TIMEOUT_S
        if self._etag:
            query = f"?wait_for_change=true&timeout_sec={self.WAIT_S}&last_etag={self._etag}"
            timeout_s = self.WAIT_S + 10
        body = self.get(self.path + query, timeout_s)
        if not body:
            raise ValueError("neither TRUE nor FALSE")
        etag = self.answered.get("etag", "")
        self._etag = etag if etag.isalnum() else ""
        return [Request(Action.STOP, "GCP preemption")] if body.strip().upper() == "TRUE" else []

    def present(self) -> bool:
        return bool(self.get(self.path)) and self.answered.get("metadata-flavor") == "Google"


class Azure(MetadataServer):
    """Scheduled events. The first call switches them on and may take two minutes."""

    headers: ClassVar[Mapping[str, str]] = {"Metadata": "true"}
    FIRST_TIMEOUT_S, TIMEOUT_S = 125.0, 10.0

    def __init__(self, base: str = "") -> None:
        super().__init__(base)
        self._name, self._timeout_s = "", self.FIRST_TIMEOUT_S

    def poll(self) -> list[Request]:
        timeout_s, self._timeout_s = self._timeout_s, self.TIMEOUT_S
        found = []
        for event in json.loads(self.get("metadata/scheduledevents?api-version=2020-07-01", timeout_s))["Events"]:
            kind, resources = event["EventType"], event.get("Resources", [])
            if resources and self.name() and self.name() not in resources:
                continue  # another machine of the scale set
            if kind in ("Preempt", "Terminate"):
                deadline = None
                with contextlib.suppress(ValueError, TypeError):  # empty once it has begun
                    deadline = _deadline(email.utils.parsedate_to_datetime(event.get("NotBefore")))
                found.append(Request(Action.STOP, f"Azure {kind}", deadline))
            elif kind in ("Reboot", "Redeploy"):
                found += self.save_once(event["EventId"], f"Azure {kind}")
        return found

    def name(self) -> str:
        """This machine's name in the events."""
        self._name = self._name or self.get("metadata/instance/compute/name?api-version=2021-02-01&format=text").strip()
        return self._name

    def present(self) -> bool:
        return "compute" in json.loads(self.get("metadata/instance?api-version=2021-02-01"))


class Alibaba(MetadataServer):
    """The spot instance's time of release, five minutes ahead."""

    base = "http://100.100.100.200"

    def poll(self) -> list[Request]:
        moment = self.get("latest/meta-data/instance/spot/termination-time")
        return self.stop_at(_timestamp(moment), "Alibaba spot termination") if moment.strip() else []

    def present(self) -> bool:
        return bool(self.get("latest/meta-data/instance"))


CLOUDS: dict[str, type[Aws | Gcp | Azure | Alibaba]] = {"aws": Aws, "gcp": Gcp, "azure": Azure, "alibaba": Alibaba}


# ---------------------------------------------------------------------------------------------------------------------
# On this machine


@dataclass
class Local:
    """What this machine itself can see."""

    source: str
    happened: Callable[[], bool]
    interval_s: float

    def poll(self) -> list[Request]:
        return [Request(Action.STOP, self.source)] if self.happened() else []


def file(path: Path) -> Local:
    """A file that appears."""
    return Local(f"file {path}", path.exists, 1.0)


def command(line: str, directory: Path) -> Local:
    """A command that exits with 0."""
    return Local(f"command {line!r}", partial(_succeeds, line, directory), 5.0)


def _succeeds(line: str, directory: Path) -> bool:
    with waited_for:
        process = subprocess.Popen(
            ["sh", "-c", line], cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(COMMAND_TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


# ---------------------------------------------------------------------------------------------------------------------


def choose(config: Config, stop: threading.Event) -> Poller | None:
    """The poller that `reclaim.notice` names; for `auto` the provider's, or whichever metadata server answers."""
    notice = config.reclaim.notice
    name, _, argument = notice.partition(":")
    if name == "file":
        return file(config.project / Path(argument).expanduser())
    if name == "command":
        return command(argument, config.project)
    if notice == "auto" and config.run.provider in CLOUDS:
        notice = config.run.provider
    if notice in CLOUDS:
        return CLOUDS[notice]()
    if notice == "none":
        return None
    for pause in (0.0, 10.0, 60.0):  # at boot the network may come after us
        if stop.wait(pause):
            return None
        for kind in CLOUDS.values():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                poller = kind()
                if poller.present():
                    return poller
    return None


def watch(config: Config, report: Callable[[Request], None], stop: threading.Event) -> None:
    """Ask until the first notice to stop, or until `stop` is set; to be run in a thread of its own.

    Args:
        report: called with each notice, to which a deadline is given where the platform did not say one.
    """
    poller = choose(config, stop)
    failures = 0
    while poller is not None and not stop.is_set():
        try:
            found, failures = poller.poll(), 0
        except Exception as error:  # a server that is down or answers nonsense gives no notice
            found, failures = [], failures + 1
            if failures == 12:
                log.warning("%s does not answer (%s); notices may be missed", type(poller).__name__, error)
        for request in found:
            if request.action < Action.STOP:
                report(request)
                continue
            now = time.monotonic()
            grace_s = config.reclaim.grace_s - poller.interval_s  # it may have come just after the last question
            deadline = now + grace_s if request.deadline is None else request.deadline
            report(replace(request, deadline=max(now, deadline)))
            return
        stop.wait(poller.interval_s * min(3, 1 + failures) * random.uniform(0.8, 1.2))
