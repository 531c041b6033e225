"""The commands as a person or a script calls them: what they print, what they leave, how they refuse."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import xml.etree.ElementTree
from pathlib import Path

import pytest
import yaml

from tests.machine import Machine, Scaffold


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def one_line(text: str) -> bool:
    """Whether a refusal is one line: that of a usage error stands below click's hint."""
    lines = [line for line in text.splitlines() if line and not line.startswith(("Usage:", "Try ", "Note:"))]
    return len(lines) == 1 and lines[0].startswith("Error: ") and "Traceback" not in text


# ---------------------------------------------------------------------------------------------------------------------
# scaffold new


def test_defaults_make_a_committed_project_and_say_how_to_go_on(
    scaffold: Scaffold, machine: Machine, checkout: Path, tmp_path: Path
) -> None:
    done = scaffold("new", "demo", "--defaults")
    assert done.returncode == 0, done.stderr
    for word in ("floor", "optimum", "ceiling", "chosen", "expected badput"):
        assert word in done.stdout
    after = done.stdout.split("Next:")[1]
    assert re.findall(r"^  (cd demo|bash startup/onstart.sh|\./restart.sh)", after, re.M) == [
        "cd demo",
        "bash startup/onstart.sh",
        "./restart.sh",
    ]
    assert "scaffold new demo --defaults" in after

    project = tmp_path / "work/demo"
    assert listing(tmp_path / "work")[0] == "demo"
    assert machine.git("status", "--porcelain", "--ignored", cwd=project) == ""
    assert machine.git("rev-list", "--count", "HEAD", cwd=project) == "1"
    answers = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert answers["_src_path"] == str(checkout)
    assert machine.git("rev-parse", "HEAD", cwd=checkout).startswith(answers["_commit"])
    assert os.access(project / "restart.sh", os.X_OK)


def test_every_rendered_file_is_in_the_first_commit_whatever_the_user_ignores(
    scaffold: Scaffold, machine: Machine, tmp_path: Path
) -> None:
    (machine.home / ".config/git").mkdir(parents=True)
    (machine.home / ".config/git/ignore").write_text("*.yaml\n*.md\ntests\n")
    scaffold("new", "demo", "--defaults")
    project = tmp_path / "work/demo"
    files = {str(p.relative_to(project)) for p in project.rglob("*") if p.is_file() and ".git/" not in f"{p}/"}
    assert files == set(machine.git("ls-files", cwd=project).splitlines())


def test_json_says_everything_and_dry_run_writes_nothing(scaffold: Scaffold, tmp_path: Path) -> None:
    done = scaffold("new", "demo", "--json", "--dry-run", "-d", "mtbi=2h", "-d", "deploy_targets=[slurm, vm]")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert not report["written"] and not report["committed"]
    assert report["answers"]["mtbi"] == "2h" and sorted(report["answers"]["deploy_targets"]) == ["slurm", "vm"]
    assert report["interval"]["mtbi_s"] == 7200
    assert report["interval"]["save_interval_steps"] == report["derived"]["save_interval_steps"]
    assert report["command"] == "scaffold new demo --defaults -d mtbi=2h -d 'deploy_targets=[slurm, vm]'"
    assert listing(tmp_path / "work") == []

    done = scaffold("new", "demo", "--json")
    report = json.loads(done.stdout)
    assert report["written"] and report["committed"] and report["path"] == str(tmp_path / "work/demo")

    done = scaffold("new", "other", "--defaults", "--dry-run")
    assert done.returncode == 0 and "mtbi: 4h" in done.stdout and "Nothing was written" in done.stdout
    assert listing(tmp_path / "work")[0] == "demo" and not (tmp_path / "work/other").exists()


