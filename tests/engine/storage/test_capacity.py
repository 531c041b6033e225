"""Room on the disk and in memory: too little is refused with the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.settings import Config, ParallelConfig, RunConfig
from trainer.outcome import ConfigError
from trainer.storage import capacity
from trainer.storage.capacity import check_memory, check_room


@pytest.fixture
def config(tmp_path: Path) -> Config:
    found = Config(project=tmp_path, run=RunConfig(name="run"))
    found.run_dir.mkdir(parents=True)
    return found


def test_too_little_room_is_refused_with_the_numbers(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"too little for 4 more checkpoints of 10 TB \(as step 7\); .*keep_last"):
        check_room(config, 10**13, "as step 7", ranks=1, nodes=1, complete=0)
    with pytest.raises(ConfigError, match="for 1 more checkpoint of"):
        check_room(config, 10**13, "as step 7", ranks=1, nodes=1, complete=3)
    line = check_room(config, 1_500_000, "as step 7", ranks=1, nodes=1, complete=3)
    assert line.startswith("a checkpoint takes 1.5 MB (as step 7); ")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("free_shared_memory", 1000, r"/dev/shm has 1 kB free .*--shm-size"),
        ("free_memory", 2000, r"memory has 2 kB free"),
    ],
)
def test_too_little_memory_for_the_staged_copy_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch, name: str, value: int, message: str
) -> None:
    monkeypatch.setattr(capacity, name, lambda: value)
    with pytest.raises(ConfigError, match=message):
        check_room(config, 3000, "estimated", ranks=1, nodes=1, complete=0)


@pytest.mark.parametrize(("strategy", "takes"), [("fsdp", "500 B"), ("hsdp", "1 kB"), ("ddp", "4 kB")])
def test_a_node_stages_what_it_holds_of_the_state(tmp_path: Path, strategy: str, takes: str) -> None:
    config = Config(project=tmp_path, parallel=ParallelConfig(strategy))  # type: ignore[arg-type]
    assert f"a save takes {takes} on this node" in check_memory(config, 1000, "estimated", ranks=4, nodes=2)
