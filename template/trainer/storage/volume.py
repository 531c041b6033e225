"""What a run's directory can do, measured, and whether it survives the machine: checked before anything starts.

A probe measures, and only the persistence marker proves: a file that names the boot it was written in and must still
be there after the next one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.config.settings import Config
from trainer.outcome import ConfigError, UnavailableError
from trainer.storage.mount import Kind, inspect


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
