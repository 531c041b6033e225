"""What the tests of the product share: a fresh machine's surroundings, scratch copies of the product, and git."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deployed import Deployed, renderer
from tests.machine import Machine, Scaffold

ROOT = Path(__file__).resolve().parent.parent
_PRODUCT = (
    "pyproject.toml",
    "copier.yml",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    ".gitignore",
    ".gitattributes",
    "scaffold",
    "template",
)
_LEFTOVERS = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis", "*.bundle")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A fresh machine: an empty home, git without a configuration; also for code that runs in this process."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith(("GIT_", "COPIER_", "XDG_")) or name == "PYTHONPATH"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return Machine(home, dict(os.environ))


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the product's files as they are now."""
    copy = tmp_path_factory.mktemp("pristine") / "product"
    copy.mkdir()
    for name in _PRODUCT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=_LEFTOVERS)
        elif source.exists():
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture
def checkout(machine: Machine, pristine: Path, tmp_path: Path) -> Path:
    """A scratch checkout of the product: one commit, no tags."""
    copy = tmp_path / "product"
    shutil.copytree(pristine, copy)
    machine.commit(copy, "Product")
    return copy


@pytest.fixture
def scaffold(machine: Machine, checkout: Path, tmp_path: Path) -> Scaffold:
    """Call the scratch checkout's command line in a work folder: `scaffold("new", "demo", "--defaults")`."""
    work = tmp_path / "work"
    work.mkdir()

    def call(*arguments: str | Path, cwd: Path = work, **env: str) -> subprocess.CompletedProcess[str]:
        return machine.python(checkout, "-m", "scaffold", *arguments, cwd=cwd, **env)

    return call


@pytest.fixture(scope="session")
def deployed(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    """Render a project for every deploy target: `deployed(provider="aws", nodes=2)`; not to be changed."""
    return renderer(pristine, tmp_path_factory.mktemp("deployed"))
