"""A real systemd service manager for tests: a user manager in a mount namespace of its own, gone at the end.

    with systemd_manager(tmp_path) as manager:
        manager.start("demo.service", unit_text)
        manager.wait("demo.service", "ActiveState", "inactive")

Needs root and systemd; the machine need not have been booted by it. System-only settings (User=) do not work here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.slurm_cluster import until

# A user manager refuses to start where /run/systemd/system is missing (/run is the namespace's own), and as process 1.
START = """\
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system /run/user/0 && chmod 700 /run/user/0 || exit 1
/lib/systemd/systemd --user &
wait
"""


@dataclass(frozen=True)
class Manager:
    """A running manager; `units` is the folder that it reads its unit files from."""

    pid: int
    units: Path
    environment: dict[str, str]

    def command(self, *words: str, check: bool = True) -> str:
        """Standard output of `systemctl --user WORDS`."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "systemctl", "--user"]
        done = subprocess.run([*enter, *words], env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or not check, f"systemctl {words}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, name: str, text: str) -> None:
        """Write the unit file, enable it and start it."""
        (self.units / name).write_text(text)
        self.command("daemon-reload")
        self.command("enable", "--quiet", "--now", name)

    def show(self, name: str) -> dict[str, str]:
        """The unit's properties: ActiveState, Result, NRestarts, ExecMainStatus, MainPID and the rest."""
        return dict(line.split("=", 1) for line in self.command("show", name).splitlines() if "=" in line)

    def wait(self, name: str, key: str, *values: str, timeout_s: float = 60.0) -> dict[str, str]:
        """The unit's properties once `key` has one of `values`."""
        try:
            until(lambda: self.show(name)[key] in values, f"{name}: {key} in {values}", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.show(name)[key]}") from None
        return self.show(name)


@contextlib.contextmanager
def systemd_manager(directory: Path) -> Iterator[Manager]:
    """Start a manager whose configuration lies below `directory`; every process of its units is killed at the end."""
    units = directory / "systemd-config/systemd/user"
    units.mkdir(parents=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(directory),
        "XDG_CONFIG_HOME": str(directory / "systemd-config"),
        "XDG_RUNTIME_DIR": "/run/user/0",
    }
    # A PID namespace too: when its first process is killed, so is everything that the manager started.
    unshare = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--mount-proc", "--kill-child"]
    log = directory / "systemd.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*unshare, "sh", "-c", START], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        inside = first_child(process.pid)
        manager = Manager(inside, units, environment)
        until(
            lambda: manager.command("is-system-running", check=False).strip() in ("running", "degraded"),
            f"systemd (see {log})",
        )
        yield manager
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def first_child(pid: int) -> int:
    """Process id, seen from here, of what `unshare --fork` started."""

    def children() -> list[int]:
        return [child.pid for child in psutil.Process(pid).children()]

    until(children, "the namespace's first process")
    return children()[0]
