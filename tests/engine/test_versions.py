"""What a checkpoint says of the code that made it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trainer.versions import code_version, template_version


def _git(project: Path, *words: str) -> str:
    command = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    (tmp_path / "model.py").write_text("1")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "one")
    head = _git(tmp_path, "rev-parse", "HEAD")
    assert code_version(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "model.py").write_text("2")
    assert code_version(tmp_path) == {"commit": head, "dirty": True}


def test_without_git_or_a_repository_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert code_version(tmp_path) == {}
    monkeypatch.setenv("PATH", "")
    assert code_version(tmp_path) == {}
    assert code_version(tmp_path / "nowhere") == {}


def test_the_template_version_is_what_copier_recorded(tmp_path: Path) -> None:
    assert template_version(tmp_path) == ""
    (tmp_path / ".copier-answers.yml").write_text("# comment\n_commit: v1.2-3-gabc\n_src_path: x\n")
    assert template_version(tmp_path) == "v1.2-3-gabc"
