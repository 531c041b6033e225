"""One writer per run: a lease with a heartbeat, an epoch that only rises, and one lock for every commit.

    lease.json     {epoch, beat, time, released, holder}: who holds the run; the heartbeat counts `beat` up
    .lease.lock    flock held by the launcher of node 0 for its life
    .commit.lock   flock held for the moment of a commit, a prune or a change of lease.json

A free `.lease.lock` whose last holder ran on this same kernel and mount proves that it is dead: the next start takes
over at once. In every other case the next start watches `beat`: one that moves is a living holder; one that stands
still for `STALE_S` on the watcher's own clock (no clocks are compared) is taken over. Each start of the ranks raises
the epoch, and whoever commits or prunes checks it under `.commit.lock`, so a writer of an older epoch can do neither.
On mounts without flock this is best effort.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainer.checkpoint.commit import attempt_of, directories, fsync_directory, read_commit, write_durably
from trainer.ledger import read_events
from trainer.outcome import Damaged, UnavailableError

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
STALE_S = 30.0  # a heartbeat that has not moved for this long is that of a dead holder
LOCK_S = 30.0  # how long to wait for the commit lock
_POLL_S = 0.05
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_LEASE, _LIFE_LOCK, _COMMIT_LOCK = "lease.json", ".lease.lock", ".commit.lock"


class Fenced(Exception):
    """A later attempt of the run has begun: this one may neither commit nor prune. The text is one line."""


@dataclass(frozen=True)
class Record:
    """The content of lease.json."""

    epoch: int = 0
    beat: int = 0
    time: float = 0.0  # Unix seconds of the last heartbeat
    released: bool = False
    holder: Mapping[str, Any] = field(default_factory=dict)


def read_record(run_dir: Path) -> Record | None:
    """lease.json, or None where there is none, or it cannot be parsed."""
    try:
        record = Record(**json.loads((run_dir / _LEASE).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        return None
    whole = type(record.epoch) is int and type(record.beat) is int and 0 <= record.epoch < 2**53
    rest = isinstance(record.time, int | float) and isinstance(record.holder, dict)
    return record if whole and rest else None


def current_epoch(run_dir: Path) -> int:
    """The epoch of the run's newest attempt; 0 before the first. Raises OSError."""
    record = read_record(run_dir)
    return record.epoch if record else _highest_attempt(run_dir)


def _highest_attempt(run_dir: Path) -> int:
    """The highest attempt that left a trace in names or ledger: what the epoch falls back to without a lease.json."""
    highest = 0
    with contextlib.suppress(FileNotFoundError):
        for path in run_dir.iterdir():
            highest = max(highest, attempt_of(path.name) or 0)
    for path in directories(run_dir):
        with contextlib.suppress(Damaged, UnavailableError):
            highest = max(highest, read_commit(path).attempt)
    return max([highest, *(event.attempt for event in read_events(run_dir))])


@contextlib.contextmanager
def commit_lock(run_dir: Path, epoch: int, timeout_s: float = LOCK_S) -> Iterator[None]:
    """Hold the lock under which the run's checkpoints change, as the attempt `epoch`.

    Raises:
        Fenced: a later attempt has begun.
        UnavailableError: the lock could not be taken in `timeout_s`; names its holder.
        OSError
    """
    with _locked(run_dir, timeout_s):
        if (newest := current_epoch(run_dir)) > epoch:
            raise Fenced(f"attempt {epoch} of {run_dir} may not change its checkpoints: attempt {newest} has begun")
        yield


