"""The READMEs say what is true: links lead somewhere, examples run, the command of the tests is found by .ci/run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "template"
READMES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests/benchmarks/README.md",
    TEMPLATE / "README.md.jinja",
    TEMPLATE / "tasks/README.md",
    TEMPLATE / "trainer/README.md",
]


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(path: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if not link.startswith(("https://", "#")):
            assert (path.parent / link).exists(), link


def test_the_readme_has_the_one_command_of_the_tests() -> None:
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]
    assert [command.endswith("pytest") for command in commands].count(True) == 1


def test_the_commands_of_the_readmes_are_there() -> None:
    source = (TEMPLATE / "trainer/cli.py").read_text() + (ROOT / "scaffold/cli.py").read_text()
    for path in READMES:
        text = path.read_text()
        for command in {
            *re.findall(r"python -m trainer ([a-z]+)", text),
            *re.findall(r"[`$] ?scaffold ([a-z]+)", text),
        }:
            assert re.search(rf"^def {command}\(", source, re.MULTILINE), f"{path.name}: {command}"
        for script in re.findall(r"`([a-z_]+\.py)[ `]", text) if path.parent.name == "benchmarks" else ():
            assert (path.parent / script).is_file(), script


def test_the_task_of_the_readme_trains(tmp_path: Path) -> None:
    for folder in ("trainer", "tasks"):
        shutil.copytree(TEMPLATE / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    example = re.search(r"```python\n(.*?)```", (TEMPLATE / "tasks/README.md").read_text(), re.DOTALL)
    assert example
    (tmp_path / "tasks/points").mkdir()
    (tmp_path / "tasks/points/__init__.py").write_text(example[1])
    (tmp_path / "config.yaml").write_text("task: points\n")
    command = [sys.executable, "-m", "trainer", "train", "train.steps=2", "logging.tensorboard=false"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^step 2/2   loss [\d.]+   accuracy ", done.stdout, re.MULTILINE), done.stdout
