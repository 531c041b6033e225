"""However the command was installed, a project made today is updated by plain `copier update` tomorrow.

Plain means: no flags, no terminal, no --trust. And what the user changed survives.
"""

from __future__ import annotations

import json
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.machine import Machine

STORED_BUNDLE = "~/.local/share/scaffold/template.bundle"


class Environment:
    """A virtual environment that borrows the tests' libraries, so that installing needs no network."""

    def __init__(self, machine: Machine, path: Path) -> None:
        self.machine, self.bin = machine, path / "bin"
        venv.create(path, with_pip=False)
        packages = next((path / "lib").glob("python3*")) / "site-packages"
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def pip(self, *arguments: str | Path, cwd: Path) -> None:
        done = self.machine.run(self.bin / "python", "-m", "pip", *arguments, cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, *what: str | Path, cwd: Path) -> None:
        offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
        self.pip("install", *offline, *what, cwd=cwd)

    def wheel(self, source: Path, into: Path) -> Path:
        self.pip(
            "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", into, source, cwd=into.parent
        )
        return max(into.glob("*.whl"), key=lambda file: file.stat().st_mtime_ns)

    def new(self, name: str, cwd: Path) -> Path:
        done = self.machine.run(self.bin / "scaffold", "new", name, "--defaults", cwd=cwd)
        assert done.returncode == 0, done.stderr
        assert not list((cwd / name).rglob("__pycache__"))
        return cwd / name

    def copier_update(self, project: Path) -> None:
        done = self.machine.run(self.bin / "python", "-m", "copier", "update", cwd=project)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def environment(machine: Machine, tmp_path: Path) -> Environment:
    return Environment(machine, tmp_path / "venv")


def edit_as_user(machine: Machine, project: Path) -> None:
    with (project / "config.yaml").open("a") as file:
        file.write("# my own line\n")
    (project / "trainer/mine.py").write_text('"""Mine."""\n')
    machine.commit(project, "Mine")


def improve_template(machine: Machine, checkout: Path, text: str = "Improved.", version: str = "") -> str:
    """Change what is rendered, as the next release of the product would, and commit it."""
    readme = checkout / "template/README.md.jinja"
    readme.write_text(readme.read_text() + f"\n{text}\n")
    (checkout / "template/trainer/novelty.py").write_text(f'"""{text}"""\n')
    if version:
        pyproject = checkout / "pyproject.toml"
        pyproject.write_text(pyproject.read_text().replace('version = "0.1.0"', f'version = "{version}"'))
    return machine.commit(checkout, text)


def assert_improved(project: Path, text: str = "Improved.") -> None:
    assert text in (project / "README.md").read_text()
    assert (project / "trainer/novelty.py").read_text() == f'"""{text}"""\n'
    assert (project / "config.yaml").read_text().endswith("# my own line\n")
    assert (project / "trainer/mine.py").read_text() == '"""Mine."""\n'


def source_of(project: Path) -> str:
    answers = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert answers["_commit"]
    return str(answers["_src_path"])


