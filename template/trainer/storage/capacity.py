"""Room for checkpoints on the disk, and in memory for the copy that a save is written from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from trainer.config.settings import Config
from trainer.outcome import ConfigError
from trainer.storage.mount import Kind, inspect
from trainer.wording import counted, size


def check_room(config: Config, needed: int, source: str, ranks: int, nodes: int, complete: int) -> str:
    """Check that checkpoints fit on the disk, and their staged copy in memory.

    Args:
        needed: bytes of one checkpoint; `source` says in words where the figure is from.
        ranks: of this node.
        complete: checkpoints that are there already.

    Returns:
        What a person should know of the disk, one line.

    Raises:
        ConfigError: with the numbers, and what to change.
    """
    line = check_disk(config, needed, source, complete)
    check_memory(config, needed, source, ranks, nodes)
    return line


def check_disk(config: Config, needed: int, source: str, complete: int) -> str:
    """Check that `keep_last` checkpoints and the one being written fit. Raises ConfigError."""
    wanted = max(1, config.checkpoint.keep_last + 1 - complete)
    if inspect(config.run_dir).kind is Kind.OBJECT_STORE:
        return f"a checkpoint takes {size(needed)} ({source}); the free space of an object store is not known"
    free = shutil.disk_usage(config.run_dir).free
    if free < wanted * needed:
        raise ConfigError(
            f"{config.run_dir} has {size(free)} free, too little for {counted(wanted, 'more checkpoint')} of "
            f"{size(needed)} ({source}); free some space, or lower checkpoint.keep_last"
        )
    return f"a checkpoint takes {size(needed)} ({source}); {size(free)} free on {config.run_dir}"


def check_memory(config: Config, needed: int, source: str, ranks: int, nodes: int) -> str:
    """Check that the copies of a save that is being written fit into shared memory. Raises ConfigError."""
    strategy = config.parallel.strategy  # what each node holds of the state: see `parallel.mesh_of`
    staged = needed * ranks if strategy == "ddp" else needed if strategy == "hsdp" else needed // nodes
    said = []
    for place, left, remedy in (
        ("/dev/shm", free_shared_memory(), "make it larger (docker run --shm-size, an emptyDir of medium Memory)"),
        ("memory", free_memory(), "take a machine with more memory"),
    ):
        if left is not None and left < staged:
            raise ConfigError(
                f"{place} has {size(left)} free and the copies of a save that is being written take {size(staged)} "
                f"on this node ({source}); {remedy}"
            )
        said.append(f"{place} has {size(left)}" if left is not None else f"the free space of {place} is not known")
    return f"a save takes {size(staged)} on this node while it is written; {', '.join(said)}"


def free_shared_memory() -> int | None:
    """Free bytes of /dev/shm; None where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def free_memory() -> int | None:
    """Bytes that this machine, or its control group, can still give; None where neither is known."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.M)
    found = [int(available[1]) * 1024] if available else []
    group = Path("/sys/fs/cgroup")
    limit, used = _text(group / "memory.max"), _text(group / "memory.current")
    if limit.isdigit() and used.isdigit():
        cache = re.search(r"^inactive_file (\d+)", _text(group / "memory.stat"), re.M)
        found.append(int(limit) - int(used) + (int(cache[1]) if cache else 0))
    return min(found, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
