"""What the launcher refuses, warns of and remembers about the place of checkpoints, before it starts anything."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config.settings import CheckpointConfig, Config, RunConfig, VolumeConfig
from trainer.outcome import ConfigError
from trainer.storage import volume
from trainer.storage.volume import commit_mode, probe


def _config(project: Path, **sections: object) -> Config:
    return replace(Config(project=project), run=RunConfig(name="run"), **sections)  # type: ignore[arg-type]


def test_a_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert found.rename_atomic and found.fsync
    assert list(tmp_path.iterdir()) == []


def test_directories_are_made_below_what_exists(tmp_path: Path) -> None:
    volume.prepare(_config(tmp_path, checkpoint=CheckpointConfig(dir="a/b/c")))
    assert (tmp_path / "a/b/c/run").is_dir()


def test_a_missing_volume_is_refused_and_not_made(tmp_path: Path) -> None:
    settings = VolumeConfig(mount=str(tmp_path / "volume"))
    config = _config(tmp_path, volume=settings, checkpoint=CheckpointConfig(dir=str(tmp_path / "volume/run")))
    with pytest.raises(ConfigError, match=r"volume\.mount is .*does not exist"):
        volume.prepare(config)
    assert not (tmp_path / "volume").exists()


def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"checkpoint\.dir is 'file/below': .*cannot be written"):
        volume.prepare(_config(tmp_path, checkpoint=CheckpointConfig(dir="file/below")))


def test_memory_is_refused_as_a_volume_unless_allowed() -> None:
    place = Path("/dev/shm") / f"storage-test-{os.getpid()}"
    place.mkdir()
    try:
        config = _config(
            place, volume=VolumeConfig(mount=str(place)), checkpoint=CheckpointConfig(dir=str(place / "c"))
        )
        with pytest.raises(ConfigError, match=r"in memory \(tmpfs\).*allow_ephemeral"):
            volume.prepare(config)
        allowed = replace(config, volume=replace(config.volume, allow_ephemeral=True))
        assert any("in memory" in line for line in volume.prepare(allowed))
    finally:
        subprocess.run(["rm", "-r", str(place)], check=True)


def test_checkpoints_beside_the_volume_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    config = _config(tmp_path, volume=VolumeConfig(mount=str(tmp_path / "volume")))
    assert any("not on the volume" in line for line in volume.prepare(config))


def test_a_place_that_did_not_survive_the_last_boot_is_said(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    config = _config(
        tmp_path,
        volume=VolumeConfig(mount=str(tmp_path / "volume")),
        checkpoint=CheckpointConfig(dir=str(tmp_path / "volume/c")),
    )
    volume.prepare(config)
    mark, memory = tmp_path / "volume/c/.persistence.json", tmp_path / ".last_start.json"
    assert not any("survive" in line for line in volume.prepare(config))
    for file in (mark, memory):  # as if both had been written in an earlier boot
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        file.write_text(file.read_text().replace(boot, "another-boot"))
    remembered = memory.read_text()
    assert not any("survive" in line for line in volume.prepare(config))
    memory.write_text(remembered)
    mark.unlink()
    assert any("did not survive" in line for line in volume.prepare(config))


def test_the_commit_is_by_rename_on_a_disk_and_as_configured(tmp_path: Path) -> None:
    config = _config(tmp_path)
    config.run_dir.mkdir(parents=True)
    assert commit_mode(config) == "rename"
    assert commit_mode(replace(config, checkpoint=CheckpointConfig(commit="manifest"))) == "manifest"