@contextlib.contextmanager
def _locked(run_dir: Path, timeout_s: float) -> Iterator[None]:
    path = run_dir / _COMMIT_LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        give_up = time.monotonic() + timeout_s
        while not _try_lock(descriptor):
            if time.monotonic() > give_up:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "a process that left no name"
                raise UnavailableError(
                    f"{path} has been held for {timeout_s:.0f} s by {holder}: end that process, then start again"
                )
            time.sleep(_POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Try to flock; on mounts that know no locks it counts as taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


class Lease:
    """The right to write a run's checkpoints. Use `Lease.acquire`; another start may take it over (`lost`)."""

    def __init__(self, run_dir: Path, holder: Mapping[str, Any], descriptor: int, heartbeat_s: float) -> None:
        self.run_dir, self.holder = run_dir, holder
        self._descriptor = descriptor
        self._lost, self._ended = threading.Event(), threading.Event()
        self._heart = threading.Thread(target=self._beat, args=(heartbeat_s,), name="lease heartbeat", daemon=True)

    @classmethod
    def acquire(
        cls,
        run_dir: Path,
        holder_extra: Mapping[str, Any] | None = None,
        *,
        stale_s: float = STALE_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> Self:
        """Take the run's lease, at once where the last holder is known to be gone, else after `stale_s`.

        Args:
            holder_extra: what else lease.json records of the holder.

        Raises:
            UnavailableError: a living process holds it; the text names it and the age of its heartbeat.
            OSError
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor, free = _open_life_lock(run_dir)
        try:
            seen = read_record(run_dir)
            if not (free and _is_gone(seen, descriptor)):
                free = _watch(run_dir, seen, stale_s, descriptor, free)
            with _locked(run_dir, LOCK_S):
                if (now := read_record(run_dir)) != seen:
                    raise _held(run_dir, now)
                if not _is_current(run_dir, descriptor) or not free:  # a holder that is stopped keeps the old lock
                    os.close(descriptor)
                    (run_dir / _LIFE_LOCK).unlink(missing_ok=True)
                    descriptor, free = _open_life_lock(run_dir)
                holder = _identity(descriptor) | dict(holder_extra or {})
                epoch = seen.epoch if seen else _highest_attempt(run_dir)
                _write(run_dir, Record(epoch=epoch, beat=(seen.beat + 1) if seen else 0, holder=holder))
        except BaseException:
            os.close(descriptor)
            raise
        lease = cls(run_dir, holder, descriptor, heartbeat_s)
        lease._heart.start()
        return lease

    @property
    def lost(self) -> bool:
        """Whether another start has taken the run over: end the ranks, their saves can no longer be committed."""
        return self._lost.is_set()

    def next_epoch(self) -> int:
        """Raise the epoch for a new start of the ranks. Returns it.

        Raises:
            UnavailableError: the lease is lost, or the commit lock could not be taken.
            OSError
        """
        with _locked(self.run_dir, LOCK_S):
            record = self._still_mine()
            if record is None:
                raise _held(self.run_dir, read_record(self.run_dir))
            _write(self.run_dir, replace(record, epoch=record.epoch + 1))
            return record.epoch + 1

    def release(self) -> None:
        """Give the lease back, so that the next start need not wait. Safe to call twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._heart.join()
        try:
            with _locked(self.run_dir, LOCK_S):
                if record := self._still_mine():
                    _write(self.run_dir, replace(record, released=True))
        except (OSError, UnavailableError) as error:
            log.warning(
                "the lease of %s could not be given back (%s); the next start may wait for it", self.run_dir, error
            )
        finally:
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _still_mine(self) -> Record | None:
        record = read_record(self.run_dir)
        if record is None:  # lease.json was removed: the lock file still says that the run is ours
            return Record(epoch=_highest_attempt(self.run_dir), holder=self.holder)
        if record.holder.get("id") == self.holder["id"]:
            return record
        self._lost.set()
        return None

    def _beat(self, heartbeat_s: float) -> None:
        warned = False
        while not self._ended.wait(heartbeat_s) and not self.lost:
            try:
                # Under the lock, so that a process stopped in here and continued later cannot undo a take-over.
                with _locked(self.run_dir, heartbeat_s):
                    if record := self._still_mine():
                        _write(self.run_dir, replace(record, beat=record.beat + 1), durable=False)
                warned = False
            except (OSError, UnavailableError) as error:
                if not warned:
                    log.warning("the heartbeat of %s is late (%s)", self.run_dir, error)
                warned = True


def _write(run_dir: Path, record: Record, durable: bool = True) -> None:
    path = run_dir / _LEASE
    temporary = path.with_name(f".lease.{uuid.uuid4().hex}")
    content = json.dumps(asdict(replace(record, time=time.time())), indent=1).encode()
    try:
        if durable:
            write_durably(temporary, content)
        else:
            temporary.write_bytes(content)
        try:
            temporary.replace(path)
        except OSError:  # an object store that renames nothing; there this is best effort
            path.write_bytes(content)
            temporary.unlink(missing_ok=True)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(run_dir)


def _open_life_lock(run_dir: Path) -> tuple[int, bool]:
    """The lock file, opened, and whether its flock is ours now."""
    descriptor = os.open(run_dir / _LIFE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        return descriptor, _try_lock(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _is_current(run_dir: Path, descriptor: int) -> bool:
    """Whether the opened lock file still is the one of that name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), (run_dir / _LIFE_LOCK).stat())
    return False


def _identity(descriptor: int) -> dict[str, Any]:
    return {
        "id": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.time(),
        "kernel": _kernel(descriptor),
    }


def _kernel(descriptor: int) -> str:
    """Equal for two processes whose flocks of this file see each other for certain: one boot, one mounted disk."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return f"{boot}:{os.fstat(descriptor).st_dev}"


def _is_gone(record: Record | None, descriptor: int) -> bool:
    """Whether a free lock proves that the holder of `record` is gone."""
    return record is None or record.released or record.holder.get("kernel") == _kernel(descriptor)


def _watch(run_dir: Path, seen: Record | None, stale_s: float, descriptor: int, free: bool) -> bool:
    """Return when lease.json has not changed for `stale_s`, or its holder has died on this machine meanwhile.

    Returns:
        Whether the lock is ours now.

    Raises:
        UnavailableError: the heartbeat has moved.
    """
    if seen and not seen.released:
        log.warning("%s; watching its heartbeat for %.0f s", _held(run_dir, seen), stale_s)
    start = time.monotonic()
    while time.monotonic() - start < stale_s:
        time.sleep(min(0.25, stale_s / 10))
        if (now := read_record(run_dir)) != seen:
            raise _held(run_dir, now)
        if not free and (free := _try_lock(descriptor)) and _is_gone(seen, descriptor):
            break
    return free


def _held(run_dir: Path, record: Record | None) -> UnavailableError:
    holder = record.holder if record else {}
    age = f"{max(0.0, time.time() - record.time):.0f} s ago" if record else "unknown"
    return UnavailableError(
        f"run {run_dir} is held by process {holder.get('pid', '?')} on {holder.get('host', '?')} "
        f"(attempt {record.epoch if record else '?'}, last heartbeat {age}): one run has one writer; end that one first"
    )
