"""Checkpoints on a real object store: s3fs over a local S3 server. Needs root, s3fs and `moto_server`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.checkpoint.test_save import complete, job, until
from trainer.checkpoint import commit as commits
from trainer.checkpoint.dcp.reader import load_tensors
from trainer.checkpoint.lease import Lease
from trainer.storage import mount, volume

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Path]:
    """An empty bucket, mounted."""
    server = shutil.which("moto_server", path=f"{sys.prefix}/moto/bin:{os.environ['PATH']}")
    assert server and shutil.which("s3fs"), "needs Debian's package s3fs, and moto[server] in .venv/moto or on PATH"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, mount, secret = f"http://127.0.0.1:{port}", tmp_path / "mount", tmp_path / "secret"
    mount.mkdir()
    secret.write_text("key:secret")
    secret.chmod(0o600)
    with (tmp_path / "moto.log").open("w") as log:
        moto = subprocess.Popen([server, "-p", str(port)], stdout=log, stderr=log)
    try:
        until(lambda: _answers(port))
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"))
        options = f"url={url},use_path_request_style,passwd_file={secret}"
        subprocess.run(["s3fs", "bucket", str(mount), "-o", options], check=True)
        until(lambda: mount.is_mount())
        yield mount
        subprocess.run(["fusermount", "-uz", str(mount)], check=True)
    finally:
        moto.kill()
        moto.wait()


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_saved_killed_and_resumed_on_an_object_store(bucket: Path) -> None:
    run_dir = bucket / "run"
    run_dir.mkdir()
    assert mount.inspect(run_dir).kind is mount.Kind.OBJECT_STORE
    assert not volume.probe(run_dir).rename_atomic

    with (
        Lease.acquire(run_dir) as lease,
        job("train", run_dir, attempt=lease.next_epoch(), COMMIT="manifest", STEPS="60") as one,
    ):
        one.until("saving")
        one.until("saving")
        for rank in one.ranks:  # everything at once, in the middle of a save
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
    newest = complete(run_dir)[0]
    assert newest >= 5
    for commit in commits.complete(run_dir):
        commits.verify(commit)

    with (
        Lease.acquire(run_dir) as lease,
        job("train", run_dir, attempt=lease.next_epoch(), COMMIT="manifest", STEPS="27") as one,
    ):
        assert one.end(300) == [0, 0], one.output
        said = one.said()
    assert said[0] == {"resumed": newest}
    assert complete(run_dir) == [27, 25, 20]
    for commit in commits.complete(run_dir):
        commits.verify(commit)
        assert all(".a2." in name or "_a2." in name for name in commit.files)
    assert load_tensors(run_dir)[1] == 27
    begin = time.monotonic()
    Lease.acquire(run_dir).release()
    assert time.monotonic() - begin < 10, "a lease that was given back is free at once"
