"""What makes a directory a checkpoint: COMMIT.json, written last; and how one is found to be damaged.

    step_00001000/  .metadata  __0_0.distcp …  COMMIT.json     complete
    .step_00001100.<attempt>/                                  being written
    corrupt_step_00000900/                                     set aside: a checksum did not hold

Where directories do not rename atomically (object-store mounts, `manifest` below) the files are written in place under
names that carry the attempt, COMMIT.json appearing is the commit, and damage is noted by a marker file.
Nothing here needs torch: launcher and reports use it too.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import xxhash

from trainer.outcome import Damaged, UnavailableError

Mode = Literal["rename", "manifest"]

FORMAT = 1
COMMIT = "COMMIT.json"
MARKER = "DAMAGED.txt"  # manifest mode
ALGORITHM = "xxh3_128"  # 20 GB/s and more on one core; not cryptographic: it finds damage, not forgery
CHUNK_BYTES = 8 << 20
_STEP = re.compile(r"step_(\d{8,})")
_CORRUPT = re.compile(r"corrupt_step_(\d{8,})(?:\.\d+)?")
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)

T = TypeVar("T")


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of one file."""

    bytes: int
    algo: str
    sum: str


@dataclass(frozen=True)
class Commit:
    """The content of a COMMIT.json, and where it lies."""

    directory: Path
    step: int
    samples: int
    attempt: int
    world_size: int
    time: float  # Unix seconds
    fingerprint: Mapping[str, Any]
    torch: str
    template: str
    files: Mapping[str, FileSum]

    @property
    def bytes(self) -> int:
        """Of all files that COMMIT.json vouches for."""
        return sum(file.bytes for file in self.files.values())

    @property
    def metadata(self) -> str:
        """Name of DCP's `.metadata`; in manifest mode it carries the attempt."""
        return next(name for name in self.files if name.startswith(".metadata"))


def directory_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's directory name; None for every other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def encode(commit: Commit) -> bytes:
    """COMMIT.json of `commit`, ending in the checksum of the rest."""
    body = {"format": FORMAT, **asdict(commit)}
    del body["directory"]
    return json.dumps({**body, "self": _self_sum(body)}, indent=1, sort_keys=True).encode() + b"\n"


def _self_sum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return f"{ALGORITHM}:{xxhash.xxh3_128(text.encode()).hexdigest()}"


def read_commit(directory: Path) -> Commit:
    """The COMMIT.json of `directory`, checked against its own checksum.

    Raises:
        Damaged: it is missing, torn, altered, or of another step.
        UnavailableError: it cannot be read now.
    """
    path = directory / COMMIT
    try:
        body = json.loads(patiently(path.read_bytes, path))
        claimed = body.pop("self")
        if claimed != _self_sum(body):
            raise Damaged(f"{path}: its own checksum does not hold")
        if body.pop("format") != FORMAT:
            raise Damaged(f"{path}: of a format that this version does not know")
        files = {name: FileSum(**file) for name, file in body.pop("files").items()}
        commit = Commit(directory=directory, files=files, **body)
    except FileNotFoundError:
        raise Damaged(f"{path}: missing") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Damaged(f"{path}: not a COMMIT.json") from None
    if commit.step != step_of(directory.name):
        raise Damaged(f"{path}: says step {commit.step}")
    if sum(name.startswith(".metadata") for name in files) != 1:
        raise Damaged(f"{path}: lists no .metadata")
    return commit


def check_sizes(commit: Commit) -> None:
    """Look that every file is there with its size. Raises Damaged or UnavailableError."""
    for name, expected in commit.files.items():
        path = commit.directory / name
        try:
            size = patiently(path.stat, path).st_size
        except FileNotFoundError:
            raise Damaged(f"{path}: missing") from None
        if size != expected.bytes:
            raise Damaged(f"{path}: {size} bytes where {expected.bytes} were committed")


def check_file(commit: Commit, name: str) -> None:
    """Read one file of the checkpoint and compare its checksum. Raises Damaged or UnavailableError."""
    path, expected = commit.directory / name, commit.files[name]
    if expected.algo != ALGORITHM:
        raise Damaged(f"{path}: checksum {expected.algo!r} is unknown to this version")
    try:
        size, found = patiently(lambda: _read_sum(path), path)
    except FileNotFoundError:
        raise Damaged(f"{path}: missing") from None
    if size != expected.bytes:
        raise Damaged(f"{path}: {size} bytes where {expected.bytes} were committed")
    if found != expected.sum:
        raise Damaged(f"{path}: its checksum does not hold")


