"""What the tests share: real ranks, and a project of their own in which the engine runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import toy
from ranks import ranks

import trainer

__all__ = ["project", "ranks"]
HERE = Path(trainer.__file__).resolve().parents[1]
SETTINGS = [
    "task=toy", "run.name=run", "data.global_batch=7", "data.micro_batch=2", "volume.allow_ephemeral=true",
    "reclaim.notice=none", "logging.tensorboard=false",
]  # fmt: skip


@dataclass(frozen=True)
class Project:
    """The engine and restart.sh as they are here, with the toy task."""

    folder: Path

    @property
    def run_dir(self) -> Path:
        return self.folder / "checkpoints" / "run"

    def start(self, *words: str, log: str = "log") -> psutil.Popen:
        """Start `words` in the project: a command and settings."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with (self.folder / log).open("ab") as out:
            return psutil.Popen(
                [*words, *SETTINGS], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Project:
    shutil.copytree(HERE / "trainer", tmp_path / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "restart.sh", tmp_path)
    (tmp_path / "tasks" / "toy").mkdir(parents=True)
    (tmp_path / "tasks" / "__init__.py").touch()
    shutil.copy(toy.__file__, tmp_path / "tasks" / "toy" / "__init__.py")
    return Project(tmp_path)
