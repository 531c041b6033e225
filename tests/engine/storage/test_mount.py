"""Which mounts can be trusted with checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.settings import PROJECT
from trainer.storage.mount import Kind, judge, mount_of, parse_mountinfo


@pytest.mark.parametrize(
    ("line", "kind", "verdict"),
    [
        ("27 1 254:0 / /data rw,relatime - ext4 /dev/vdb rw", Kind.LOCAL, "PASS"),
        ("27 1 254:0 / / rw,relatime - ext4 /dev/vda rw", Kind.LOCAL, "WARN"),
        ("25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24684084k", Kind.MEMORY, "FAIL"),
        ("25 24 0:23 / /z rw - ext4 /dev/zram0 rw", Kind.MEMORY, "FAIL"),
        ("45 27 0:40 / /m rw - overlay overlay rw,lowerdir=lo,upperdir=up,workdir=wk", Kind.CONTAINER_LAYER, "FAIL"),
        ("51 27 0:44 / /m rw,nosuid - fuse.s3fs s3fs rw,user_id=0", Kind.OBJECT_STORE, "PASS"),
        ("118 111 0:57 / /m rw,nodev shared:3 - fuse.gcsfuse my-bucket rw", Kind.OBJECT_STORE, "PASS"),
        ("2611 61 0:391 / /m rw,relatime shared:981 - fuse my-bucket rw", Kind.OBJECT_STORE, "PASS"),
        ("1 2 0:9 / /m rw,noatime - fuse mountpoint-s3 rw,user_id=0", Kind.OBJECT_STORE, "PASS"),
        ("1 2 0:9 / /m rw - fuse.rclone r2:bkt rw", Kind.OBJECT_STORE, "PASS"),
        ("47 27 0:43 / /m rw - fuse /mnt/x/b1 rw,user_id=0,allow_other", Kind.UNKNOWN, "WARN"),
        ("30 29 0:42 / /m rw - nfs4 127.0.0.1:/ rw,vers=4.1", Kind.NETWORK, "PASS"),
        ("459 55 0:40 / /m rw shared:187 - nfs4 10.0.0.5:/export rw,hard,proto=tcp", Kind.NETWORK, "PASS"),
        ("459 55 0:40 / /m rw - nfs 10.0.0.5:/export rw,soft,proto=tcp", Kind.NETWORK, "WARN"),
        ("1 2 0:9 / /m rw - lustre 172.31.14.250@tcp:/fsx rw,lazystatfs", Kind.NETWORK, "PASS"),
        ("1 2 0:9 / /m rw - virtiofs fs-8 rw", Kind.NETWORK, "PASS"),
        ("1 2 0:9 / /m rw - somefs thing rw", Kind.UNKNOWN, "WARN"),
    ],
)
def test_what_each_mount_is(line: str, kind: Kind, verdict: str) -> None:
    (parsed,) = parse_mountinfo(line)
    mount = judge(parsed)
    assert (mount.kind, mount.verdict) == (kind, verdict)


def test_a_containers_root_that_is_a_folder_of_its_host_is_thrown_away_with_it() -> None:
    (folder,) = parse_mountinfo("67 44 254:0 /srv/rootfs / rw,relatime - ext4 /dev/vda rw")
    assert judge(folder, in_container=True).kind is Kind.CONTAINER_LAYER
    assert judge(folder, in_container=False).kind is Kind.LOCAL


@pytest.mark.parametrize(
    "device", ["Amazon EC2 NVMe Instance Storage", "google-local-nvme-ssd-0", "Microsoft NVMe Direct Disk v2"]
)
def test_an_instances_own_disk_is_gone_with_it(device: str) -> None:
    (line,) = parse_mountinfo("27 1 259:1 / /scratch rw - xfs /dev/nvme1n1 rw")
    assert judge(line, device=device).verdict == "FAIL"
    assert judge(line, device="Amazon Elastic Block Store").verdict == "PASS"


def test_the_longest_mount_point_counts_and_of_equal_ones_the_last() -> None:
    lines = parse_mountinfo(
        "\n".join(
            [
                "1 0 254:0 / / rw - ext4 /dev/vda rw",
                "2 1 7:0 / /data rw - ext4 /dev/loop0 rw",
                "3 1 0:9 / /data rw - nfs4 server:/x rw",
                r"4 1 7:1 / /sp\040ace rw - xfs /dev/loop1 rw",
                "5 1 7:2 / /database rw - btrfs /dev/loop2 rw",
                "nonsense",
            ]
        )
    )
    types = {
        path: found.fstype
        for path in ("/x", "/data/run", "/sp ace/run", "/database")
        if (found := mount_of(path, lines))
    }
    assert types == {"/x": "ext4", "/data/run": "nfs4", "/sp ace/run": "xfs", "/database": "btrfs"}


# ---------------------------------------------------------------------------------------------------------------------
# Real mounts, in a mount namespace of their own

MOUNTS = """
set -e
cd "$1"; mkdir tmp disk lo up wk merged
mount -t tmpfs tmpfs tmp
mount -t overlay overlay -o lowerdir=lo,upperdir=up,workdir=wk merged
truncate -s 64M image; mkfs.ext4 -q image; mount -o loop image disk; mkdir "disk/sp ace"
mkdir bound; mount --bind "disk/sp ace" bound; ln -s "$1/tmp" link
exec "$2" -c '
import json, sys
from pathlib import Path
from trainer.storage.mount import inspect
from trainer.storage.volume import probe
names = ("tmp", "merged", "disk", "disk/sp ace", "bound", "link", "disk/not/made/yet")
found = {}
for name in names:
    path = Path(sys.argv[1], name)
    mount = inspect(path)
    found[name] = [mount.fstype, mount.kind, mount.verdict, probe(path).rename_atomic if path.exists() else None]
print(json.dumps(found))
' "$1"
"""


@pytest.mark.slow
def test_real_mounts(tmp_path: Path) -> None:
    """Needs root: tmpfs, an overlay, a loop-mounted ext4, a bind mount, a link into memory."""
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNTS, "sh", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run([*command, sys.executable], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {
        "tmp": ["tmpfs", "memory", "FAIL", True],
        "merged": ["overlay", "container layer", "FAIL", True],
        "disk": ["ext4", "disk", "PASS", True],
        "disk/sp ace": ["ext4", "disk", "PASS", True],
        "bound": ["ext4", "disk", "PASS", True],
        "link": ["tmpfs", "memory", "FAIL", True],
        "disk/not/made/yet": ["ext4", "disk", "PASS", None],
    }
