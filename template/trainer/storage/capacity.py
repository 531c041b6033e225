"""Room: for checkpoints on the disk, and for the copy that a save writes from in memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainer.config.settings import Config
from trainer.outcome import ConfigError
from trainer.storage.mount import Kind, inspect


def check_room(config: Config, checkpoint_bytes: int, source: str, ranks: int, nodes: int, complete: int) -> list[str]:
    """See that checkpoints fit on the disk and their staged copy in memory.

    Args:
        checkpoint_bytes: of one checkpoint; `source` says in words where the figure is from.
        ranks: of this node.
        complete: checkpoints that are there already.

    Returns:
        What a person should know, one line each.

    Raises:
        ConfigError: with the numbers, and what to change.
    """
    line = check_disk(config, checkpoint_bytes, source, complete)
    check_memory(config, checkpoint_bytes, source, ranks, nodes)
    return [line]


def check_disk(config: Config, size: int, source: str, complete: int) -> str:
    """See that `keep_last` checkpoints and the one being written fit. Raises ConfigError."""
    wanted = max(1, config.checkpoint.keep_last + 1 - complete)
    if inspect(config.run_dir).kind is Kind.OBJECT_STORE:
        return f"a checkpoint takes {_size(size)} ({source}); an object store does not say how much room it has"
    disk = os.statvfs(config.run_dir)
    free = disk.f_bavail * disk.f_frsize
    if free < wanted * size:
        raise ConfigError(
            f"{config.run_dir} has {_size(free)} free and {wanted} more checkpoints of {_size(size)} ({source}) "
            f"take {_size(wanted * size)}; free some space, or lower checkpoint.keep_last"
        )
    return f"a checkpoint takes {_size(size)} ({source}); {_size(free)} free on {config.run_dir}"


def check_memory(config: Config, size: int, source: str, ranks: int, nodes: int) -> str:
    """See that the copies of a save that is being written fit into shared memory. Raises ConfigError."""
    strategy = config.parallel.strategy  # what each node holds of the state: see `parallel.mesh_of`
    staged = size * ranks if strategy == "ddp" else size if strategy == "hsdp" else size // nodes
    places = []
    for place, left, remedy in (
        ("/dev/shm", _free_shared_memory(), "make it larger (docker run --shm-size, an emptyDir of medium Memory)"),
        ("memory", free_memory(), "take a machine with more memory"),
    ):
        if left is not None and left < staged:
            raise ConfigError(
                f"{place} has {_size(left)} free and the copies of a save that is being written take {_size(staged)} "
                f"on this node ({source}); {remedy}"
            )
        places.append(f"{place} has {_size(left)}" if left is not None else f"{place} does not say what it has")
    return f"a save takes {_size(staged)} on this node while it is written; {', '.join(places)}"


def _free_shared_memory() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def free_memory() -> int | None:
    """Bytes that this machine, or its control group, can still give; None where nothing tells."""
    free = None
    if match := re.search(r"^MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.M):
        free = int(match[1]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = _text(group / "memory.max"), _text(group / "memory.current")
    if limit.isdigit() and used.isdigit():
        cache = re.search(r"^inactive_file (\d+)", _text(group / "memory.stat"), re.M)
        left = int(limit) - int(used) + (int(cache[1]) if cache else 0)
        free = left if free is None else min(free, left)
    return free


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
