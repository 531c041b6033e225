"""`scaffold update` and `scaffold doctor`, and what plain `copier update` does, where git or a user is in the way."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.machine import Machine, Scaffold

ROOT = Path(__file__).resolve().parent.parent
QUESTION = """
_subdirectory: template
_exclude: ["__pycache__"]
colour:
  type: str
  help: Colour
  default: red
  validator: "{% if colour == 'grey' %}not grey{% endif %}"
  ask: "{{ colour is undefined }}"
shade:
  type: str
  when: false
  default: "light {{ colour }}"
"""
LINES = [f"line {number}" for number in range(1, 21)]


@pytest.fixture
def template(machine: Machine, tmp_path: Path) -> Path:
    """A small template with an answer, a computed value and a few files."""
    root = tmp_path / "tiny"
    (root / "template").mkdir(parents=True)
    (root / "copier.yml").write_text(QUESTION)
    (root / "template/{{_copier_conf.answers_file}}.jinja").write_text("{{ _copier_answers | to_nice_yaml }}")
    (root / "template/lines.txt").write_text("\n".join(LINES) + "\n")
    (root / "template/colour.txt.jinja").write_text("{{ colour }}, {{ shade }}\n")
    (root / "template/notes.md").write_text("notes\n")
    for folder in (root, root / "template"):
        (folder / ".gitattributes").write_text("* text=auto eol=lf\n")
    machine.commit(root)
    return root


@pytest.fixture
def project(scaffold: Scaffold, template: Path, tmp_path: Path) -> Path:
    done = scaffold("new", "project", "--defaults", "--source", template)
    assert done.returncode == 0, done.stderr
    return tmp_path / "work/project"


def edit(file: Path, line: int, text: str) -> None:
    lines = file.read_text().splitlines()
    lines[line - 1] = text
    file.write_text("\n".join(lines) + "\n")


def copier_update(machine: Machine, project: Path) -> subprocess.CompletedProcess[str]:
    """Plain `copier update`: no flags, no terminal."""
    return machine.run(sys.executable, "-m", "copier", "update", cwd=project)


def test_an_update_keeps_the_users_edits(scaffold: Scaffold, machine: Machine, template: Path, project: Path) -> None:
    edit(project / "lines.txt", 2, "mine")
    machine.commit(project)
    edit(template / "template/lines.txt", 18, "theirs")
    head = machine.commit(template)
    done = scaffold("update", project)
    assert done.returncode == 0, done.stderr
    lines = (project / "lines.txt").read_text().splitlines()
    assert (lines[1], lines[17]) == ("mine", "theirs")
    assert head.startswith(yaml.safe_load((project / ".copier-answers.yml").read_text())["_commit"])
    assert "2 files changed" in done.stdout
    machine.commit(project)
    done = scaffold("update", cwd=project)
    assert done.returncode == 0 and "up to date" in done.stdout


def test_conflicts_are_listed_and_exit_1(scaffold: Scaffold, machine: Machine, template: Path, project: Path) -> None:
    edit(project / "lines.txt", 5, "mine")
    machine.commit(project)
    edit(template / "template/lines.txt", 5, "theirs")
    machine.commit(template)
    done = scaffold("update", project)
    assert done.returncode == 1 and "conflicts in lines.txt" in done.stderr
    assert "<<<<<<< before updating\nmine" in (project / "lines.txt").read_text()
    done = scaffold("update", project)
    assert done.returncode == 1 and "unresolved conflicts: lines.txt" in done.stderr
    done = scaffold("doctor", project)
    assert done.returncode == 1 and "FAIL  unresolved conflicts: lines.txt" in done.stdout


GIT_SETTINGS = {
    "untracked files hidden": "[status]\nshowUntrackedFiles = no\n",
    "a hook that fails everywhere": "[core]\nhooksPath = {home}/hooks\n",
    "a personal ignore file that hides a rendered file": "[core]\nexcludesFile = {home}/ignore\n",
    "signed commits without a key": "[commit]\ngpgsign = true\n[gpg]\nprogram = false\n",
    "line ends converted": "[core]\nautocrlf = true\n",
}


@pytest.mark.parametrize("setting", GIT_SETTINGS)
def test_git_settings_that_trip_an_update_do_not_trip_ours(
    scaffold: Scaffold, machine: Machine, template: Path, project: Path, setting: str
) -> None:
    (machine.home / ".gitconfig").write_text(GIT_SETTINGS[setting].format(home=machine.home))
    (machine.home / "ignore").write_text("lines.txt\n")
    for hook in ("post-checkout", "pre-commit", "prepare-commit-msg"):
        (machine.home / "hooks").mkdir(exist_ok=True)
        (machine.home / "hooks" / hook).write_text("#!/bin/sh\nexit 1\n")
        (machine.home / "hooks" / hook).chmod(0o755)

    edit(project / "lines.txt", 2, "mine")
    edit(project / "lines.txt", 10, "my conflict")
    machine.commit(project)
    edit(template / "template/lines.txt", 10, "their conflict")
    edit(template / "template/notes.md", 1, "new notes")
    machine.commit(template)
    done = scaffold("update", project, GIT_DIR="/nowhere")
    assert done.returncode == 1 and "conflicts in lines.txt" in done.stderr, done.stderr
    text = (project / "lines.txt").read_text()
    assert "mine" in text and "my conflict" in text and "their conflict" in text
    assert (project / "notes.md").read_text() == "new notes\n"
    assert not list(project.glob("*.rej"))


def test_doctor_names_the_settings_that_trip_plain_copier(scaffold: Scaffold, machine: Machine, project: Path) -> None:
    (machine.home / "ignore").write_text("lines.txt\n")
    (machine.home / ".gitconfig").write_text(
        "[status]\nshowUntrackedFiles = no\n[core]\nhooksPath = /h\nexcludesFile = ~/ignore\n"
    )
    done = scaffold("doctor", project)
    assert done.returncode == 0, done.stderr
    for pattern in (
        "warn  git's status.showUntrackedFiles",
        "warn  git's core.hooksPath is /h",
        "warn  git ignores.*lines.txt",
    ):
        assert re.search(pattern, done.stdout), done.stdout


def test_a_failed_update_puts_the_project_back(
    scaffold: Scaffold, machine: Machine, template: Path, project: Path
) -> None:
    edit(template / "template/lines.txt", 3, "theirs")
    (template / "template/new.txt").write_text("new\n")
    (template / "template/zz.txt.jinja").write_text("{{ 1 / 0 }}\n{% if %}\n")
    machine.commit(template)
    done = scaffold("update", project)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert machine.git("status", "--porcelain", cwd=project) == ""
    assert not (project / "new.txt").exists()


def test_an_uncommitted_change_is_never_touched(
    scaffold: Scaffold, machine: Machine, template: Path, project: Path
) -> None:
    edit(project / "lines.txt", 2, "mine, not committed")
    (project / "untracked.txt").write_text("keep\n")
    edit(template / "template/lines.txt", 3, "theirs")
    machine.commit(template)
    done = scaffold("update", project)
    assert done.returncode == 1 and "uncommitted changes or new files" in done.stderr
    assert "mine, not committed" in (project / "lines.txt").read_text() and (project / "untracked.txt").exists()


def test_a_dirty_template_does_not_poison_the_next_update(
    scaffold: Scaffold, machine: Machine, template: Path, project: Path
) -> None:
    edit(template / "template/lines.txt", 3, "committed")
    head = machine.commit(template)
    edit(template / "template/lines.txt", 4, "not committed")
    assert "warn  the template has uncommitted changes" in scaffold("doctor", project).stdout
    assert scaffold("update", project).returncode == 0
    assert "committed" in (project / "lines.txt").read_text()
    assert "not committed" not in (project / "lines.txt").read_text()
    assert head.startswith(yaml.safe_load((project / ".copier-answers.yml").read_text())["_commit"])


def test_what_the_template_removed_is_named(
    scaffold: Scaffold, machine: Machine, template: Path, project: Path
) -> None:
    (project / "notes.md").write_text("my notes\n")
    machine.commit(project)
    (template / "template/notes.md").unlink()
    machine.commit(template)
    done = scaffold("update", project)
    assert "removed by the template: notes.md" in done.stdout


def test_a_new_question_is_not_answered_behind_the_users_back(
    scaffold: Scaffold, machine: Machine, template: Path, project: Path
) -> None:
    (template / "copier.yml").write_text(QUESTION + "\nsize:\n  type: int\n  help: Size\n  default: 3\n")
    machine.commit(template)
    done = scaffold("update", project)
    assert done.returncode == 2 and "no terminal to ask on" in done.stderr
    assert machine.git("status", "--porcelain", cwd=project) == ""


def test_in_releases_an_update_waits_for_the_next_tag(
    scaffold: Scaffold, machine: Machine, template: Path, tmp_path: Path
) -> None:
    machine.git("tag", "v1.0.0", cwd=template)
    scaffold("new", "released", "--defaults", "--source", template)
    project = tmp_path / "work/released"
    assert "v1.0.0" in (project / ".copier-answers.yml").read_text()
    edit(template / "template/lines.txt", 3, "theirs")
    machine.commit(template)
    assert "up to date" in scaffold("update", project).stdout
    machine.git("tag", "v1.1.0", cwd=template)
    assert "v1.0.0 -> v1.1.0" in scaffold("update", project).stdout


@pytest.mark.parametrize("command", ["update", "doctor"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (("_src_path: .*", "_src_path: /nowhere/at/all"), "not where it was"),
        (("_commit: .*", "_commit: 0123456789"), "no such commit"),
        (("_commit: .*\n", ""), "has no _commit"),
        (("_src_path: .*\n", ""), "has no _src_path"),
        (("(?s).*", "a: [b"), "cannot be read"),
        (("(?s).*", "- only\n- a list"), "holds no answers"),
    ],
)
def test_a_damaged_answers_file_is_one_line(
    scaffold: Scaffold, machine: Machine, project: Path, command: str, damage: tuple[str, str], says: str
) -> None:
    file = project / ".copier-answers.yml"
    file.write_text(re.sub(damage[0], damage[1], file.read_text(), count=1))
    machine.commit(project)
    done = scaffold(command, project)
    assert done.returncode == 1 and says in done.stdout + done.stderr, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert machine.git("status", "--porcelain", cwd=project) == ""


def test_doctor_shows_where_project_template_and_answers_part(
    scaffold: Scaffold, machine: Machine, template: Path, project: Path
) -> None:
    done = scaffold("doctor", project)
    assert done.returncode == 0 and "nothing newer" in done.stdout and "all 4 files are as" in done.stdout
    assert "warn" not in done.stdout

    edit(project / "lines.txt", 2, "mine")
    (project / "notes.md").unlink()
    answers = project / ".copier-answers.yml"
    answers.write_text(answers.read_text() + "shade: dark\nother: 1\n")
    edit(template / "template/lines.txt", 3, "theirs")
    machine.commit(template)
    done = scaffold("doctor", project)
    assert done.returncode == 0, done.stderr
    for text in (
        "uncommitted changes",
        "does not ask: other",
        "sets computed values, which has no effect: shade",
        "would bring changes of: lines.txt",
        "changed here since the template: lines.txt",
        "deleted here since the template: notes.md",
    ):
        assert text in done.stdout, done.stdout

    answers.write_text(re.sub("colour: .*", "colour: grey", answers.read_text()))
    done = scaffold("doctor", project)
    assert done.returncode == 1 and re.search("FAIL  .*not grey", done.stdout), done.stdout
    answers.write_text(re.sub("_src_path: .*", "_src_path: ../tiny", answers.read_text()))
    assert "is relative" in scaffold("doctor", project).stdout


def test_the_real_template_updates_in_a_subfolder_of_a_repository(
    scaffold: Scaffold, machine: Machine, checkout: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    (work / "README").write_text("a repository of many projects\n")
    machine.commit(work)
    scaffold("new", "demo", "--defaults")
    readme = checkout / "template/README.md.jinja"
    with (work / "demo/config.yaml").open("a") as file:
        file.write("# my own line\n")
    machine.commit(work)
    (checkout / "template/trainer/novelty.py").write_text('"""New."""\n')
    readme.write_text(readme.read_text() + "\nNew paragraph.\n")
    machine.commit(checkout)
    done = copier_update(machine, work / "demo")
    assert done.returncode == 0, done.stderr
    assert (work / "demo/trainer/novelty.py").is_file()
    assert "New paragraph." in (work / "demo/README.md").read_text()
    assert "# my own line" in (work / "demo/config.yaml").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# The real template and plain Copier: what is the owner's stays the owner's

MODEL, DATA = "tasks/language_model/model.py", "tasks/language_model/data.py"


@pytest.fixture
def demo(scaffold: Scaffold, tmp_path: Path) -> Path:
    done = scaffold("new", "demo", "--defaults")
    assert done.returncode == 0, done.stderr
    return tmp_path / "work/demo"


def append(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def updated(machine: Machine, project: Path, *words: str) -> list[str]:
    """Commit the project, update it with plain Copier and return git's short status, which shows conflicts as UU."""
    machine.commit(project)
    done = machine.run(sys.executable, "-m", "copier", "update", *words, cwd=project)
    assert done.returncode == 0, done.stderr
    return machine.git("status", "--porcelain", "--untracked-files=all", cwd=project).splitlines()