def compare(path: Path, expected: FileSum, content: bytes) -> None:
    """Check content that has been read already. Raises Damaged."""
    if len(content) != expected.bytes:
        raise Damaged(f"{path}: {len(content)} bytes where {expected.bytes} were committed")
    if expected.algo != ALGORITHM or xxhash.xxh3_128(content).hexdigest() != expected.sum:
        raise Damaged(f"{path}: its checksum does not hold")


def _read_sum(path: Path) -> tuple[int, str]:
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return size, digest.hexdigest()


def verify(commit: Commit) -> None:
    """Check everything that COMMIT.json vouches for. Raises Damaged or UnavailableError."""
    check_sizes(commit)
    for name in commit.files:
        check_file(commit, name)


def shares(commit: Commit, ranks: int) -> list[list[str]]:
    """The shards dealt to `ranks` ranks for verification, about equal bytes each; a pure function."""
    dealt: list[list[str]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for name in sorted(commit.files, key=lambda name: (-commit.files[name].bytes, name)):
        if name != commit.metadata:
            rank = load.index(min(load))
            dealt[rank].append(name)
            load[rank] += commit.files[name].bytes
    return dealt


def directories(run_dir: Path) -> list[Path]:
    """Directories of the form `step_N`, complete or not, newest first."""
    found = [(step, path) for path in _children(run_dir) if (step := step_of(path.name)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def remains(run_dir: Path) -> list[Path]:
    """What was set aside as damaged: there have been checkpoints, even where no directory of them is good."""
    corrupt = [path for path in _children(run_dir) if _CORRUPT.fullmatch(path.name)]
    return sorted(corrupt + [path for path in directories(run_dir) if is_marked(path)])


def complete(run_dir: Path) -> list[Commit]:
    """Complete checkpoints, newest first: a valid COMMIT.json and every file with its size (no checksums read)."""
    found = []
    for path in directories(run_dir):
        with contextlib.suppress(Damaged, UnavailableError):
            if not is_marked(path):
                commit = read_commit(path)
                check_sizes(commit)
                found.append(commit)
    return found


def candidates(run_dir: Path, mode: Mode) -> Iterator[Path]:
    """Directories that may be complete, newest first.

    In manifest mode a directory without COMMIT.json is one that never was committed. In rename mode it is damage: such
    a directory only ever comes into being with its COMMIT.json.
    """
    for path in directories(run_dir):
        if not is_marked(path) and (mode == "rename" or patiently((path / COMMIT).exists, path)):
            yield path


def is_marked(directory: Path) -> bool:
    return (directory / MARKER).exists()


def set_aside(directory: Path, mode: Mode, why: str) -> Path:
    """Take a damaged checkpoint out of the way, keeping its files. Returns where they are now. Raises OSError."""
    if mode == "manifest":
        (directory / MARKER).write_text(why + "\n")
        return directory
    target, number = directory.with_name(f"corrupt_{directory.name}"), 0
    while target.exists():
        number += 1
        target = directory.with_name(f"corrupt_{directory.name}.{number}")
    directory.rename(target)
    fsync_directory(directory.parent)
    return target


def patiently(read: Callable[[], T], path: Path, attempts: int = 4, pause_s: float = 0.5) -> T:
    """`read()`, tried again with growing pauses after an I/O error (EIO, ESTALE, EACCES): that is not damage.

    Raises:
        FileNotFoundError: there is no such file: not a matter of patience.
        UnavailableError: it still fails.
    """
    for attempt in range(1, attempts + 1):
        try:
            return read()
        except OSError as error:
            if error.errno in _ABSENT:
                raise FileNotFoundError(str(path)) from None
            if attempt == attempts:
                raise UnavailableError(
                    f"{path}: cannot be read ({error.strerror}), {attempts} times; nothing was changed, "
                    f"start again when the volume is well"
                ) from error
            time.sleep(pause_s * 2 ** (attempt - 1))
    raise AssertionError("unreachable")


def fsync_directory(path: Path) -> None:
    """Make the names in `path` durable. Mounts that know no such thing are left alone. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and fsync it. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _children(run_dir: Path) -> list[Path]:
    try:
        return patiently(lambda: list(run_dir.iterdir()), run_dir)
    except FileNotFoundError:
        return []
