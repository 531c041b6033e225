"""Room: for checkpoints on the disk, and for the copy that a save writes from in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from trainer.config.settings import Config, ModelConfig
from trainer.outcome import ConfigError
from trainer.storage.mount import Kind, inspect


def estimated_bytes(model: ModelConfig, averages: bool = False) -> int:
    """Bytes of a checkpoint of the model in `model.py`: fp32 weights and two moments, and averaged weights if kept."""
    hidden = model.feed_forward or 64 * -(-8 * model.width // (3 * 64))
    layer = 4 * model.width**2 + 3 * model.width * hidden + 2 * model.width
    parameters = model.vocabulary * model.width + model.layers * layer + model.width
    return 4 * parameters * (4 if averages else 3)


def check_room(config: Config, ranks: int, nodes: int, kept: Sequence[int]) -> list[str]:
    """See that checkpoints fit on the disk and their staged copy in memory.

    Args:
        ranks: of this node.
        kept: bytes of the complete checkpoints on the disk, of the newest one first.

    Returns:
        What a person should know, one line each.

    Raises:
        ConfigError: with the numbers, and what to change.
    """
    line = check_disk(config, kept)
    check_memory(config, ranks, nodes, kept)
    return [line]


def checkpoint_bytes(config: Config, kept: Sequence[int]) -> tuple[int, str]:
    """Bytes of one checkpoint, and where the figure is from."""
    if kept:
        return kept[0], "as the newest one"
    return estimated_bytes(config.model, config.optim.ema_decay > 0), "estimated from the model"


def check_disk(config: Config, kept: Sequence[int]) -> str:
    """See that `keep_last` checkpoints and the one being written fit. Raises ConfigError."""
    size, source = checkpoint_bytes(config, kept)
    wanted = max(1, config.checkpoint.keep_last + 1 - len(kept))
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


def check_memory(config: Config, ranks: int, nodes: int, kept: Sequence[int]) -> str:
    """See that the copies of a save that is being written fit into shared memory. Raises ConfigError."""
    size, source = checkpoint_bytes(config, kept)
    staged = size * ranks if config.parallel.strategy == "ddp" else size // nodes
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