def test_an_update_leaves_the_owners_tasks_alone(
    scaffold: Scaffold, machine: Machine, checkout: Path, demo: Path
) -> None:
    """Edited, deleted, of the owner's own, and whatever the template does: changed, renamed, removed, new."""
    template = checkout / "template"
    (demo / MODEL).write_text("# mine from the first line on\n")
    (demo / DATA).unlink()
    (demo / "tasks/mine").mkdir()
    (demo / "tasks/mine/__init__.py").write_text('"""Mine."""\n')
    before = {path: path.read_bytes() for path in (demo / "tasks").rglob("*") if path.is_file()}
    append(template / MODEL, "# the template's\n")
    append(template / DATA, "# the template's\n")
    (template / "tasks/language_model/__init__.py").rename(template / "tasks/language_model/renamed.py")
    (template / "tasks/language_model/novelty.py").write_text('"""New."""\n')
    append(template / "trainer/train.py", "# the engine's\n")
    machine.commit(checkout)
    assert "would bring changes of: trainer/train.py\n" in scaffold("doctor", demo).stdout
    assert [line.split()[-1] for line in updated(machine, demo)] == [".copier-answers.yml", "trainer/train.py"]
    assert {path: path.read_bytes() for path in (demo / "tasks").rglob("*") if path.is_file()} == before

    (template / "tasks/language_model").rename(template / "tasks/moved")
    machine.commit(checkout)
    assert [line.split()[-1] for line in updated(machine, demo)] == [".copier-answers.yml"]
    assert {path: path.read_bytes() for path in (demo / "tasks").rglob("*") if path.is_file()} == before


