"""What a run's directory can do and whether it outlives the machine, checked before anything starts.

The mount's kind predicts, a probe measures, and only the persistence marker proves: a file that names the boot it was
written in and must still be there after the next one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.config.settings import Config
from trainer.outcome import ConfigError, UnavailableError
from trainer.storage.mount import Kind, inspect


@dataclass(frozen=True)
class Capabilities:
    """What a directory was seen to be able to do."""

    rename_atomic: bool  # a whole directory, and not on an object store
    fsync: bool


def probe(directory: Path) -> Capabilities:
    """Try, inside `directory` (which exists), to rename a directory with a file in it and to fsync.

    Raises:
        OSError: not even a file can be written there.
    """
    place = Path(tempfile.mkdtemp(prefix=".probe_", dir=directory))
    moved, file = place.with_name(place.name + "_moved"), place / "file"
    fsync = renamed = False
    try:
        file.write_bytes(b"1")
        with contextlib.suppress(OSError):
            for path, flags in ((file, os.O_RDWR), (place, os.O_RDONLY | os.O_DIRECTORY)):
                descriptor = os.open(path, flags)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            fsync = True
        with contextlib.suppress(OSError):
            place.rename(moved)
            renamed = (moved / "file").exists() and not place.exists()
    finally:
        for left in (place, moved):
            shutil.rmtree(left, ignore_errors=True)
    return Capabilities(renamed and inspect(directory).kind is not Kind.OBJECT_STORE, fsync)


def commit_mode(config: Config) -> Literal["rename", "manifest"]:
    """How a checkpoint becomes complete: by renaming its directory, or, where that is not atomic, by its COMMIT.json.

    `checkpoint.commit` decides; `auto` looks at the mount and tries. Raises OSError where nothing can be written.
    """
    if config.checkpoint.commit != "auto":
        return config.checkpoint.commit
    return "rename" if probe(config.run_dir).rename_atomic else "manifest"


def prepare(config: Config) -> list[str]:
    """Make the run's directory below a mount that exists, and check that checkpoints can be kept there.

    Returns:
        Messages for people, one line each.

    Raises:
        ConfigError: no volume, a place that cannot be written, or one that does not survive the machine.
        UnavailableError: the volume fails for now.
    """
    volume, root = config.volume.mount, repr(str(config.checkpoint_root))
    if volume and not Path(volume).is_dir():
        raise ConfigError(
            f"volume.mount is {volume!r}, which does not exist; attach the volume there, or set volume.mount to "
            f"where it is (empty: none, and you make sure that checkpoint.dir is kept)"
        )
    directory = config.run_dir
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = probe(directory)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
            raise UnavailableError(f"{directory} cannot be used ({error.strerror})") from None
        raise ConfigError(
            f"checkpoint.dir is {config.checkpoint.dir!r}: {error.filename or directory} cannot be written "
            f"({error.strerror}); it must be a writable place on a persistent disk"
        ) from None
    if config.checkpoint.commit == "rename" and not found.rename_atomic:
        raise ConfigError(
            "checkpoint.commit is 'rename' and directories cannot be renamed atomically there; "
            "it must be auto or manifest"
        )
    mount = inspect(directory)
    survived = _mark(config) if volume else None
    if mount.verdict == "FAIL" and volume and not config.volume.allow_ephemeral:
        raise ConfigError(
            f"checkpoint.dir {root} {mount.why}; it must be on the persistent volume "
            f"(volume.allow_ephemeral=true starts anyway)"
        )
    lines = []
    if mount.verdict == "FAIL" or (mount.verdict == "WARN" and not survived and config.run.provider != "local"):
        lines.append(f"warning: checkpoint.dir {root} {mount.why}")
    if survived is False:
        lines.append(f"warning: {root} did not survive the last restart of this machine")
    if not directory.resolve().is_relative_to(Path(volume or "/").resolve()):
        lines.append(f"warning: checkpoint.dir {root} is not on the volume {volume!r}")
    elif volume and not os.path.ismount(volume) and mount.point != Path(volume).resolve():
        lines.append(f"warning: nothing is mounted at volume.mount {volume!r}; checkpoints go to {mount.point}")
    return lines


def _mark(config: Config) -> bool | None:
    """Leave a mark beside the checkpoints and one in the project, both naming this boot.

    Returns:
        True where the mark of an earlier boot is still there, False where only the project remembers one, else None.
    """
    there, here = config.checkpoint_root / ".persistence.json", config.project / ".last_start.json"
    root, boot = str(config.checkpoint_root), ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    remembered, boots = _read(here), _read(there).get("boots", {})
    marks = {boot: time.time()} | boots
    with contextlib.suppress(OSError):
        if marks != boots:
            newest = sorted(marks.items(), key=lambda item: item[1])[-10:]
            there.write_text(json.dumps({"boots": dict(newest)}) + "\n")
        if remembered != {"boot": boot, "dir": root}:
            here.write_text(json.dumps({"boot": boot, "dir": root}) + "\n")
    if len(marks) > 1:
        return True
    return False if remembered.get("dir") == root and remembered.get("boot", boot) != boot else None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
