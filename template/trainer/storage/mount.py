"""What kind of mount a directory is on, and whether it outlives the machine, as `/proc/self/mountinfo` predicts."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    MEMORY = "memory"
    CONTAINER_LAYER = "container layer"
    EPHEMERAL = "the instance's own disk"
    LOCAL = "disk"
    NETWORK = "network file system"
    OBJECT_STORE = "object store"  # no appending to a file, no renaming of a directory in one step
    UNKNOWN = "unknown"


_TYPES = {
    Kind.MEMORY: "tmpfs ramfs devtmpfs hugetlbfs",
    Kind.CONTAINER_LAYER: "overlay aufs fuse.fuse-overlayfs fuse-overlayfs vfs",
    Kind.OBJECT_STORE: "fuse.s3fs fuse.gcsfuse fuse.rclone fuse.goofys fuse.blobfuse2 fuse.blobfuse fuse.geesefs",
    Kind.NETWORK: "nfs nfs4 lustre ceph fuse.ceph beegfs gpfs wekafs 9p virtiofs cifs smb3 glusterfs fuse.glusterfs "
    "afs pvfs2 orangefs fuse.juicefs",
    Kind.LOCAL: "ext2 ext3 ext4 xfs btrfs zfs f2fs bcachefs jfs reiserfs ntfs3",
}
_KINDS = {fstype: kind for kind, types in _TYPES.items() for fstype in types.split()}
_CONTAINER_VARIABLES = {"KUBERNETES_SERVICE_HOST", "container"}
_EPHEMERAL_DEVICES = re.compile(
    r"Amazon EC2 NVMe Instance Storage|google-local-(nvme-)?ssd|local-nvme-ssd|Microsoft NVMe Direct Disk|nvme_card",
    re.I,
)


@dataclass(frozen=True)
class MountLine:
    """One line of mountinfo."""

    point: str
    fstype: str
    source: str
    options: str
    device: str  # major:minor
    root: str  # within the source


@dataclass(frozen=True)
class Mount:
    """The mount that a path is on, and what it means for checkpoints."""

    point: Path
    fstype: str
    kind: Kind
    verdict: str  # PASS, WARN or FAIL (would not survive a reclaim)
    why: str  # one clause for people


def inspect(path: Path) -> Mount:
    """Which mount `path` (or the nearest parent that exists) is on, and whether it can be trusted."""
    resolved, text = path.resolve(), ""
    while not resolved.exists():
        resolved = resolved.parent
    with contextlib.suppress(OSError):
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    line = mount_of(str(resolved), parse_mountinfo(text))
    files = (Path("/.dockerenv"), Path("/run/.containerenv"))  # the root of a container is thrown away with it
    in_container = any(file.exists() for file in files) or bool(_CONTAINER_VARIABLES & os.environ.keys())
    return judge(line, in_container, _device_name(line.device) if line else "")


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
            _, _, device, root, point, options, *_ = left
            fstype, source, more = right[:3]
            lines.append(MountLine(plain(point), fstype, plain(source), f"{options},{more}", device, plain(root)))
    return lines


def mount_of(path: str, lines: list[MountLine]) -> MountLine | None:
    """The mount that the absolute, resolved `path` is on: the longest mount point; of equal ones the last mounted."""
    inside = [line for line in lines if path == line.point or path.startswith(line.point.rstrip("/") + "/")]
    return max(reversed(inside), key=lambda line: len(line.point), default=None)


def judge(line: MountLine | None, in_container: bool = False, device: str = "") -> Mount:
    """The verdict on a mount, from its line alone, what is known of its block device, and where we run."""
    if line is None:
        return Mount(Path("/"), "?", Kind.UNKNOWN, "WARN", "is on a mount that /proc/self/mountinfo does not show")
    fstype, source, kind = line.fstype, line.source, _KINDS.get(line.fstype, Kind.UNKNOWN)
    folder_of_the_host = in_container and line.point == "/" and line.root != "/"  # a whole disk is a virtual machine's
    if kind is Kind.MEMORY or re.match(r"/dev/z?ram\d", source):
        kind = Kind.MEMORY
    elif kind is Kind.CONTAINER_LAYER or folder_of_the_host:
        kind = Kind.CONTAINER_LAYER
    elif _EPHEMERAL_DEVICES.search(device):
        kind = Kind.EPHEMERAL
    elif fstype == "fuse" and not source.startswith("/"):  # it is named after a bucket
        kind = Kind.OBJECT_STORE
    verdict, why = {
        Kind.MEMORY: ("FAIL", f"is in memory ({fstype}): gone with the machine"),
        Kind.CONTAINER_LAYER: ("FAIL", f"is in the container's own layer ({fstype}): gone with it"),
        Kind.EPHEMERAL: ("FAIL", f"is on the instance's own disk ({device}): gone with the instance"),
        Kind.OBJECT_STORE: ("PASS", f"is an object store ({source})"),
        Kind.NETWORK: ("PASS", f"is a network file system ({fstype})"),
        Kind.LOCAL: ("PASS", f"is a disk ({fstype} on {source})"),
        Kind.UNKNOWN: ("WARN", f"is on {fstype} ({source}), an unknown kind of file system"),
    }[kind]
    if kind is Kind.NETWORK and fstype.startswith("nfs") and "soft" in line.options.split(","):
        verdict, why = "WARN", "is soft-mounted NFS: a slow server becomes a write error"
    if kind is Kind.LOCAL and line.point == "/":
        verdict, why = "WARN", "is on the root disk: lost where that is deleted with the instance"
    return Mount(Path(line.point), fstype, kind, verdict, why)


def _device_name(number: str) -> str:
    """How the block device `major:minor` and those below it are called: model, serial, names by id."""
    names: list[str] = []
    todo = [Path(f"/sys/dev/block/{number}")]
    while todo:
        with contextlib.suppress(OSError):
            device = todo.pop().resolve(strict=True)
            names.append(device.name)
            for place in (device, device.parent):  # a partition's model is its disk's
                for file in ("device/model", "device/serial"):
                    with contextlib.suppress(OSError):
                        names.append((place / file).read_text().strip())
            todo.extend((device / "slaves").iterdir())
    with contextlib.suppress(OSError):
        names += [link.name for link in Path("/dev/disk/by-id").iterdir() if link.resolve().name in names]
    return " ".join(dict.fromkeys(names))