@pytest.mark.parametrize("options", [("--editable",), ()], ids=["editable", "pip install ."])
def test_from_a_checkout(
    environment: Environment, machine: Machine, checkout: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    environment.install(*options, ".", cwd=checkout)
    project = environment.new("demo", tmp_path)
    assert source_of(project) == str(checkout)
    edit_as_user(machine, project)
    improve_template(machine, checkout)
    environment.copier_update(project)
    assert_improved(project)


def test_from_a_checkout_with_tags_with_the_next_tag(
    environment: Environment, machine: Machine, checkout: Path, tmp_path: Path
) -> None:
    machine.git("tag", "v0.1.0", cwd=checkout)
    environment.install(".", cwd=checkout)
    project = environment.new("demo", tmp_path)
    edit_as_user(machine, project)
    improve_template(machine, checkout)
    environment.copier_update(project)
    assert not (project / "trainer/novelty.py").exists()
    machine.git("tag", "v0.2.0", cwd=checkout)
    environment.copier_update(project)
    assert_improved(project)


@pytest.mark.parametrize("tagged", [False, True], ids=["no tags", "tags"])
def test_from_wheels(environment: Environment, machine: Machine, checkout: Path, tmp_path: Path, tagged: bool) -> None:
    """Each wheel is all there is: the checkout it was built from is gone. An old project skips a release."""
    if tagged:
        machine.git("tag", "v0.1.0", cwd=checkout)
    first = environment.wheel(checkout, tmp_path / "dist")
    improve_template(machine, checkout, "Never installed.", version="0.1.1")
    improve_template(machine, checkout, "Improved.", version="0.2.0")
    second = environment.wheel(checkout, tmp_path / "dist")
    checkout.rename(tmp_path / "gone")

    environment.install(first, cwd=tmp_path)
    project = environment.new("demo", tmp_path)
    assert source_of(project) == STORED_BUNDLE
    assert not (project / "trainer/novelty.py").exists()
    edit_as_user(machine, project)
    environment.copier_update(project)  # nothing newer yet
    assert machine.git("status", "--porcelain", cwd=project) == ""

    environment.install(second, cwd=tmp_path)
    environment.copier_update(project)  # upgrading the package was all it took
    assert "Improved." in (project / "README.md").read_text()
    assert (project / "config.yaml").read_text().endswith("# my own line\n")
    assert "novelty" in machine.git("status", "--porcelain", "--untracked-files=all", cwd=project)


def test_an_older_wheel_beside_a_newer_one_takes_nothing_away(
    environment: Environment, machine: Machine, checkout: Path, tmp_path: Path
) -> None:
    old = environment.wheel(checkout, tmp_path / "dist")
    improve_template(machine, checkout, version="0.2.0")
    new = environment.wheel(checkout, tmp_path / "dist")
    checkout.rename(tmp_path / "gone")
    environment.install(new, cwd=tmp_path)
    project = environment.new("with-new", tmp_path)
    edit_as_user(machine, project)
    other = Environment(machine, tmp_path / "older")
    other.install(old, cwd=tmp_path)
    older = other.new("with-old", tmp_path)
    assert not (older / "trainer/novelty.py").exists()
    environment.copier_update(project)
    assert_improved(project)


def test_from_a_git_url_as_pip_recorded_it(
    environment: Environment, machine: Machine, checkout: Path, tmp_path: Path
) -> None:
    pinned = machine.git("rev-parse", "HEAD", cwd=checkout)
    environment.install(f"git+file://{checkout}@{pinned}", cwd=tmp_path)
    improve_template(machine, checkout)
    project = environment.new("demo", tmp_path)
    assert source_of(project) == f"git+file://{checkout}"
    assert not (project / "trainer/novelty.py").exists()  # the template that belongs to this command
    edit_as_user(machine, project)
    environment.copier_update(project)
    assert_improved(project)
    checkout.rename(tmp_path / "gone")  # unreachable: the wheel that pip built has the template too
    assert source_of(environment.new("offline", tmp_path)) == STORED_BUNDLE


def test_an_sdist_and_a_wheel_of_it_carry_the_history(
    environment: Environment, machine: Machine, checkout: Path, tmp_path: Path
) -> None:
    improve_template(machine, checkout)
    direct = environment.wheel(checkout, tmp_path / "dist")
    done = machine.run(environment.bin / "python", "-m", "hatchling", "build", "-t", "sdist", cwd=checkout)
    assert done.returncode == 0, done.stderr
    sdist = next((checkout / "dist").glob("*.tar.gz"))
    (tmp_path / "apart").mkdir()
    indirect = environment.wheel(sdist, tmp_path / "apart/dist")
    names, bundles = [], []
    for wheel in (direct, indirect):
        with zipfile.ZipFile(wheel) as archive:
            names.append([name for name in archive.namelist() if not name.endswith("RECORD")])
            bundles.append(archive.read("scaffold/template.bundle"))
            assert archive.read("scaffold/_interval.py") == (checkout / "template/trainer/interval.py").read_bytes()
    assert names[0] == names[1] and not [name for name in names[0] if "template/" in name or "_build" in name]
    assert bundles[0] == bundles[1] and b"refs/states/2" in bundles[0]


def test_the_calculator_of_a_wheel_is_the_templates(
    environment: Environment, machine: Machine, checkout: Path, tmp_path: Path
) -> None:
    environment.install(environment.wheel(checkout, tmp_path / "dist"), cwd=tmp_path)
    words = ("interval", "--mtbi", "4h", "--step-time", "800ms", "--save-time", "60s", "--json")
    done = machine.run(environment.bin / "scaffold", *words, cwd=tmp_path)
    assert json.loads(done.stdout)["save_interval_steps"] == 520
