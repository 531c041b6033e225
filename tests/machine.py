"""A fresh machine to run commands on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

Scaffold = Callable[..., "subprocess.CompletedProcess[str]"]  # runs `scaffold` with these words


@dataclass
class Machine:
    """A home directory, and commands that see nothing of the machine and the user that the tests run on."""

    home: Path
    env: dict[str, str] = field(default_factory=dict)

    def run(
        self, *command: str | Path, cwd: Path, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command without a terminal; its exit code is the caller's to judge."""
        return subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def git(self, *arguments: str | Path, cwd: Path) -> str:
        done = self.run("git", *arguments, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def commit(self, repo: Path, message: str = "change") -> str:
        """Commit everything in `repo`, as somebody; returns the commit's id."""
        settings = (
            "user.name=Somebody",
            "user.email=s@example.com",
            "commit.gpgsign=false",
            "core.hooksPath=/dev/null",
        )
        if not (repo / ".git").exists():
            self.git("init", "--quiet", "--initial-branch=main", cwd=repo)
        self.git("add", "--all", cwd=repo)
        self.git(
            *(word for setting in settings for word in ("-c", setting)),
            "commit",
            "--quiet",
            "--message",
            message,
            cwd=repo,
        )
        return self.git("rev-parse", "HEAD", cwd=repo)

    def python(self, checkout: Path, *arguments: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run Python with the `scaffold` of `checkout`."""
        return self.run(sys.executable, *arguments, cwd=cwd, env={"PYTHONPATH": str(checkout), **env})
