"""Which code a run was made with: the project's git commit, and the template's version it was rendered from."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

GIT_S = 10.0  # a slow volume must not hold up a start


def code_version(project: Path) -> dict[str, Any]:
    """The `commit` that the project stands at, and whether it is `dirty` (files differ); empty where git cannot say."""
    command = ["git", "--no-optional-locks", "-C", str(project), "status", "--porcelain=v2", "--branch"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=True).stdout.splitlines()
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "")
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}


def template_version(project: Path) -> str:
    """The template's version, as Copier recorded it; empty where it did not."""
    try:
        for line in (project / ".copier-answers.yml").read_text(encoding="utf-8").splitlines():
            if line.startswith("_commit:"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""