def test_tasks_are_left_alone_whatever_the_project_folder_is_called(
    scaffold: Scaffold, machine: Machine, checkout: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    scaffold("new", "de[m]o *", "--defaults", "-d", "project_name=demo")
    (work / "de[m]o *" / DATA).unlink()
    machine.commit(work / "de[m]o *")
    append(checkout / "template" / MODEL, "# the template's\n")
    machine.commit(checkout)
    done = machine.run(sys.executable, "-m", "copier", "update", "de[m]o *", cwd=work)
    assert done.returncode == 0, done.stderr
    assert machine.git("status", "--porcelain", cwd=work / "de[m]o *") == "M .copier-answers.yml"


def test_a_project_without_tasks_gets_them(machine: Machine, checkout: Path, demo: Path) -> None:
    for file in (demo / "tasks").rglob("*.py"):
        file.unlink()
    append(checkout / "template" / MODEL, "# the template's\n")
    machine.commit(checkout)
    updated(machine, demo)
    assert (demo / MODEL).read_bytes() == (checkout / "template" / MODEL).read_bytes()


def test_copying_the_template_over_a_project_keeps_edited_tasks(machine: Machine, checkout: Path, demo: Path) -> None:
    (demo / MODEL).write_text("# mine\n")
    append(checkout / "template" / MODEL, "# the template's\n")
    machine.commit(checkout)
    done = machine.run(sys.executable, "-m", "copier", "recopy", "--overwrite", cwd=demo)
    assert done.returncode == 0, done.stderr
    assert (demo / MODEL).read_text() == "# mine\n"


def test_the_two_yaml_files_conflict_only_where_an_answer_changed(machine: Machine, demo: Path) -> None:
    config, startup = demo / "config.yaml", demo / "startup/nexgpu.yaml"
    for file, mine in ((config, {"dropout": "0.1", "seed": "7", "steps": "500"}), (startup, {"keep_last": "9"})):
        text = file.read_text()
        for key, value in mine.items():
            text, found = re.subn(rf"(?m)^(  {key}): \S+", rf"\1: {value}", text)
            assert found == 1, key
        file.write_text(text)
    answers = ("--vcs-ref=:current:", "-d", "steps=3000", "-d", "grace_seconds=60")
    assert [line for line in updated(machine, demo, *answers) if line.startswith("UU")] == ["UU config.yaml"]
    text = config.read_text()
    assert text.count("<<<<<<<") == 1 and "  steps: 500" in text and "  steps: 3000" in text
    assert "  dropout: 0.1" in text and "  seed: 7" in text
    text = startup.read_text()
    assert "  keep_last: 9" in text and "  grace_s: 60" in text and "<<<<<<<" not in text


# ---------------------------------------------------------------------------------------------------------------------
# A project from before tasks/ and trainer/ were two rooms

BEFORE = "8a54b0644830"  # the last commit with the flat trainer/
TINY = (
    "--gpus", "1", "model.layers=1", "model.width=32", "model.heads=2", "data.sequence_length=32",
    "data.global_batch=4", "data.micro_batch=2", "train.eval_every_steps=0",
)  # fmt: skip


@pytest.fixture
def from_before(machine: Machine, pristine: Path, tmp_path: Path) -> Path:
    """A project as the product made it then, which the owner has edited, with a source that is now the newest."""
    source, project = tmp_path / "source", tmp_path / "demo"
    machine.git("clone", "--quiet", "--no-tags", ROOT, source, cwd=tmp_path)
    machine.git("checkout", "--quiet", "-B", "main", BEFORE, cwd=source)
    done = machine.run(sys.executable, "-m", "copier", "copy", "--defaults", "--quiet", source, project, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    machine.commit(project)
    append(project / "trainer/model.py", "# mine\n")
    append(project / "trainer/ledger.py", "# mine\n")
    (project / "trainer/mine.py").write_text('"""Mine."""\n')
    config = (project / "config.yaml").read_text()
    (project / "config.yaml").write_text(config.replace("  seed: 0", "  seed: 7"))

    machine.git("checkout", "--quiet", "--detach", machine.git("rev-parse", "HEAD", cwd=ROOT), cwd=source)
    shutil.rmtree(source / "template")
    shutil.copytree(pristine / "template", source / "template")
    shutil.copy(pristine / "copier.yml", source)
    if machine.git("status", "--porcelain", cwd=source):  # what is not committed here yet
        machine.commit(source)
    return project


def train(machine: Machine, project: Path, steps: int) -> dict[int, float]:
    """Train to `steps` and return the loss of each step in the run's metrics."""
    path = {"PATH": f"{Path(sys.executable).parent}:{machine.env['PATH']}"}  # restart.sh takes python3 from there
    done = machine.run("./restart.sh", *TINY, f"train.steps={steps}", cwd=project, env=path)
    assert done.returncode == 0, done.stderr
    lines = (project / "checkpoints/demo/metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


@pytest.mark.slow
def test_a_project_from_before_the_two_rooms_is_updated(machine: Machine, from_before: Path) -> None:
    old = {path.relative_to(from_before) for path in (from_before / "trainer").rglob("*.py")}
    updated(machine, from_before)
    new = {path.relative_to(ROOT / "template") for path in (ROOT / "template/trainer").rglob("*.py")}
    there = {path.relative_to(from_before) for path in (from_before / "trainer").rglob("*.py")}
    assert there == new | {Path("trainer/mine.py")} and old - new
    assert not (from_before / "tests/test_checkpoint_lease.py").exists()
    assert (from_before / MODEL).read_bytes() == (ROOT / "template" / MODEL).read_bytes()
    assert "# mine" in (from_before / "trainer/ledger.py").read_text()  # merged, or in a conflict
    assert "  seed: 7" in (from_before / "config.yaml").read_text()
    assert "# mine" in machine.git("show", "HEAD:trainer/model.py", cwd=from_before)  # where the changelog sends one


@pytest.mark.slow
def test_a_project_from_before_the_two_rooms_trains_on(machine: Machine, from_before: Path, tmp_path: Path) -> None:
    train(machine, from_before, 6)
    shutil.copytree(from_before, tmp_path / "as it was/demo")
    without = train(machine, tmp_path / "as it was/demo", 12)
    assert not [line for line in updated(machine, from_before) if line.startswith("UU")]
    losses = train(machine, from_before, 12)
    ledger = (from_before / "checkpoints/demo/ledger.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, ledger) if line["event"] == "resumed"] == [6]
    assert losses == pytest.approx(without, rel=1e-5) and list(losses) == list(range(1, 13))
