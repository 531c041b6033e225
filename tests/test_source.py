"""Where the template comes from, at which commit, and the bundle that carries it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scaffold import bundle, source
from scaffold.git import GitError
from scaffold.source import SourceError, resolve
from tests.machine import Machine


@pytest.fixture
def template(machine: Machine, tmp_path: Path) -> Path:
    """A small template repo with one commit."""
    root = tmp_path / "template repo"
    (root / "template").mkdir(parents=True)
    (root / "copier.yml").write_text("_subdirectory: template\n")
    (root / "template/a.txt").write_text("one\n")
    (root / "template/run.sh").write_text("#!/bin/sh\n")
    (root / "template/run.sh").chmod(0o755)
    (root / "README.md").write_text("readme\n")
    machine.commit(root)
    return root


def change(machine: Machine, root: Path, text: str, file: str = "template/a.txt") -> str:
    (root / file).write_text(text)
    return machine.commit(root, text.strip())


def commits(machine: Machine, file: Path, into: Path) -> list[str]:
    """The commits in a bundle, oldest first."""
    machine.git("clone", "--quiet", file, into, cwd=file.parent)
    return machine.git("rev-list", "--reverse", "HEAD", cwd=into).splitlines()


# ---------------------------------------------------------------------------------------------------------------------
# the bundle


def test_an_older_bundle_is_the_beginning_of_a_newer_one(machine: Machine, template: Path, tmp_path: Path) -> None:
    machine.git("tag", "v1.0.0", cwd=template)
    change(machine, template, "readme only\n", "README.md")
    change(machine, template, "two\n")
    old = bundle.from_history(template, tmp_path / "old.bundle")
    machine.git("switch", "--quiet", "-c", "feature", cwd=template)
    change(machine, template, "on a branch\n", "template/b.txt")
    machine.git("switch", "--quiet", "main", cwd=template)
    change(machine, template, "three\n")
    identity = ("-c", "user.name=S", "-c", "user.email=s@example.com")
    machine.git(*identity, "merge", "--quiet", "--no-edit", "feature", cwd=template)
    new = bundle.from_history(template, tmp_path / "new.bundle")

    assert (old.states, new.states) == (2, 4)
    chain = commits(machine, tmp_path / "new.bundle", tmp_path / "clone")
    assert chain[:2] == commits(machine, tmp_path / "old.bundle", tmp_path / "old clone")
    assert chain[1] == old.commit and chain[3] == new.commit
    assert machine.git("tag", cwd=tmp_path / "clone") == ""
    assert machine.git("ls-files", cwd=tmp_path / "clone").split() == [
        "copier.yml",
        "template/a.txt",
        "template/b.txt",
        "template/run.sh",
    ]
    assert "100755" in machine.git("ls-files", "--stage", "template/run.sh", cwd=tmp_path / "clone")


def test_the_same_history_gives_the_same_bytes_and_uncommitted_changes_stay_out(
    machine: Machine, template: Path, tmp_path: Path
) -> None:
    for number in range(5):
        change(machine, template, f"{number}\n" * 100)
    first = bundle.from_history(template, tmp_path / "1.bundle")
    (template / "template/a.txt").write_text("not committed\n")
    assert bundle.from_history(template, tmp_path / "2.bundle") == first == bundle.read_tip(tmp_path / "2.bundle")
    assert (tmp_path / "1.bundle").read_bytes() == (tmp_path / "2.bundle").read_bytes()


def test_a_worktree_has_the_same_bundle(machine: Machine, template: Path, tmp_path: Path) -> None:
    machine.git("worktree", "add", "--quiet", tmp_path / "tree", cwd=template)
    expected = bundle.from_history(template, tmp_path / "1.bundle")
    assert bundle.from_history(tmp_path / "tree", tmp_path / "2.bundle") == expected


def test_what_is_no_bundle_of_ours_is_said_so(machine: Machine, template: Path, tmp_path: Path) -> None:
    machine.git("bundle", "create", "--quiet", tmp_path / "foreign.bundle", "HEAD", cwd=template)
    (tmp_path / "text.bundle").write_text("hello\n")
    with pytest.raises(ValueError, match="not one of this product's"):
        bundle.read_tip(tmp_path / "foreign.bundle")
    with pytest.raises(ValueError, match="not a git bundle"):
        bundle.read_tip(tmp_path / "text.bundle")
    machine.git("rm", "--quiet", "-r", "copier.yml", "template", cwd=template)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/x").write_text("x")
    machine.commit(tmp_path / "other")
    with pytest.raises(GitError, match="no commit of"):
        bundle.from_history(tmp_path / "other", tmp_path / "x.bundle")


# ---------------------------------------------------------------------------------------------------------------------
# a checkout: which commit


def test_a_checkout_is_taken_at_its_commit_never_at_the_word_head(machine: Machine, template: Path) -> None:
    head = machine.git("rev-parse", "HEAD", cwd=template)
    found = resolve(str(template))
    assert (found.url, found.ref, found.notes) == (str(template), head, ())
    (template / "template/a.txt").write_text("dirty\n")
    found = resolve(str(template))
    assert found.ref == head and "uncommitted" in found.notes[0]


def test_a_release_is_taken_while_the_template_is_as_it_was_there(machine: Machine, template: Path) -> None:
    released = machine.git("rev-parse", "HEAD", cwd=template)
    machine.git("tag", "v1.2.0", cwd=template)
    machine.git("tag", "latest", cwd=template)
    change(machine, template, "a fix of the command only\n", "README.md")
    assert resolve(str(template)).ref == released
    ahead = change(machine, template, "newer template\n")
    found = resolve(str(template))
    assert found.ref == ahead and "wait for the release after it" in found.notes[0]
    machine.git("tag", "v1.10.0", cwd=template)
    assert resolve(str(template)).notes == ()
    assert resolve(str(template), "v1.2.0").ref == released


def test_tags_that_head_does_not_contain_do_not_count(machine: Machine, template: Path) -> None:
    machine.git("switch", "--quiet", "-c", "next", cwd=template)
    change(machine, template, "next\n")
    machine.git("tag", "v2.0.0", cwd=template)
    machine.git("switch", "--quiet", "main", cwd=template)
    assert resolve(str(template)).ref == machine.git("rev-parse", "HEAD", cwd=template)


def test_a_shallow_clone_is_noted(machine: Machine, template: Path, tmp_path: Path) -> None:
    change(machine, template, "two\n")
    machine.git("clone", "--quiet", "--depth=1", f"file://{template}", tmp_path / "shallow", cwd=tmp_path)
    assert "shallow" in resolve(str(tmp_path / "shallow")).notes[0]


def test_what_could_not_be_updated_from_is_refused(machine: Machine, template: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not the root of a git repository"):
        resolve(str(template / "template"))
    with pytest.raises(SourceError, match="no commit nonsense"):
        resolve(str(template), "nonsense")
    empty = tmp_path / "empty"
    empty.mkdir()
    machine.git("init", "--quiet", cwd=empty)
    with pytest.raises(SourceError, match="cannot be used"):
        resolve(str(empty))
    (empty / "x").write_text("x")
    machine.commit(empty)
    with pytest.raises(SourceError, match=r"has no copier\.yml"):
        resolve(str(empty))


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("gh:org/repo", "gh:org/repo"),
        ("git@example.com:org/repo", "git@example.com:org/repo"),
        ("https://github.com/org/repo", "https://github.com/org/repo"),
        ("https://example.com/org/repo.git", "https://example.com/org/repo.git"),
        ("https://example.com/org/repo", "git+https://example.com/org/repo"),
        ("ssh://me@example.com/repo", "git+ssh://me@example.com/repo"),
        ("git+file:///srv/repo", "git+file:///srv/repo"),
    ],
)
def test_urls_are_stored_in_a_form_that_copier_takes_for_git(given: str, stored: str) -> None:
    assert resolve(given, "v1").url == stored


def test_a_bundle_is_a_source(machine: Machine, template: Path) -> None:
    tip = bundle.from_history(template, machine.home / "x.bundle")
    assert resolve(str(machine.home / "x.bundle")) == source.Source(str(machine.home / "x.bundle"), tip.commit)
    assert resolve("~/x.bundle").url == "~/x.bundle"


# ---------------------------------------------------------------------------------------------------------------------
# the wheel's bundle, and its stored name


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], None]:
    """Let this process think that it was installed from a wheel that carries the given bundle."""
    monkeypatch.setattr(source, "_ROOT", tmp_path)
    monkeypatch.setattr(source, "_recorded", lambda ref: None)
    return lambda carried: monkeypatch.setattr(source, "_CARRIED", carried)


def test_the_stored_name_leads_to_the_newest_bundle_and_never_back(
    machine: Machine, template: Path, tmp_path: Path, wheel: Callable[[Path], None]
) -> None:
    old, new = tmp_path / "old/template.bundle", tmp_path / "new/template.bundle"
    old_tip = bundle.from_history(template, old)
    change(machine, template, "two\n")
    bundle.from_history(template, new)
    link = machine.home / ".local/share/scaffold/template.bundle"

    wheel(old)
    assert resolve() == source.Source("~/.local/share/scaffold/template.bundle", old_tip.commit)
    assert link.readlink() == old
    wheel(new)
    resolve()
    assert link.readlink() == new
    wheel(old)
    assert resolve().ref == old_tip.commit  # its own template, from the newer bundle
    assert link.readlink() == new
    new.unlink()  # that environment is gone
    source.relink()
    assert link.readlink() == old


def test_a_home_that_cannot_be_written_to_leaves_the_bundle_where_it_is(
    machine: Machine, template: Path, tmp_path: Path, wheel: Callable[[Path], None]
) -> None:
    wheel(tmp_path / "template.bundle")
    bundle.from_history(template, tmp_path / "template.bundle")
    (machine.home / ".local").write_text("a file is in the way")
    assert resolve().url == str(tmp_path / "template.bundle")


def test_an_installation_without_a_template_says_so(tmp_path: Path, wheel: Callable[[Path], None]) -> None:
    wheel(tmp_path / "template.bundle")
    with pytest.raises(SourceError, match="install it again"):
        resolve()


def test_an_unpacked_archive_is_refused_in_one_line(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(template / ".git")
    monkeypatch.setattr(source, "_ROOT", template)
    with pytest.raises(SourceError, match=r"not the root of a git repository.*clone it with git") as refused:
        resolve()
    assert "\n" not in str(refused.value)
