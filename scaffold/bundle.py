"""The template as one file: a git bundle with every state that `copier.yml` and `template/` ever had.

The bundle is made of a synthetic chain of commits, one for each state on the first-parent line of the product's
history. A commit depends on nothing but the states up to it (author, date and message are fixed), so two builds give
the same ids and an older bundle's chain is the beginning of a newer one's: a project made from an old wheel finds its
own commit in a new one. Tags are left out, so that Copier takes the newest state. The number of states is in a ref,
where it can be read without git.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from scaffold.git import GitError, git

NAME = "template.bundle"
_STATES = "refs/states/"
_FIRST_SECOND = 1_600_000_000  # Unix time of the first commit; each one later is a second younger
_IDENTITY = "scaffold <scaffold@localhost>"


@dataclass(frozen=True)
class Tip:
    """The newest state of a bundle."""

    commit: str  # full id
    states: int  # how many the chain has, at least 1


@dataclass(frozen=True)
class _State:
    """Ids of the two objects that make one state."""

    copier_yml: str
    template: str


def read_tip(bundle: Path) -> Tip:
    """Read the header of a bundle; raises `ValueError` if it is not one of ours, `OSError` if it cannot be read."""
    with bundle.open("rb") as file:
        if not file.readline().startswith(b"# v"):
            raise ValueError(f"{bundle} is not a git bundle")
        for line in file:
            commit, _, ref = line.decode(errors="replace").strip().partition(" ")
            if ref.startswith(_STATES):
                return Tip(commit, int(ref.removeprefix(_STATES)))
            if not ref:
                break
    raise ValueError(f"{bundle} is a git bundle, but not one of this product's templates")


def from_history(root: Path, target: Path) -> Tip:
    """Write the bundle of a checkout's committed history up to HEAD.

    Uncommitted changes stay out. Raises `GitError`, also if no commit holds a template.
    """
    commits = git("rev-list", "--first-parent", "--reverse", "HEAD", cwd=root).split()
    names = "".join(f"{commit}:copier.yml\n{commit}:template\n" for commit in commits)
    found = git("cat-file", "--batch-check=%(objectname) %(objecttype)", cwd=root, stdin=names).splitlines()
    states: list[_State] = []
    for copier_yml, template in zip(found[::2], found[1::2], strict=True):
        if not (copier_yml.endswith(" blob") and template.endswith(" tree")):
            continue
        state = _State(copier_yml.split()[0], template.split()[0])
        if not states or states[-1] != state:
            states.append(state)
    if not states:
        raise GitError(f"no commit of {root} holds copier.yml and template/")
    objects = (root / git("rev-parse", "--git-path", "objects", cwd=root)).resolve()
    with tempfile.TemporaryDirectory(prefix="scaffold-bundle-") as scratch:
        repo = Path(scratch)
        git("init", "--quiet", "--initial-branch=main", "--template=", cwd=repo)
        (repo / ".git/objects/info").mkdir(exist_ok=True)
        (repo / ".git/objects/info/alternates").write_text(f"{objects}\n")
        _commit(repo, states)
        return _write(repo, target, len(states))


def _commit(repo: Path, states: list[_State]) -> None:
    """Make the chain: one commit for each state."""
    stream = []
    for number, state in enumerate(states, start=1):
        message = f"Template, state {number}\n"
        stream.append(
            f"commit refs/heads/main\n"
            f"committer {_IDENTITY} {_FIRST_SECOND + number} +0000\n"
            f"data {len(message)}\n{message}"
            f"M 100644 {state.copier_yml} copier.yml\n"
            f"M 040000 {state.template} template\n"
        )
    git("fast-import", "--quiet", cwd=repo, stdin="".join(stream))


def _write(repo: Path, target: Path, states: int) -> Tip:
    git("update-ref", f"{_STATES}{states}", "refs/heads/main", cwd=repo)
    target.parent.mkdir(parents=True, exist_ok=True)
    # One thread: the same packing, hence the same bytes, on every machine with this version of git.
    fresh = target.with_name(f".{target.name}.new")
    refs = ("HEAD", "refs/heads/main", f"{_STATES}{states}")
    git("-c", "pack.threads=1", "bundle", "create", "--quiet", str(fresh.resolve()), *refs, cwd=repo)
    fresh.replace(target)
    return read_tip(target)
