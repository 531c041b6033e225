"""Commit, retention and damage as functions over a directory; no torch, no processes."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint import commit as commits
from trainer.checkpoint import retention
from trainer.checkpoint.commit import COMMIT, Commit, FileSum
from trainer.checkpoint.commit_mode import MODES, CommitMode
from trainer.checkpoint.lease import Fenced, commit_lock
from trainer.config.settings import CheckpointConfig
from trainer.outcome import Damaged, UnavailableError

RENAME, MANIFEST = MODES["rename"], MODES["manifest"]


def prune(run_dir: Path, epoch: int, keep_last: int, mode: CommitMode = RENAME) -> list[Path]:
    with commit_lock(run_dir, epoch):
        return retention.expire(run_dir, CheckpointConfig(keep_last=keep_last), mode)


def make(run_dir: Path, step: int, attempt: int = 1, shards: int = 2) -> Commit:
    directory = run_dir / commits.directory_name(step)
    directory.mkdir(parents=True)
    files = {}
    for name in [".metadata", *(f"__{rank}_0.distcp" for rank in range(shards))]:
        content = f"{name} of {step}".encode() * 1000
        (directory / name).write_bytes(content)
        files[name] = FileSum(len(content), commits.ALGORITHM, xxhash.xxh3_128(content).hexdigest())
    one = Commit(
        directory, step, step * 8, attempt, shards, 1.5, {"model.width": 64}, "2.13.0", "abc", files, names=["a", "b"]
    )
    (directory / COMMIT).write_bytes(commits.encode(one))
    return one


def test_a_commit_reads_back_as_it_was_written(tmp_path: Path) -> None:
    one = make(tmp_path, 1000)
    assert commits.read_commit(one.directory) == one
    commits.verify(one)
    body = json.loads((one.directory / COMMIT).read_text())
    assert set(body) == {
        "format", "step", "samples", "attempt", "world_size", "time", "fingerprint", "torch", "template", "code",
        "files", "names", "self",
    }  # fmt: skip
    assert body["files"][".metadata"].keys() == {"bytes", "algo", "sum"}


def test_checkpoints_of_older_and_newer_versions_are_read(tmp_path: Path) -> None:
    """`code` and `names` came later, and more may come."""
    one = make(tmp_path, 1000)
    path = one.directory / COMMIT
    body = json.loads(path.read_text())
    assert body.pop("code") == {} and body.pop("names") and body.pop("self")
    for change in ({}, {"code": {"commit": "abc", "dirty": False}, "more": 1}):
        path.write_text(json.dumps({**body, **change, "self": commits._self_sum({**body, **change})}))
        assert commits.read_commit(one.directory).code == change.get("code", {})


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize("damage", ["flip", "hole", "truncated", "empty", "missing", "longer"])
def test_damage_to_any_file_is_found_and_named(tmp_path: Path, name: str, damage: str) -> None:
    one = make(tmp_path, 7)
    path = one.directory / name
    content = path.read_bytes()
    match damage:
        case "flip":
            _flip(path, len(content) // 2)
        case "hole":
            path.write_bytes(content[:100] + bytes(500) + content[600:])
        case "truncated":
            path.write_bytes(content[:-1])
        case "empty":
            path.write_bytes(b"")
        case "missing":
            path.unlink()
        case "longer":
            path.write_bytes(content + b"x")
    with pytest.raises(Damaged, match=name):
        commits.verify(commits.read_commit(one.directory))


def test_every_flipped_byte_of_a_commit_file_is_found(tmp_path: Path) -> None:
    one = make(tmp_path, 7)
    path = one.directory / COMMIT
    content = path.read_bytes()
    for position in range(len(content)):
        _flip(path, position)
        try:
            read = commits.read_commit(one.directory)
        except Damaged:
            pass
        else:
            assert read == one  # white space between tokens
        path.write_bytes(content)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"self": 1}', b"\x00" * 50, b"[" * 100_000, None])
def test_a_torn_or_missing_commit_file_is_damage(tmp_path: Path, content: bytes | None) -> None:
    one = make(tmp_path, 7)
    (one.directory / COMMIT).unlink()
    if content is not None:
        (one.directory / COMMIT).write_bytes(content)
    with pytest.raises(Damaged, match=COMMIT):
        commits.read_commit(one.directory)
    assert commits.complete(tmp_path) == []


def test_a_checkpoint_under_the_name_of_another_step_is_damage(tmp_path: Path) -> None:
    make(tmp_path, 7).directory.rename(tmp_path / "step_00000008")
    with pytest.raises(Damaged, match="says step 7"):
        commits.read_commit(tmp_path / "step_00000008")


def test_a_shard_of_another_step_is_damage(tmp_path: Path) -> None:
    one, other = make(tmp_path, 7), make(tmp_path, 8)
    (one.directory / "__1_0.distcp").write_bytes((other.directory / "__1_0.distcp").read_bytes())
    with pytest.raises(Damaged, match="__1_0"):
        commits.verify(one)


def test_an_io_error_is_not_damage(tmp_path: Path) -> None:
    calls = []

    def fails() -> bytes:
        calls.append(1)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(UnavailableError, match="cannot be read"):
        commits.retry_io(fails, tmp_path, pause_s=0.001)
    assert len(calls) == 4


def test_only_directories_of_the_form_count_and_the_newest_comes_first(tmp_path: Path) -> None:
    for step in (5, 100, 123456789):
        make(tmp_path, step)
    for name in ("step_7", ".step_00000200.3", "corrupt_step_00000300", "step_00000400x"):
        (tmp_path / name).mkdir()
    assert [path.name for path in commits.directories(tmp_path)] == ["step_123456789", "step_00000100", "step_00000005"]
    assert [one.step for one in commits.complete(tmp_path)] == [123456789, 100, 5]
    assert [path.name for path in commits.quarantined(tmp_path)] == ["corrupt_step_00000300"]


def test_quarantine_keeps_the_files_and_never_overwrites(tmp_path: Path) -> None:
    for number in range(3):
        one = make(tmp_path, 7)
        kept = RENAME.quarantine(one.directory, "why")
        assert not one.directory.exists() and (kept / "__0_0.distcp").exists()
        assert len(commits.quarantined(tmp_path)) == number + 1


def test_where_names_cannot_move_damage_is_marked(tmp_path: Path) -> None:
    one = make(tmp_path, 7)
    assert MANIFEST.quarantine(one.directory, "why") == one.directory
    assert list(MANIFEST.candidates(tmp_path)) == []
    assert commits.quarantined(tmp_path) == [one.directory]
    assert commits.complete(tmp_path) == []


@given(
    sizes=st.lists(st.integers(0, 10**12), min_size=0, max_size=40),
    ranks=st.integers(1, 9),
)
def test_every_shard_is_verified_by_exactly_one_rank(sizes: list[int], ranks: int) -> None:
    files = {f"__{number}_0.distcp": FileSum(size, "", "") for number, size in enumerate(sizes)}
    one = Commit(Path(), 1, 1, 1, 1, 0.0, {}, "", "", {".metadata": FileSum(1, "", ""), **files})
    dealt = commits.shares(one, ranks)
    assert len(dealt) == ranks
    assert sorted(name for share in dealt for name in share) == sorted(files)
    loads = [sum(files[name].bytes for name in share) for share in dealt]
    assert max(loads) - min(loads) <= max(sizes, default=0)


# ---------------------------------------------------------------------------------------------------------------------
# Retention


@given(
    steps=st.sets(st.integers(0, 500), max_size=30),
    keep_last=st.integers(1, 5),
    every=st.sampled_from([0, 10, 100]),
)
def test_the_newest_and_the_milestones_never_expire(steps: set[int], keep_last: int, every: int) -> None:
    gone = retention.expired(list(steps), keep_last, every)
    kept = sorted(steps - set(gone))
    assert kept[-keep_last:] == sorted(steps)[-keep_last:]
    assert all(step in kept for step in steps if every and step and step % every == 0)
    assert len(kept) <= keep_last + sum(1 for step in steps if every and step and step % every == 0)


def test_retention_counts_complete_checkpoints_only(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make(tmp_path, step)
    for step in (40, 50, 60):  # newer, and not complete
        (make(tmp_path, step).directory / "__0_0.distcp").write_bytes(b"")
    (tmp_path / ".step_00000070.9").mkdir()
    left = prune(tmp_path, epoch=9, keep_last=2)
    assert [one.step for one in commits.complete(tmp_path)] == [30, 20]
    assert len(left) == 1 and left[0].name.startswith(".removing_step_00000010")
    retention.delete_files(left)
    assert not left[0].exists()


@pytest.mark.parametrize("mode", [RENAME, MANIFEST])
def test_quarantined_checkpoints_do_not_pile_up(tmp_path: Path, mode: CommitMode) -> None:
    for step in range(10, 70, 10):
        make(tmp_path, step)
        mode.quarantine(tmp_path / commits.directory_name(step), "damaged")
    make(tmp_path, 5)
    retention.delete_files(prune(tmp_path, epoch=1, keep_last=1, mode=mode))
    assert [path.name[-2:] for path in commits.quarantined(tmp_path)] == ["40", "50", "60"]
    assert [one.step for one in commits.complete(tmp_path)] == [5]


def test_a_checkpoint_that_is_being_read_stays(tmp_path: Path) -> None:
    first = make(tmp_path, 10)
    make(tmp_path, 20)
    with retention.reading(first):
        assert prune(tmp_path, epoch=1, keep_last=1) == []
    assert len(prune(tmp_path, epoch=1, keep_last=1)) == 1


def test_an_older_attempt_cannot_prune(tmp_path: Path) -> None:
    for step in (10, 20):
        make(tmp_path, step)
    (tmp_path / "lease.json").write_text('{"epoch": 5}')
    with pytest.raises(Fenced, match="attempt 5"):
        prune(tmp_path, epoch=4, keep_last=1)
    assert len(commits.complete(tmp_path)) == 2


def test_in_manifest_mode_a_checkpoint_goes_by_losing_its_commit_first(tmp_path: Path) -> None:
    for step in (10, 20):
        make(tmp_path, step)
    left = prune(tmp_path, epoch=1, keep_last=1, mode=MANIFEST)
    assert left == [tmp_path / "step_00000010"]
    assert not (left[0] / COMMIT).exists() and (left[0] / "__0_0.distcp").exists()
    assert list(MANIFEST.candidates(tmp_path)) == [tmp_path / "step_00000020"]


def test_the_sweep_takes_what_dead_attempts_left_and_nothing_of_the_living(tmp_path: Path) -> None:
    make(tmp_path, 10)
    for name in (".step_00000020.3", ".step_00000030.4", ".step_00000040.5", ".step_00000040.5.1", ".removing_x"):
        (tmp_path / name).mkdir()
    retention.delete_files(retention.sweep(tmp_path, epoch=5, mode=RENAME))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step_00000040.5",
        ".step_00000040.5.1",
        "step_00000010",
    ]
    retention.delete_files(retention.sweep(tmp_path, epoch=5, mode=RENAME, spare=tmp_path / ".step_00000040.5.1"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step_00000040.5.1", "step_00000010"]


def test_the_sweep_of_an_object_store_takes_what_never_was_committed(tmp_path: Path) -> None:
    make(tmp_path, 10)
    for step, attempt in ((20, 3), (30, 5)):
        directory = tmp_path / commits.directory_name(step)
        directory.mkdir()
        (directory / f"__0_a{attempt}_0.distcp").write_bytes(b"1")
    retention.delete_files(retention.sweep(tmp_path, epoch=5, mode=MANIFEST))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000030"]
