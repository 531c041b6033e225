"""What a start makes of the checkpoints that it finds: whole ones, damaged ones, none."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.engine.checkpoint.alone import Numbers, manager, one_rank, save
from trainer.checkpoint import commit as commits
from trainer.checkpoint.commit import COMMIT
from trainer.checkpoint.dcp import writer
from trainer.checkpoint.dcp.reader import load_tensors
from trainer.checkpoint.dcp.shard import write_shard
from trainer.checkpoint.resume import Resumer
from trainer.outcome import ConfigError, UnavailableError
from trainer.records import read_records


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with one_rank() as group:
        yield group


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Steps 10 and 20, whole."""
    for step in (10, 20):
        save(tmp_path / "run", step)
    return tmp_path / "run"


def shard(run_dir: Path, step: int) -> Path:
    return run_dir / commits.directory_name(step) / "__0_0.distcp"


def test_nothing_there_is_a_fresh_start(tmp_path: Path, group: dist.ProcessGroup) -> None:
    checkpoints, state = manager(tmp_path / "run", group)
    assert checkpoints.resume() is None
    assert state.step == 0


def test_the_newest_whole_checkpoint_is_loaded(run_dir: Path, group: dist.ProcessGroup) -> None:
    checkpoints, state = manager(run_dir, group)
    resumed = checkpoints.resume()
    assert resumed is not None and (resumed.step, resumed.samples) == (20, 160)
    assert state.step == 20 and checkpoints.loaded == "step_00000020"
    (event,) = (event for event in read_records(run_dir, "ledger") if event["event"] == "resumed")
    assert event["step"] == 20 and event["lost_steps"] == 0


def _payload(path: Path, step: int) -> int:
    """Where in a shard the numbers of `model.weight` lie."""
    return path.read_bytes().index(torch.full((300,), float(step)).numpy().tobytes()) + 600


def _damage(run_dir: Path, what: str) -> None:
    directory = run_dir / commits.directory_name(20)
    path = shard(run_dir, 20)
    content = path.read_bytes()
    match what:
        case "a flipped bit in a tensor":
            at = _payload(path, 20)
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        case "a hole of zeros":
            at = _payload(path, 20)
            path.write_bytes(content[:at] + bytes(4096) + content[at + 4096 :])
        case "a truncated shard":
            path.write_bytes(content[:-100])
        case "a missing shard":
            path.unlink()
        case "an empty shard":
            path.write_bytes(b"")
        case "a shard of another step":
            path.write_bytes(shard(run_dir, 10).read_bytes())
        case "a damaged .metadata":
            metadata = directory / ".metadata"
            metadata.write_bytes(metadata.read_bytes()[:-1] + b"x")
        case "a damaged COMMIT.json":
            (directory / COMMIT).write_bytes(
                (directory / COMMIT).read_bytes().replace(b'"samples": 160', b'"samples": 161')
            )
        case "a missing COMMIT.json":
            (directory / COMMIT).unlink()


KINDS = [
    "a flipped bit in a tensor", "a hole of zeros", "a truncated shard", "a missing shard", "an empty shard",
    "a shard of another step", "a damaged .metadata", "a damaged COMMIT.json", "a missing COMMIT.json",
]  # fmt: skip


