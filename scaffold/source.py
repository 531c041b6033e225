"""Which template, and at which commit: what Copier is given, and what it stores for later updates.

Copier keeps the source's name in the project forever, so it must be one that can still be found: the absolute path
of a checkout, a git URL, or `~/.local/share/scaffold/template.bundle`. The commit is always named by its id: for the
word HEAD, Copier would mix in uncommitted changes and store a commit that exists nowhere.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from scaffold import Refused, bundle
from scaffold.git import GitError, git, succeeds

DISTRIBUTION = "scaffold"
STORE = Path(".local/share/scaffold")  # below the home directory, on every system
_ROOT = Path(__file__).resolve().parent.parent
_CARRIED = Path(__file__).resolve().with_name(bundle.NAME)
_RELEASE = re.compile(r"v?\d+(\.\d+)*(\.post\d+)?")
_COPIER_PREFIXES = ("git@", "git+", "git://", "https://github.com/", "https://gitlab.com/", "gh:", "gl:")


class SourceError(Refused):
    """There is no template in this place; one line."""


@dataclass(frozen=True)
class Source:
    """A template that Copier can clone now and find again at an update."""

    url: str  # as it will stand in the project's `_src_path`
    ref: str | None  # commit id; None for a URL that was given without one: Copier takes its newest release
    notes: tuple[str, ...] = ()  # what the user should know


def resolve(source: str | None = None, ref: str | None = None) -> Source:
    """Find the template: `source` if given, else the checkout beside this package, else where pip says that it got
    the package from, else the bundle in the wheel. Raises `SourceError`.
    """
    if source is not None:
        return _named(source, ref)
    if (_ROOT / "copier.yml").is_file():
        return _checkout(_ROOT, ref)
    return _recorded(ref) or _wheel(ref)


def relink() -> None:
    """Let the stored name of the wheel's bundle lead to the newest bundle on this machine, if this is a wheel."""
    if _CARRIED.is_file():
        _link(_CARRIED)


def _named(source: str, ref: str | None) -> Source:
    path = Path(source).expanduser()
    if path.is_dir():
        return _checkout(path.resolve(), ref)
    if path.is_file():
        try:
            tip = bundle.read_tip(path)
        except (ValueError, OSError) as error:
            raise SourceError(f"--source {source}: {error}") from error
        return Source(source if source.startswith("~") else str(path.resolve()), ref or tip.commit)
    if "://" not in source and not source.startswith(_COPIER_PREFIXES):
        raise SourceError(f"--source {source}: there is no such directory or bundle, and it is not a git URL")
    if urlsplit(source.removeprefix("git+")).password:
        raise SourceError(
            "--source: leave the password out of the URL, since it would be committed into the project; "
            "git's credential helper can supply it"
        )
    known = source.startswith(_COPIER_PREFIXES) or source.endswith(".git")
    return Source(source if known else f"git+{source}", ref)


def _checkout(root: Path, ref: str | None) -> Source:
    """The work tree at `root`, at its newest release if the template is as it was there, else at HEAD."""
    if not (root / ".git").exists():
        raise SourceError(
            f"{root} is not the root of a git repository, so its projects could not be updated: clone it with git"
        )
    try:
        head = git("rev-parse", "--verify", f"{ref or 'HEAD'}^{{commit}}", cwd=root)
    except GitError as error:
        reason = f"there is no commit {ref}" if ref else str(error)
        raise SourceError(f"the template in {root} cannot be used: {reason}") from error
    if not succeeds("cat-file", "-e", f"{head}:copier.yml", cwd=root):
        raise SourceError(f"{root} has no copier.yml at commit {head[:12]}: it is not a template")
    if ref:
        return Source(str(root), head)
    notes = []
    if git("status", "--porcelain", "--", "copier.yml", "template", cwd=root):
        notes.append("uncommitted changes of the template are left out: commit them to use them")
    if git("rev-parse", "--is-shallow-repository", cwd=root) == "true":
        notes.append("the template is a shallow clone: `git fetch --unshallow` there before the first update")
    tags = git("tag", "--merged", "HEAD", "--sort=-version:refname", cwd=root).split()
    newest = next((tag for tag in tags if _RELEASE.fullmatch(tag)), None)
    if newest and succeeds("diff", "--quiet", newest, "HEAD", "--", "copier.yml", "template", cwd=root):
        head = git("rev-parse", f"{newest}^{{commit}}", cwd=root)
    elif newest:
        notes.append(f"the template has changed since {newest}: `copier update` will wait for the release after it")
    return Source(str(root), head, tuple(notes))


def _recorded(ref: str | None) -> Source | None:
    """The git URL or the checkout that pip installed this package from (PEP 610), if it can still be read."""
    from importlib import metadata

    try:
        record = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    url = record.get("url", "")
    if "vcs_info" in record:
        commit = record["vcs_info"].get("commit_id")
        address = url if url.startswith(_COPIER_PREFIXES) or url.endswith(".git") else f"git+{url}"
        reachable = succeeds("ls-remote", "--exit-code", url, "HEAD", cwd=Path.cwd())
        return Source(address, ref or commit) if reachable else None
    if "dir_info" in record and url.startswith("file://"):
        try:
            return _checkout(Path(unquote(urlsplit(url).path)), ref)
        except SourceError:
            return None
    return None


def _wheel(ref: str | None) -> Source:
    try:
        tip = bundle.read_tip(_CARRIED)
    except (ValueError, OSError) as error:
        raise SourceError(f"this installation carries no template ({error}): install it again") from error
    return Source(_link(_CARRIED), ref or tip.commit)


def _link(carried: Path) -> str:
    """Point the stored name at `carried` unless it leads to a newer bundle already, and return that name.

    A link, so that upgrading the package is all that plain `copier update` needs; never backwards, so that an older
    installation beside a newer one does not take commits away from projects that were made from them.
    """
    stored = Path("~") / STORE / bundle.NAME
    try:
        link = stored.expanduser()
        if link.exists() and _states(link) > bundle.read_tip(carried).states:
            return str(stored)
        if link.is_symlink() and link.readlink() == carried:
            return str(stored)
        link.parent.mkdir(parents=True, exist_ok=True)
        fresh = link.with_name(f".{link.name}.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(carried)
        fresh.replace(link)
    except (OSError, RuntimeError):  # no home directory, or none that can be written
        return str(carried)
    return str(stored)


def _states(path: Path) -> int:
    try:
        return bundle.read_tip(path).states
    except (ValueError, OSError):
        return 0
