"""What kind of mount a directory is on, whether it survives the machine, and what it can do.

`/proc/self/mountinfo` predicts, a probe measures, and only the persistence marker proves: a file that names the boot
it was written in and must still be there after the next one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import time
import uuid
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from trainer.config import Config, ModelConfig
from trainer.outcome import ConfigError, UnavailableError

MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
CONTAINER_LAYER = {"overlay", "aufs", "fuse.fuse-overlayfs", "fuse-overlayfs", "vfs"}
NETWORK = {
    "nfs", "nfs4", "lustre", "ceph", "fuse.ceph", "beegfs", "gpfs", "wekafs", "9p", "virtiofs", "cifs", "smb3",
    "glusterfs", "fuse.glusterfs", "afs", "pvfs2", "orangefs", "fuse.juicefs",
}  # fmt: skip
OBJECT_STORE = {
    "fuse.s3fs",
    "fuse.gcsfuse",
    "fuse.rclone",
    "fuse.goofys",
    "fuse.blobfuse2",
    "fuse.blobfuse",
    "fuse.geesefs",
}
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "ntfs3"}
EPHEMERAL_DEVICES = re.compile(
    r"Amazon EC2 NVMe Instance Storage|google-local-(nvme-)?ssd|local-nvme-ssd|Microsoft NVMe Direct Disk|nvme_card",
    re.I,
)


class Kind(StrEnum):
    MEMORY = "memory"
    CONTAINER_LAYER = "container layer"
    EPHEMERAL = "the instance's own disk"
    LOCAL = "disk"
    NETWORK = "network file system"
    OBJECT_STORE = "object store"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Mount:
    """The mount that a path is on, and what it means for checkpoints.

    `verdict`: PASS, WARN or FAIL (would not survive a reclaim); `why` is one clause for people.
    """

    point: Path
    fstype: str
    source: str
    kind: Kind
    verdict: str
    why: str

    @property
    def appends(self) -> bool:
        """Whether lines can be appended to a file there by several processes."""
        return self.kind is not Kind.OBJECT_STORE


@dataclass(frozen=True)
class MountLine:
    """One line of mountinfo: mount point, type, source, options, `major:minor`, and the root within the source."""

    point: str
    fstype: str
    source: str
    options: str
    device: str
    root: str


def parse_mountinfo(text: str) -> list[MountLine]:
    """The lines of `/proc/self/mountinfo` (proc(5)), octal escapes undone; lines of another form are skipped."""

    def plain(field: str) -> str:
        raw = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), os.fsencode(field))
        return os.fsdecode(raw)

    lines = []
    for line in text.split("\n"):
        before, dash, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if dash and len(left) >= 6 and len(right) >= 3:
            lines.append(
                MountLine(plain(left[4]), right[0], plain(right[1]), f"{left[5]},{right[2]}", left[2], plain(left[3]))
            )
    return lines


def mount_of(path: str, lines: list[MountLine]) -> MountLine | None:
    """The mount that the absolute, resolved `path` is on: the longest mount point; of equal ones the last mounted."""
    best = None
    for line in lines:
        inside = path == line.point or path.startswith(line.point.rstrip("/") + "/")
        if inside and (best is None or len(line.point) >= len(best.point)):
            best = line
    return best


def judge(line: MountLine | None, in_container: bool = False, device: str = "") -> Mount:
    """The verdict on a mount, from its line alone, what is known of its block device, and where we run."""
    if line is None:
        return Mount(Path("/"), "?", "?", Kind.UNKNOWN, "WARN", "is on a mount that /proc/self/mountinfo does not show")
    fstype, source = line.fstype, line.source

    def verdict(kind: Kind, grade: str, why: str) -> Mount:
        return Mount(Path(line.point), fstype, source, kind, grade, why)

    if fstype in MEMORY or re.match(r"/dev/z?ram\d", source):
        return verdict(Kind.MEMORY, "FAIL", f"is in memory ({fstype}): gone with the machine")
    layer = in_container and line.point == "/" and line.root != "/"  # a folder of the host; a whole disk is a VM's
    if fstype in CONTAINER_LAYER or layer:
        return verdict(Kind.CONTAINER_LAYER, "FAIL", f"is in the container's own layer ({fstype}): gone with it")
    if device and EPHEMERAL_DEVICES.search(device):
        return verdict(Kind.EPHEMERAL, "FAIL", f"is on the instance's own disk ({device}): gone with the instance")
    if fstype in OBJECT_STORE or (fstype == "fuse" and not source.startswith("/")):
        return verdict(Kind.OBJECT_STORE, "PASS", f"is an object store ({source})")
    if fstype in NETWORK:
        if fstype.startswith("nfs") and "soft" in line.options.split(","):
            return verdict(Kind.NETWORK, "WARN", "is soft-mounted NFS: a slow server becomes a write error")
        return verdict(Kind.NETWORK, "PASS", f"is a network file system ({fstype})")
    if fstype in LOCAL:
        if line.point == "/":
            return verdict(Kind.LOCAL, "WARN", "is on the root disk: lost where that is deleted with the instance")
        return verdict(Kind.LOCAL, "PASS", f"is a disk ({fstype} on {source})")
    return verdict(Kind.UNKNOWN, "WARN", f"is on {fstype} ({source}), of which nothing is known")


def inspect(path: Path) -> Mount:
    """Which mount `path` (or the nearest parent that exists) is on, and whether it can be trusted."""
    resolved = path.resolve()
    while not resolved.exists():
        resolved = resolved.parent
    try:
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        text = ""
    line = mount_of(str(resolved), parse_mountinfo(text))
    return judge(line, in_container(), device_name(line.device) if line else "")


def in_container() -> bool:
    """Whether this process runs in a container whose root is thrown away with it."""
    return (
        Path("/.dockerenv").exists()
        or Path("/run/.containerenv").exists()
        or "KUBERNETES_SERVICE_HOST" in os.environ
        or "container" in os.environ
    )


def device_name(number: str) -> str:
    """What the block device `major:minor` and those below it say of themselves: model, serial, names by id."""
    names: list[str] = []
    todo = [Path(f"/sys/dev/block/{number}")]
    while todo:
        device = todo.pop()
        with contextlib.suppress(OSError):
            real = device.resolve(strict=True)
            names.append(real.name)
            for place in (real, real.parent):  # a partition's model is its disk's
                for file in ("device/model", "device/serial"):
                    with contextlib.suppress(OSError):
                        names.append((place / file).read_text().strip())
            with contextlib.suppress(OSError):
                todo.extend((real / "slaves").iterdir())
    with contextlib.suppress(OSError):
        for link in Path("/dev/disk/by-id").iterdir():
            if link.resolve().name in names:
                names.append(link.name)
    return " ".join(dict.fromkeys(names))


@dataclass(frozen=True)
class Capabilities:
    """What a directory was seen to be able to do."""

    rename_atomic: bool  # a whole directory, on a mount that is no object store
    append: bool
    fsync: bool


def probe(directory: Path) -> Capabilities:
    """Try, inside `directory` (which exists): rename a directory with a file in it, append, fsync.

    Raises:
        OSError: not even a file can be written there.
    """
    place = directory / f".probe_{uuid.uuid4().hex}"
    place.mkdir()
    moved = place.with_name(place.name + "_moved")
    try:
        file = place / "file"
        file.write_bytes(b"1")
        append = fsync = rename = False
        with contextlib.suppress(OSError), file.open("ab") as handle:
            handle.write(b"2")
        append = file.read_bytes() == b"12"
        with contextlib.suppress(OSError):
            for target, flags in ((file, os.O_RDWR), (place, os.O_RDONLY | os.O_DIRECTORY)):
                descriptor = os.open(target, flags)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            fsync = True
        with contextlib.suppress(OSError):
            place.rename(moved)
            rename = (moved / "file").exists() and not place.exists()
    finally:
        for left in (place, moved):
            with contextlib.suppress(OSError):
                (left / "file").unlink()
            with contextlib.suppress(OSError):
                left.rmdir()
    return Capabilities(rename and inspect(directory).kind is not Kind.OBJECT_STORE, append, fsync)


# ---------------------------------------------------------------------------------------------------------------------
# What the launcher checks before it starts anything


def commit_mode(config: Config) -> Literal["rename", "manifest"]:
    """How a checkpoint becomes complete: by renaming its directory, or, where that is not atomic, by its COMMIT.json.

    `checkpoint.commit` decides; `auto` looks at the mount and tries. Raises OSError where nothing can be written.
    """
    if config.checkpoint.commit != "auto":
        return config.checkpoint.commit
    if inspect(config.run_dir).kind is Kind.OBJECT_STORE or not probe(config.run_dir).rename_atomic:
        return "manifest"
    return "rename"


def prepare(config: Config) -> list[str]:
    """Make the run's directory below a mount that exists, and see that checkpoints can live there.

    Returns:
        What a person should know, one line each.

    Raises:
        ConfigError: no volume, a place that cannot be written, or one that does not survive the machine.
        UnavailableError: the volume fails at the moment.
    """
    volume, directory = config.volume.mount, config.run_dir
    if volume and not Path(volume).is_dir():
        raise ConfigError(
            f"volume.mount is {volume!r}, which does not exist; attach the volume there, or set volume.mount to "
            f"where it is (empty: none, you vouch for checkpoint.dir)"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = probe(directory)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
            raise UnavailableError(f"{directory} fails ({error.strerror})") from None
        raise ConfigError(
            f"checkpoint.dir is {config.checkpoint.dir!r}: {error.filename or directory} cannot be written "
            f"({error.strerror}); it must be a writable place on a persistent disk"
        ) from None
    if config.checkpoint.commit == "rename" and not found.rename_atomic:
        raise ConfigError(
            "checkpoint.commit is 'rename' and directories do not rename atomically there; it must be auto or manifest"
        )
    mount = inspect(directory)
    lines = []
    survived = _mark(config) if volume else None
    if mount.verdict == "FAIL" and volume and not config.volume.allow_ephemeral:
        raise ConfigError(
            f"checkpoint.dir {str(config.checkpoint_root)!r} {mount.why}; it must be on the persistent volume "
            f"(volume.allow_ephemeral=true goes on regardless)"
        )
    if mount.verdict == "FAIL" or (mount.verdict == "WARN" and not survived and config.run.provider != "local"):
        lines.append(f"warning: checkpoint.dir {str(config.checkpoint_root)!r} {mount.why}")
    if survived is False:
        lines.append(f"warning: {str(config.checkpoint_root)!r} did not survive the last restart of this machine")
    inside = directory.resolve().is_relative_to(Path(volume or "/").resolve())
    if not inside:
        lines.append(f"warning: checkpoint.dir {str(config.checkpoint_root)!r} is not on the volume {volume!r}")
    elif volume and not os.path.ismount(volume) and mount.point != Path(volume).resolve():
        lines.append(f"warning: nothing is mounted at volume.mount {volume!r}; checkpoints go to {mount.point}")
    return lines


def _mark(config: Config) -> bool | None:
    """Leave a mark beside the checkpoints and one in the project, both naming this boot.

    Returns:
        True where the mark of an earlier boot is still there, False where only the project remembers one, else None.
    """
    there, here = config.checkpoint_root / ".persistence.json", config.project / ".last_start.json"
    boot = _text(Path("/proc/sys/kernel/random/boot_id"))
    known, marked = _json(here), _json(there)
    marks = {**marked.get("boots", {}), boot: marked.get("boots", {}).get(boot, time.time())}
    newest = dict(sorted(marks.items(), key=lambda item: item[1])[-10:])
    with contextlib.suppress(OSError):
        if newest != marked.get("boots"):
            there.write_text(json.dumps({"boots": newest}) + "\n")
        if known.get("boot") != boot or known.get("dir") != str(config.checkpoint_root):
            here.write_text(json.dumps({"boot": boot, "dir": str(config.checkpoint_root)}) + "\n")
    if any(other != boot for other in marks):
        return True
    before = known.get("boot", boot) != boot and known.get("dir") == str(config.checkpoint_root)
    return False if before else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def estimated_bytes(model: ModelConfig, averages: bool = False) -> int:
    """Bytes of a checkpoint of the model in `model.py`: fp32 weights and two moments, and averaged weights if kept."""
    hidden = model.feed_forward or 64 * -(-8 * model.width // (3 * 64))
    layer = 4 * model.width**2 + 3 * model.width * hidden + 2 * model.width
    parameters = model.vocabulary * model.width + model.layers * layer + model.width
    return 4 * parameters * (4 if averages else 3)


def check_room(config: Config, ranks: int, nodes: int) -> list[str]:
    """See that checkpoints fit on the disk and their staged copy in memory, and that files can be opened.

    Args:
        ranks: of this node.

    Returns:
        What a person should know, one line each.

    Raises:
        ConfigError: with the numbers, and what to change.
    """
    line = check_disk(config)
    check_memory(config, ranks, nodes)
    check_files(config)
    return [line]


def checkpoint_bytes(config: Config) -> tuple[int, str]:
    """Bytes of one checkpoint, and where the figure is from."""
    from trainer.checkpoint import commit

    for newest in commit.complete(config.run_dir):
        return newest.bytes, f"as step {newest.step}"
    return estimated_bytes(config.model, config.optim.ema_decay > 0), "estimated from the model"


def check_disk(config: Config) -> str:
    """See that `keep_last` checkpoints and the one being written fit. Raises ConfigError."""
    from trainer.checkpoint import commit

    size, source = checkpoint_bytes(config)
    wanted = max(1, config.checkpoint.keep_last + 1 - len(commit.complete(config.run_dir)))
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


def check_memory(config: Config, ranks: int, nodes: int) -> str:
    """See that the copies of a save that is being written fit into shared memory. Raises ConfigError."""
    size, source = checkpoint_bytes(config)
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


def check_files(config: Config) -> str:
    """See that a save may open its descriptors. Raises ConfigError."""
    tensors = (config.model.layers * 6 + 2) * (5 if config.optim.ema_decay > 0 else 4)
    needed = 2 * tensors + 256
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < needed:
        raise ConfigError(
            f"this process may open {most} files and a save needs about {needed} (two for each of {tensors} "
            f"tensors); raise the hard limit (ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile=)"
        )
    return f"a save opens about {needed} files; {'any number' if most == resource.RLIM_INFINITY else most} may be"


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