@pytest.mark.parametrize("what", KINDS)
def test_damage_is_named_quarantined_and_the_next_newest_is_used(
    run_dir: Path, group: dist.ProcessGroup, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    _damage(run_dir, what)
    before = {path.name for path in (run_dir / "step_00000020").iterdir()}
    checkpoints, state = manager(run_dir, group)
    with caplog.at_level(logging.ERROR):
        resumed = checkpoints.resume()
    assert resumed is not None and resumed.step == state.step == 10
    assert "DAMAGED CHECKPOINT" in caplog.text and "step_00000020" in caplog.text
    assert not (run_dir / "step_00000020").exists()
    assert {path.name for path in (run_dir / "corrupt_step_00000020").iterdir()} == before


class _Planted:
    """Pickles to a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self.trace,))


def test_a_planted_metadata_is_never_unpickled(run_dir: Path, group: dist.ProcessGroup, tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    planted = pickle.dumps(_Planted(trace))
    metadata = run_dir / "step_00000020" / ".metadata"
    metadata.write_bytes(planted.ljust(metadata.stat().st_size, b"\0"))  # of the right size
    resumed = manager(run_dir, group)[0].resume()
    assert resumed is not None and resumed.step == 10
    assert not trace.exists()
    pickle.loads(planted)
    assert trace.exists(), "the trap works"


def test_checkpoints_but_none_good_is_a_matter_for_a_person(run_dir: Path, group: dist.ProcessGroup) -> None:
    for step in (10, 20):
        shard(run_dir, step).write_bytes(b"")
    for _ in range(2):  # also at the next start, when they are quarantined
        with pytest.raises(ConfigError, match="none of them is whole"):
            manager(run_dir, group)[0].resume()


def test_an_io_error_stops_the_start_and_renames_nothing(
    run_dir: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(commits, "_read_sum", fails)
    monkeypatch.setattr("trainer.checkpoint.commit.time.sleep", lambda _: None)
    with pytest.raises(UnavailableError, match="nothing was changed"):
        manager(run_dir, group)[0].resume()
    assert len(commits.complete(run_dir)) == 2


def test_what_another_node_alone_cannot_see_is_not_quarantined(
    run_dir: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, _ = manager(run_dir, group)
    monkeypatch.setattr(Resumer, "_first_damaged", lambda *_: "__0_0.distcp")
    with pytest.raises(UnavailableError, match="one volume that all nodes share"):
        checkpoints.resume()
    assert [commit.step for commit in commits.complete(run_dir)] == [20, 10]


def test_a_shard_that_is_not_on_the_volume_is_not_committed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a node has no mount and writes to its own disk."""

    def elsewhere(path: Path, *arguments: Any) -> Any:
        result = write_shard(path, *arguments)
        path.unlink()
        return result

    monkeypatch.setattr(writer, "write_shard", elsewhere)
    monkeypatch.setattr(writer, "SHOWN_S", 0.0)
    with pytest.raises(CheckpointException, match="missing"):
        save(run_dir, 30)
    assert [commit.step for commit in commits.complete(run_dir)] == [20, 10]


def test_parts_that_no_rank_wrote_are_not_committed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(path: Path, items: Any, resolve: Any) -> Any:
        return write_shard(path, items[1:], resolve)

    monkeypatch.setattr(writer, "write_shard", forgetful)
    with pytest.raises(CheckpointException, match="5 of 6 parts by 1 of 1 ranks: no commit"):
        save(run_dir, 30)
    assert [commit.step for commit in commits.complete(run_dir)] == [20, 10]


def test_an_unfinished_save_of_a_dead_attempt_is_not_looked_at(run_dir: Path, group: dist.ProcessGroup) -> None:
    (run_dir / "step_00000020").rename(run_dir / ".step_00000030.1")
    resumed = manager(run_dir, group)[0].resume()
    assert resumed is not None and resumed.step == 10


def test_a_changed_configuration_is_refused_unless_accepted(
    run_dir: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, state = manager(run_dir, group)
    state.fingerprint["model.width"] = 65
    with pytest.raises(ConfigError, match=r"model.width was 64 and is 65.*--accept model.width"):
        checkpoints.resume()
    checkpoints, state = manager(run_dir, group, accepted=("model.width",))
    state.fingerprint["model.width"] = 65
    assert checkpoints.resume() is not None
    assert "model.width changed from 64 to 65" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.more": torch.zeros(3)}, "model.more is missing from the checkpoint"),
        ({"model.half": None}, "model.half is in the checkpoint only"),
        ({"model.weight": torch.zeros(64, 299)}, r"model.weight is \(64, 300\) in the checkpoint and \(64, 299\) here"),
        ({"model.half": torch.zeros(1000)}, "model.half is torch.bfloat16 in the checkpoint and torch.float32 here"),
    ],
)
def test_names_shapes_and_dtypes_have_to_fit(
    run_dir: Path, group: dist.ProcessGroup, change: dict[str, Any], said: str
) -> None:
    checkpoints, state = manager(run_dir, group)
    state.tensors = {name: value for name, value in (state.tensors | change).items() if value is not None}
    with pytest.raises(ConfigError, match=said):
        checkpoints.resume()
    assert len(commits.complete(run_dir)) == 2