def test_the_interval_shown_is_the_calculators(scaffold: Scaffold) -> None:
    times = {"mtbi": "3h", "step_time": "700ms", "save_time": "40s", "save_stall": "2s", "restart_time": "4m"}
    given = [word for key, value in times.items() for word in ("-d", f"{key}={value}")]
    shown = scaffold("new", "demo", "--json", "--dry-run", *given, "-d", "badput_target=4%")
    options = [word for key, value in times.items() for word in (f"--{key.replace('_', '-')}", value)]
    calculated = scaffold("interval", *options, "--badput", "4%", "--json")
    assert json.loads(shown.stdout)["interval"] == json.loads(calculated.stdout)


def test_answers_of_another_project_make_the_same_one_again(scaffold: Scaffold, tmp_path: Path) -> None:
    scaffold("new", "first", "--defaults", "-d", "provider=slurm", "-d", "steps=77")
    done = scaffold("new", "second", "--defaults", "--answers", "first/.copier-answers.yml", "-d", "keep_last=9")
    assert done.returncode == 0, done.stderr
    first, second = (
        yaml.safe_load((tmp_path / "work" / name / ".copier-answers.yml").read_text()) for name in ("first", "second")
    )
    assert second == {**first, "keep_last": 9}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["new", "demo", "--defaults", "-d", "no_such=1"], 2, "-d no_such=1: the template has no such question"),
        (["new", "demo", "--defaults", "-d", "save_interval_steps=5"], 2, "is computed from the answers"),
        (["new", "demo", "--defaults", "-d", "mtbi"], 2, "'mtbi' is not KEY=VALUE"),
        (["new", "demo", "--defaults", "-d", "mtbi=soon"], 1, "'mtbi'.*not a duration"),
        (["new", "demo", "--defaults", "-d", "steps=many"], 1, "steps.*many"),
        (["new", "demo", "--defaults", "-d", "provider=moon"], 1, "provider.*moon"),
        (["new", "demo", "--defaults", "-d", "mtbi=6m"], 1, "no interval fits.*MTBI"),
        (["new", "demo", "--defaults", "-d", "badput_target=5"], 1, "badput_target.*not a share"),
        (["new", "demo"], 2, "no terminal.*--defaults"),
        (["new", "full", "--defaults"], 1, "not an empty folder"),
        (["new", "full/a-file", "--defaults"], 1, "not an empty folder"),
        (["new", "demo", "--defaults", "--answers", "missing.yml"], 2, "missing.yml"),
        (["new", "demo", "--defaults", "--answers", "full/broken.yml"], 1, "broken.yml cannot be read"),
        (["new", "demo", "--defaults", "--answers", "full/binary.yml"], 1, "binary.yml cannot be read"),
        (["new", "demo", "--defaults", "--answers", "full/a-file"], 1, "holds no answers"),
        (["new", "demo", "--defaults", "--answers", "full/unknown.yml"], 1, "unknown.yml: colour: .*no such question"),
        (["new", "demo", "--defaults", "--ref", "v9"], 1, "there is no commit v9"),
        (["new", "demo", "--defaults", "--source", "full"], 1, "not the root of a git repository"),
        (["new", "demo", "--defaults", "--source", "full/a-file"], 1, "not a git bundle"),
        (["new", "demo", "--defaults", "--source", "nowhere"], 1, "no such directory"),
        (["new", "demo", "--defaults", "--source", "https://me:secret@example.com/x.git"], 1, "password"),
        (["new", "full/a-file/demo", "--defaults"], 1, "a-file"),
        (["new"], 2, "PATH"),
        (["interval", "--step-time", "1s", "--save-time", "10s"], 2, "--mtbi or --interruptions"),
        (["interval", "--mtbi", "4x", "--step-time", "1s", "--save-time", "10s"], 2, "not a duration"),
        (["interval", "--mtbi", "4h", "--step-time", "1s", "--save-time", "10s", "--badput", "5"], 2, "not a share"),
        (["interval", "--mtbi", "4m", "--step-time", "1s", "--save-time", "1m"], 1, "no interval fits"),
        (["interval", "--mtbi", "4h", "--step-time", "1s", "--save-time", "9s", "--plot", "x.gif"], 2, ".png or .svg"),
        (["interval", "--mtbi", "4h", "--step-time", "1s", "--save-time", "9s", "--plot", "no/x.png"], 1, "no/x.png"),
        (["interval", "--interruptions", "full/a-file", "--step-time", "1s", "--save-time", "9s"], 1, "not a time"),
        (["update", "full"], 1, "not in a git repository"),
        (["update", "nowhere"], 1, "not a folder"),
        (["doctor", "full"], 1, "not made by `scaffold new`"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_leaves_nothing(
    scaffold: Scaffold, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    full = tmp_path / "work/full"
    full.mkdir()
    (full / "a-file").write_text("hello\n")
    (full / "broken.yml").write_text("mtbi: [4h\n")
    (full / "binary.yml").write_bytes(b"\xff\xfe\x00\x01")
    (full / "unknown.yml").write_text("colour: red\n")
    before = listing(tmp_path / "work")
    done = scaffold(*arguments)
    assert done.returncode == code, done.stderr
    assert re.search(says, done.stderr), done.stderr
    assert one_line(done.stderr) and done.stdout == "", done.stdout + done.stderr
    assert listing(tmp_path / "work") == before


def test_without_git_nothing_is_begun(scaffold: Scaffold, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for command in (["new", "demo", "--defaults"], ["update", "."], ["doctor", "."]):
        done = scaffold(*command, PATH=str(tmp_path / "empty"))
        assert done.returncode == 1 and one_line(done.stderr) and "git is needed" in done.stderr
    assert listing(tmp_path / "work") == []


def test_a_template_that_fails_half_way_leaves_nothing(
    scaffold: Scaffold, machine: Machine, checkout: Path, tmp_path: Path
) -> None:
    (checkout / "template/zz.md.jinja").write_text("{{ nobody_defines_this }}\n")
    machine.commit(checkout)
    (tmp_path / "work/empty").mkdir()
    for target in ("demo", "empty", "a/b/c"):
        done = scaffold("new", target, "--defaults")
        assert done.returncode == 1 and one_line(done.stderr) and "nobody_defines_this" in done.stderr
    assert listing(tmp_path / "work") == ["empty"]


def test_stopped_half_way_it_leaves_nothing(machine: Machine, checkout: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "scaffold", "new", "demo", "--defaults"]
    env = {**machine.env, "PYTHONPATH": str(checkout)}
    with subprocess.Popen(command, cwd=work, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not list(work.glob(".scaffold-*/demo/*")):  # rendering has begun
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 1 and complaint.decode().strip() == "Aborted!"
    assert listing(work) == []


def test_uncommitted_template_changes_are_left_out_with_a_note(
    scaffold: Scaffold, checkout: Path, tmp_path: Path
) -> None:
    (checkout / "template/restart.sh").write_text("broken\n")
    done = scaffold("new", "demo", "--defaults")
    assert done.returncode == 0 and "uncommitted changes of the template are left out" in done.stderr
    assert (tmp_path / "work/demo/restart.sh").read_text() != "broken\n"


def test_inside_a_repository_the_project_is_left_to_it(scaffold: Scaffold, machine: Machine, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / ".gitignore").write_text("scratch/\n")
    machine.commit(work)
    done = scaffold("new", "demo", "--defaults")
    assert done.returncode == 0 and f"it is inside the repository {work}" in done.stderr
    assert not (work / "demo/.git").exists()
    scaffold("new", "own", "--defaults", "--git")
    assert (work / "own/.git").is_dir()
    scaffold("new", "scratch/demo", "--defaults")  # ignored there, so nobody would keep it
    assert (work / "scratch/demo/.git").is_dir()
    done = scaffold("new", "scratch/bare", "--defaults", "--no-git")
    assert not (work / "scratch/bare/.git").exists() and "not in git yet" in done.stderr


def test_odd_places(scaffold: Scaffold, machine: Machine, tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name in ("two words", "größe", "deep/er/run"):
        done = scaffold("new", name, "--defaults")
        assert done.returncode == 0, done.stderr
        assert machine.git("status", "--porcelain", cwd=work / name) == ""
    (work / "here").mkdir()
    done = scaffold("new", ".", "--defaults", cwd=work / "here", GIT_DIR=str(tmp_path / "product/.git"))
    assert done.returncode == 0, done.stderr
    assert (work / "here/config.yaml").is_file()
    assert machine.git("rev-list", "--count", "HEAD", cwd=work / "here") == "1"


def test_a_first_commit_that_cannot_be_made_is_said_not_hidden(
    scaffold: Scaffold, machine: Machine, tmp_path: Path
) -> None:
    (machine.home / ".gitconfig").write_text("[commit]\ngpgsign = true\n[gpg]\nprogram = false\n")
    done = scaffold("new", "demo", "--defaults")
    assert done.returncode == 0 and "staged, not committed" in done.stderr
    assert machine.git("diff", "--cached", "--name-only", cwd=tmp_path / "work/demo") != ""

    (machine.home / ".gitconfig").write_text("[user]\nname = Ada\nemail = ada@example.com\n")
    scaffold("new", "other", "--defaults")
    assert machine.git("log", "--format=%an", cwd=tmp_path / "work/other") == "Ada"


# ---------------------------------------------------------------------------------------------------------------------
# with a terminal


class Terminal:
    """A command on a pseudo-terminal wide enough that no line wraps."""

    def __init__(self, machine: Machine, checkout: Path, cwd: Path, *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            env = {**machine.env, "PYTHONPATH": str(checkout), "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
            os.execve(sys.executable, [sys.executable, "-m", "scaffold", *arguments], env)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 500, 0, 0))
        self.text, self.seen = "", 0

    def read(self) -> bool:
        """Take what is printed next; False at the end."""
        assert select.select([self.fd], [], [], 120)[0], f"nothing was printed for two minutes after: {self.text}"
        try:
            read = os.read(self.fd, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            return False
        self.text += read.decode(errors="replace")
        return bool(read)

    def wait(self, text: str) -> None:
        """Wait until `text` is printed after what was waited for before."""
        while (at := self.text.find(text, self.seen)) < 0:
            assert self.read(), f"it ended without {text!r}: {self.text}"
        self.seen = at + len(text)

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def end(self) -> int:
        """Read to the end and return the exit code."""
        while self.read():
            pass
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def prompts(checkout: Path) -> dict[str, str]:
    """What is asked, in order: the key of each question and the line that its prompt ends with."""
    questions = yaml.safe_load((checkout / "copier.yml").read_text())
    return {
        key: question["help"].strip().splitlines()[-1]
        for key, question in questions.items()
        if not key.startswith("_") and question.get("when", True)
    }


def test_asked_on_a_terminal_it_shows_the_interval_and_writes_after_a_yes(
    machine: Machine, checkout: Path, tmp_path: Path
) -> None:
    terminal = Terminal(machine, checkout, tmp_path, "new", "demo")
    for key, prompt in prompts(checkout).items():
        terminal.wait(prompt)
        terminal.press("\x7f\x7f2h\r" if key == "mtbi" else "\r")
    terminal.wait("an interruption every 2h")
    terminal.wait("expected badput")
    terminal.wait("Write the project to demo?")
    assert not (tmp_path / "demo").exists()
    terminal.press("\r")
    assert terminal.end() == 0, terminal.text
    assert "scaffold new demo --defaults -d mtbi=2h" in terminal.text
    assert yaml.safe_load((tmp_path / "demo/.copier-answers.yml").read_text())["mtbi"] == "2h"


def test_where_the_usual_target_does_not_fit_one_that_does_is_offered(
    machine: Machine, checkout: Path, tmp_path: Path
) -> None:
    given = {"mtbi": "20m", "save_time": "60s", "provider": "aws", "volume_mount": ""}
    words = [word for key, value in given.items() for word in ("-d", f"{key}={value}")]
    terminal = Terminal(machine, checkout, tmp_path, "new", "demo", *words)
    for key, prompt in prompts(checkout).items():
        if key not in given:
            terminal.wait(prompt)
            terminal.press("\r")
    terminal.wait("Write the project to demo?")
    terminal.press("\r")
    assert terminal.end() == 0, terminal.text
    answers = yaml.safe_load((tmp_path / "demo/.copier-answers.yml").read_text())
    assert (answers["badput_target"], answers["deploy_targets"]) == ("7.5%", ["vm"])

    command = re.search(r"^  scaffold (new demo --defaults .*)", terminal.text, re.M)  # the same without questions
    assert command and "global_batch" not in command[1]
    again = machine.python(
        checkout, "-m", "scaffold", *shlex.split(command[1]), "--json", "--dry-run", cwd=machine.home
    )
    assert json.loads(again.stdout)["answers"] == {k: v for k, v in answers.items() if not k.startswith("_")}


def test_interrupted_at_a_question_it_leaves_nothing(machine: Machine, checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    terminal = Terminal(machine, checkout, tmp_path / "work", "new", "demo")
    terminal.wait(next(iter(prompts(checkout).values())))
    terminal.press("\x03")
    assert terminal.end() == 1
    assert "Traceback" not in terminal.text and "Aborted!" in terminal.text
    assert listing(tmp_path / "work") == []


def test_after_a_no_nothing_is_written(machine: Machine, checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    terminal = Terminal(machine, checkout, tmp_path / "work", "new", "demo")
    for prompt in prompts(checkout).values():
        terminal.wait(prompt)
        terminal.press("\r")
    terminal.wait("Write the project to demo?")
    terminal.press("n\r")
    assert terminal.end() == 1 and "Aborted!" in terminal.text
    assert listing(tmp_path / "work") == []


# ---------------------------------------------------------------------------------------------------------------------
# scaffold interval, --help


def test_interval_prints_json_and_draws(scaffold: Scaffold, tmp_path: Path) -> None:
    given = ["interval", "--mtbi", "4h", "--step-time", "800ms", "--save-time", "60s"]
    done = scaffold(*given, "--json")
    keys = ("floor_steps", "optimum_steps", "ceiling_steps", "save_interval_steps", "save_stall_s", "restart_time_s")
    assert [json.loads(done.stdout)[key] for key in keys] == [75, 520, 1650, 520, 6, 300]
    for name in ("badput.png", "badput.svg"):
        assert scaffold(*given, "--plot", name).returncode == 0
    assert (tmp_path / "work/badput.png").read_bytes().startswith(b"\x89PNG")
    assert xml.etree.ElementTree.parse(tmp_path / "work/badput.svg").getroot().tag.endswith("svg")


def test_interval_estimates_the_mtbi_from_a_log(scaffold: Scaffold, tmp_path: Path) -> None:
    (tmp_path / "work/log").write_text("2026-01-01T00:00:00Z reclaimed\n2026-01-01T02:00:00Z\n2026-01-01T06:00:00Z\n")
    done = scaffold("interval", "--interruptions", "log", "--step-time", "1s", "--save-time", "30s", "--json")
    assert json.loads(done.stdout)["mtbi_s"] == 3 * 3600


def test_help_and_version_import_nothing_heavy(machine: Machine, checkout: Path, tmp_path: Path) -> None:
    heavy = {"copier", "jinja2", "yaml", "torch", "questionary", "matplotlib", "numpy", "pydantic"}
    for arguments in (["--help"], ["new", "--help"], ["interval", "--help"]):
        done = machine.python(checkout, "-X", "importtime", "-m", "scaffold", *arguments, cwd=tmp_path)
        assert done.returncode == 0
        imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
        assert "click" in imported and not imported & heavy


def test_the_calculator_needs_no_copier(machine: Machine, checkout: Path, tmp_path: Path) -> None:
    given = ["interval", "--mtbi", "4h", "--step-time", "1s", "--save-time", "30s"]
    done = machine.python(checkout, "-X", "importtime", "-m", "scaffold", *given, cwd=tmp_path)
    assert not re.search(r"\| +(copier|jinja2|matplotlib|torch)$", done.stderr, re.M)
