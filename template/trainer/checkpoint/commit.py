"""What makes a directory a checkpoint: COMMIT.json, written last; and how one is found to be damaged.

    step_00001000/  .metadata  __0_0.distcp …  COMMIT.json     complete
    .step_00001100.<attempt>/                                  being written
    corrupt_step_00000900/                                     quarantined: a checksum did not match

`commit_mode.py` has the other names, for mounts that cannot rename directories. Nothing here needs torch: launcher and
reports use it too.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from trainer.outcome import Damaged, UnavailableError

FORMAT = 1
COMMIT = "COMMIT.json"
MARKER = "DAMAGED.txt"  # where a damaged directory cannot be renamed
ALGORITHM = "xxh3_128"  # 20 GB/s and more on one core; not cryptographic: it finds damage, not forgery
CHUNK_BYTES = 8 << 20
_STEP = re.compile(r"step_(\d{8,})")
_BEING_WRITTEN = re.compile(r"\.step_\d{8,}\.(\d+)(?:\.\d+)?")
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
    code: Mapping[str, Any] = field(default_factory=dict)  # as `versions.code_version`; older checkpoints have none
    names: Sequence[str] = ()  # of the tensors, so that a part cannot be missing unnoticed; older ones have none

    @property
    def bytes(self) -> int:
        """Of all files that COMMIT.json lists."""
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


def attempt_of(name: str) -> int | None:
    """The attempt that wrote the unfinished save of this directory name; None for every other name."""
    match = _BEING_WRITTEN.fullmatch(name)
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
        Damaged: it is missing, incomplete, altered, or of another step.
        UnavailableError: it cannot be read for now.
    """
    path = directory / COMMIT
    try:
        body = json.loads(retry_io(path.read_bytes, path))
        claimed = body.pop("self")
        if claimed != _self_sum(body):
            raise Damaged(f"{path}: its own checksum does not match")
        if body.pop("format") != FORMAT:
            raise Damaged(f"{path}: of a format that this version does not know")
        files = {name: FileSum(**file) for name, file in body.pop("files").items()}
        known = {one.name for one in fields(Commit)}  # a later version may say more
        commit = Commit(directory=directory, files=files, **{key: body[key] for key in body if key in known})
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
    """Check that every file is there with its size. Raises Damaged or UnavailableError."""
    for name, expected in commit.files.items():
        path = commit.directory / name
        try:
            size = retry_io(path.stat, path).st_size
        except FileNotFoundError:
            raise Damaged(f"{path}: missing") from None
        if size != expected.bytes:
            raise Damaged(f"{path}: {size} bytes where {expected.bytes} were committed")


def check_file(commit: Commit, name: str) -> None:
    """Read one file of the checkpoint and compare its checksum. Raises Damaged or UnavailableError."""
    path = commit.directory / name
    try:
        _compare(path, commit.files[name], retry_io(lambda: _read_sum(path), path))
    except FileNotFoundError:
        raise Damaged(f"{path}: missing") from None


def read_checked(commit: Commit, name: str) -> bytes:
    """The content of one small file of the checkpoint, as it was checked. Raises Damaged or UnavailableError."""
    path = commit.directory / name
    try:
        content = retry_io(path.read_bytes, path)
    except FileNotFoundError:
        raise Damaged(f"{path}: missing") from None
    _compare(path, commit.files[name], sum_of(content))
    return content


def sum_of(content: bytes) -> FileSum:
    return FileSum(len(content), ALGORITHM, xxhash.xxh3_128(content).hexdigest())


def _read_sum(path: Path) -> FileSum:
    digest, size, buffer = xxhash.xxh3_128(), 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileSum(size, ALGORITHM, digest.hexdigest())


def _compare(path: Path, expected: FileSum, found: FileSum) -> None:
    if expected.algo != ALGORITHM:
        raise Damaged(f"{path}: checksum {expected.algo!r} is unknown to this version")
    if found.bytes != expected.bytes:
        raise Damaged(f"{path}: {found.bytes} bytes where {expected.bytes} were committed")
    if found != expected:
        raise Damaged(f"{path}: its checksum does not match")


def verify(commit: Commit) -> None:
    """Check everything that COMMIT.json lists. Raises Damaged or UnavailableError."""
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


def quarantined(run_dir: Path) -> list[Path]:
    """What was found damaged: there have been checkpoints, even where no directory of them is good."""
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


def is_marked(directory: Path) -> bool:
    return (directory / MARKER).exists()


def retry_io(read: Callable[[], T], path: Path, attempts: int = 4, pause_s: float = 0.5) -> T:
    """`read()`, tried again with growing pauses after an I/O error (EIO, ESTALE, EACCES): that is not damage.

    Raises:
        FileNotFoundError: there is no such file: trying again would not help.
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
                    f"start again when the volume works"
                ) from error
            time.sleep(pause_s * 2 ** (attempt - 1))
    raise AssertionError("unreachable")


def fsync_directory(path: Path) -> None:
    """Make the names in `path` durable; does nothing on mounts that cannot. Raises OSError."""
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
        return retry_io(lambda: list(run_dir.iterdir()), run_dir)
    except FileNotFoundError:
        return []