def drop(run_dir: Path, step: int, name: str, *, places_only: bool = False) -> None:
    """Take one tensor out of `.metadata` and seal the checkpoint again, so that every checksum matches."""
    commit = commits.read_commit(run_dir / commits.directory_name(step))
    metadata = pickle.loads((commit.directory / commit.metadata).read_bytes())
    metadata.storage_data = {index: place for index, place in metadata.storage_data.items() if index.fqn != name}
    if not places_only:
        del metadata.state_dict_metadata[name]
    content = pickle.dumps(metadata)
    (commit.directory / commit.metadata).write_bytes(content)
    files = {**commit.files, commit.metadata: commits.sum_of(content)}
    (commit.directory / COMMIT).write_bytes(commits.encode(replace(commit, files=files)))


@pytest.mark.parametrize("places_only", [False, True])
def test_a_checkpoint_that_lacks_a_part_is_never_loaded_in_part(
    run_dir: Path, group: dist.ProcessGroup, places_only: bool, tmp_path: Path
) -> None:
    names = commits.read_commit(run_dir / commits.directory_name(20)).names
    assert len(names) == len(Numbers().tensors)
    for number, name in enumerate(names):
        copy = shutil.copytree(run_dir, tmp_path / str(number) / "run")
        drop(copy, 20, name, places_only=places_only)
        checkpoints, state = manager(copy, group)
        with pytest.raises(ConfigError, match=rf"step_00000020 lacks {name}, and nothing is loaded in part"):
            checkpoints.resume()
        assert state.step == 0
        with pytest.raises(ConfigError, match=f"lacks {name}"):
            load_tensors(copy)
        assert len(commits.complete(copy)) == 2  # a person decides


def test_in_manifest_mode_the_commit_file_decides(tmp_path: Path, group: dist.ProcessGroup) -> None:
    run_dir = tmp_path / "run"
    for step in (10, 20, 30):
        save(run_dir, step, attempt=3, mode="manifest")
    assert sorted(path.name for path in (run_dir / "step_00000010").iterdir()) == [
        ".metadata.a3.0", COMMIT, "__0_a3.0_0.distcp",
    ]  # fmt: skip
    (run_dir / "step_00000030" / COMMIT).unlink()  # was never committed
    path = run_dir / "step_00000020" / "__0_a3.0_0.distcp"
    path.write_bytes(path.read_bytes()[::-1])
    resumed = manager(run_dir, group, attempt=4, mode="manifest")[0].resume()
    assert resumed is not None and resumed.step == 10
    assert "checksum" in (run_dir / "step_00000020" / commits.MARKER).read_text()


def test_tensors_are_read_without_a_process_group(run_dir: Path) -> None:
    tensors, step = load_tensors(run_dir, prefixes=("model.",))
    assert step == 20 and set(tensors) == {"model.weight", "model.half"}
    assert bool((tensors["model.weight"] == 20).all())
    assert load_tensors(run_dir, 10)[1] == 10
    with pytest.raises(ConfigError, match="step 15"):
        load_tensors(run_dir, 15)
    shard(run_dir, 20).write_bytes(b"")
    assert load_tensors(run_dir)[1] == 10
    assert (run_dir / "step_00000020").exists()


def test_the_files_are_plain_dcp(run_dir: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(run_dir / "step_00000020", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    expected = Numbers()
    expected.fill(20)
    assert found.keys() == expected.tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.tensors.items())


def test_the_commit_file_says_what_the_checkpoint_is(run_dir: Path) -> None:
    body = json.loads((run_dir / "step_00000020" / COMMIT).read_text())
    assert (body["step"], body["samples"], body["attempt"], body["world_size"]) == (20, 160, 1, 1)
    assert body["fingerprint"] == {"model.width": 64} and body["torch"] == torch.__version__
    assert body["code"] == {"commit": "abc", "dirty": True}
