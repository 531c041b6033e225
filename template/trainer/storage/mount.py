"""What kind of mount a directory is on, whether it survives the machine, and what it can do.

`/proc/self/mountinfo` predicts, a probe measures, and only the persistence marker proves: a file that names the boot
it was written in and must still be there after the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

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
