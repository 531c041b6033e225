"""`python -m trainer checkpoints list|verify|prune`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.checkpoint.alone import save
from trainer.config.settings import CheckpointConfig, Config, RunConfig
from trainer.tools import inventory


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run with steps 10, 20, 30; 20 is damaged inside, an unfinished save and one quarantined lie beside them."""
    config = Config(checkpoint=CheckpointConfig(dir=str(tmp_path), keep_last=1), run=RunConfig(name="run"))
    for step in (10, 20, 30):
        save(config.run_dir, step, attempt=2)
    shard = config.run_dir / "step_00000020" / "__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:2000] + bytes([content[2000] ^ 1]) + content[2001:])
    (config.run_dir / ".step_00000040.1").mkdir()
    (config.run_dir / "corrupt_step_00000005").mkdir()
    return config


def test_the_list_shows_what_is_there(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert inventory.show(config.run_dir, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "step_00000030", "step_00000020", "step_00000010", ".step_00000040.1", "corrupt_step_00000005",
    ]  # fmt: skip
    assert "complete" in lines[0] and "1 rank" in lines[0] and "MB" in lines[0] and "attempt 2" in lines[0]
    assert "unfinished" in lines[3] and "quarantined" in lines[4]
    assert inventory.show(config.run_dir, as_json=True) == 0
    newest = json.loads(capsys.readouterr().out)[0]
    assert (newest["step"], newest["samples"], newest["world_size"], newest["state"]) == (30, 240, 1, "complete")


def test_verify_reads_every_byte(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert inventory.verify(config.run_dir) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [("whole" in line, "DAMAGED" in line) for line in lines] == [(True, False), (False, True), (True, False)]
    assert "__0_0.distcp" in lines[1]
    assert inventory.verify(config.run_dir, 30) == 0
    assert inventory.verify(config.run_dir, 35) == 1


def test_prune_keeps_what_is_asked_for(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert inventory.prune(config, keep=2) == 0
    assert "removed: checkpoints 1, leftovers 1; kept: 2" in capsys.readouterr().out
    assert inventory.prune(config) == 0
    assert sorted(path.name for path in config.run_dir.iterdir() if "step" in path.name) == [
        "corrupt_step_00000005", "step_00000030",
    ]  # fmt: skip


def test_an_empty_run_has_nothing_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(checkpoint=CheckpointConfig(dir=str(tmp_path)), run=RunConfig(name="none"))
    assert inventory.show(config.run_dir, as_json=False) == 0
    assert inventory.verify(config.run_dir) == 0
    assert inventory.prune(config) == 0
    assert capsys.readouterr().out.count("holds no checkpoint") == 3
