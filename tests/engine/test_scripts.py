"""startup/onstart.sh and restart.sh: what they need, what they refuse, and that a signal never waits for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trainer

PROJECT = Path(trainer.__file__).resolve().parents[1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The scripts in a folder with a space in its name, beside a package that only says how it was called."""
    path = tmp_path / "my project"
    (path / "startup").mkdir(parents=True)
    shutil.copy(PROJECT / "restart.sh", path)
    shutil.copy(PROJECT / "startup/onstart.sh", path / "startup")
    (path / "startup/requirements.txt").write_text("# none\n")
    (path / "trainer").mkdir()
    (path / "trainer/__init__.py").touch()  # else the real package comes first where PYTHONPATH names it
    (path / "trainer/__main__.py").write_text("import sys; print(sys.executable); print(sys.argv[1:])")
    return path


def _with_environment(project: Path) -> Path:
    """The tests' own, where the scripts look for it."""
    (project / ".venv").symlink_to(sys.prefix)
    return project


def _run(script: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(script), *words], cwd="/", env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def _python(folder: Path, body: str) -> Path:
    """An interpreter that is asked before the real one."""
    stub = folder / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\n{body}\nexec "{sys.executable}" "$@"\n')
    stub.chmod(0o755)
    return stub


@pytest.mark.parametrize("script", ["restart.sh", "startup/onstart.sh"])
def test_words_reach_the_launcher_unchanged_from_anywhere(project: Path, script: str) -> None:
    done = _run(_with_environment(project) / script, "--gpus", "2", "run.name=a b", "data.path=*$HOME")
    assert done.returncode == 0, done.stderr
    assert "['launch', '--gpus', '2', 'run.name=a b', 'data.path=*$HOME']" in done.stdout
    assert "/.venv/bin/python" in done.stdout


def test_without_torch_restart_says_so_in_one_line_and_exits_78(project: Path) -> None:
    stub = _python(project, 'case "$2" in *find_spec*) exit 1 ;; esac')
    done = _run(project / "restart.sh", PATH=f"{stub.parent}:/usr/bin:/bin")
    assert done.returncode == 78
    assert done.stderr.count("\n") == 1 and "startup/onstart.sh" in done.stderr


def test_without_a_python_both_say_so_and_exit_78(project: Path) -> None:
    stub = _python(project, "exit 1")
    for name in ("python3.11", "python3.12", "python3.13", "python3.14"):
        (stub.parent / name).symlink_to(stub)
    for script in ("restart.sh", "startup/onstart.sh"):
        done = _run(project / script, PATH=f"{stub.parent}:/usr/bin:/bin", PYTHON="")
        assert done.returncode == 78, done.stderr
        assert "Python >= 3.11" in done.stderr


def test_packages_that_cannot_be_installed_exit_1_and_start_nothing(project: Path) -> None:
    (_with_environment(project) / "startup/requirements.txt").write_text("no-such-package-here==1 \\\n  --hash=x\n")
    (project / ".venv").unlink()
    stub = _python(project, 'case "$*" in *pip*install*) echo no network >&2; exit 7 ;; esac')
    inner = project / ".venv" / "bin"
    inner.mkdir(parents=True)
    shutil.copy(stub, inner / "python")
    done = _run(project / "startup/onstart.sh")
    assert done.returncode == 1, done.stderr
    assert "could not be installed" in done.stderr and done.stdout == ""


@pytest.mark.parametrize(("settings", "code"), [("", 75), ("restart:\n  exit_reclaimed: 143  # for Kubeflow\n", 143)])
def test_a_signal_does_not_wait_for_packages(project: Path, settings: str, code: int) -> None:
    (project / "startup/nexgpu.yaml").write_text(settings)
    marker = project / "installing"
    stub = _python(project, f'case "$*" in *venv*) touch "{marker}"; exec sleep 100 ;; esac')
    process = subprocess.Popen([str(project / "startup/onstart.sh")], env={**os.environ, "PYTHON": str(stub)})
    end = time.monotonic() + 30
    while not marker.exists():
        assert time.monotonic() < end
    began = time.monotonic()
    process.terminate()
    assert process.wait(30) == code
    assert time.monotonic() - began < 10


def test_signals_at_any_moment_of_the_way_to_python_are_not_lost(project: Path) -> None:
    """Blocked from before Python starts until it can handle them."""
    (_with_environment(project) / "trainer/__main__.py").write_text(
        "import signal, sys\n"
        "print(sorted(number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])))\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])\n"
    )
    done = _run(project / "restart.sh")
    assert done.stdout.strip() == "['SIGINT', 'SIGTERM', 'SIGUSR1']"
    assert done.returncode == 75


@pytest.mark.slow
def test_an_empty_machine_is_set_up_once_and_needs_no_network_after_that(project: Path) -> None:
    shutil.copy(PROJECT / "startup/requirements.txt", project / "startup")
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    first = subprocess.run(
        [str(project / "startup/onstart.sh"), "x=1"], env=environment, capture_output=True, text=True
    )
    assert first.returncode == 0, first.stderr
    assert "['launch', 'x=1']" in first.stdout
    offline = {**environment, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_NO_INDEX": "1"}
    began = time.monotonic()
    again = subprocess.run([str(project / "startup/onstart.sh")], env=offline, capture_output=True, text=True)
    assert again.returncode == 0 and again.stderr == "", again.stderr
    assert time.monotonic() - began < 30


def test_the_scripts_can_be_run_and_read_by_any_shell() -> None:
    for script in ("restart.sh", "startup/onstart.sh"):
        assert os.access(PROJECT / script, os.X_OK)
        for shell in ("sh", "bash"):
            subprocess.run([shell, "-n", str(PROJECT / script)], check=True)
