"""Append-only files of JSON lines on any mount: `ledger.jsonl` and `metrics.jsonl` of a run.

Every line is one O_APPEND write, so that several processes never mix their lines. Object-store mounts cannot append:
there each writer keeps a local file and uploads it whole as `<name>.<attempt>.<writer>.jsonl` when something worth
keeping happened. What is read is parsed once, here, into the types that `ledger` and `steps` declare.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import tempfile
import typing
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainer.storage import mount

_MOST_WAITING = 10_000  # lines
_Line = TypeVar("_Line")


class Records:
    """One writer's end of `<run_dir>/<name>.jsonl`. Lines that the volume refuses are kept, and written once it can.

    Args:
        append: whether the mount can append; None: find out.
    """

    def __init__(self, run_dir: Path, name: str, attempt: int, append: bool | None = None) -> None:
        self.path = run_dir / f"{name}.jsonl"
        append = mount.inspect(run_dir).kind is not mount.Kind.OBJECT_STORE if append is None else append
        self._segment = run_dir / f"{name}.{attempt:08d}.{os.getpid()}.jsonl"
        self._descriptor: int | None = None
        self.waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._torn = False  # the file may end in a piece of a line
        self._local = None if append else Path(tempfile.mkdtemp(prefix="records_")) / self._segment.name

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line, after those that are still to be written. Raises OSError: it is kept and written later."""
        self.waiting.append(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._write_waiting()

    def _write_waiting(self) -> None:
        if self._descriptor is None:
            self._descriptor = self._open()
        while self.waiting:
            line = b"\n" * self._torn + self.waiting[0]
            written = os.write(self._descriptor, line)
            self._torn = written < len(line)
            if self._torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._local or self.path))
            self.waiting.popleft()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._local or self.path, flags, 0o644)
        size = os.fstat(descriptor).st_size
        self._torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # keep it apart from the next line
        return descriptor

    def upload(self) -> None:
        """Where the mount cannot append: put the whole segment there. Raises OSError."""
        if self._local is None or not self._local.exists():
            return
        temporary = self._segment.with_suffix(".tmp")
        temporary.write_bytes(self._local.read_bytes())
        temporary.replace(self._segment)

    def close(self) -> None:
        """Write and upload what is left, and close. Raises OSError."""
        try:
            if self.waiting:
                self._write_waiting()
            self.upload()
        finally:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def read_records(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Every record of `<name>.jsonl` and its segments; incomplete lines are skipped."""
    records: list[dict[str, Any]] = []
    for path in [run_dir / f"{name}.jsonl", *sorted(run_dir.glob(f"{name}.[0-9]*.jsonl"))]:
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
    return records


def parse(kind: type[_Line], record: Mapping[str, Any]) -> _Line | None:
    """`record` as `kind`, a dataclass of int, float and str; None where a value has another type or one is missing.

    What is null or not finite takes its default; what `kind` does not name is ignored.
    """
    values: dict[str, Any] = {}
    for name, wanted in _types(kind).items():  # type: ignore[arg-type]  # mypy: a type is hashable
        value = record.get(name)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            continue
        if isinstance(value, bool) or not isinstance(value, str if wanted is str else int | float):
            return None
        values[name] = wanted(value)
    try:
        return kind(**values)
    except TypeError:  # one without a default is missing
        return None


@functools.cache
def _types(kind: Any) -> dict[str, type[Any]]:
    """The type of each field of a dataclass, of `int | None` the int."""
    return {name: (typing.get_args(one) or (one,))[0] for name, one in typing.get_type_hints(kind).items()}
