"""The private parts of torch that checkpoints stand on. A failure here means that a new torch has moved one of them.

What to do then: look the name up in the new torch and change the one file that is named here; where it is gone, fall
back as the comment says. The tests beside this one tell whether the result holds.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import pickle
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint import default_planner, filesystem, planner, state_dict_saver
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from trainer.checkpoint.dcp import planner as planning
from trainer.checkpoint.dcp import process as background
from trainer.checkpoint.dcp import shard


def test_the_process_is_one_process_behind_a_global() -> None:
    """`dcp/process.py`: to end and replace the process.

    Without it: find the process among `multiprocessing.active_children()`; to replace it, start the ranks anew.
    """
    assert executor._CHECKPOINT_PROCESS is None
    source = inspect.getsource(executor._AsyncCheckpointProcess)
    assert "self._save_process" in source and "_CheckpointSaveProcessControlOpts.TERMINATE" in source
    assert callable(executor._AsyncCheckpointProcess._send)
    used = inspect.getsource(executor._ProcessBasedAsyncCheckpointExecutor)
    assert "_CHECKPOINT_PROCESS = _AsyncCheckpointProcess(" in used, "a class of ours takes its place"
    assert "target=self._checkpointing_subprocess" in source, "and its first line runs before torch's"


def test_the_process_is_spawned_and_saves_in_its_main_thread() -> None:
    """`dcp/process.py`: it sets its signals from `set_up_storage_writer`, which takes the main thread.

    Without it: leave the signals to the mask that `start` sets.
    """
    assert 'get_context("spawn")' in inspect.getsource(executor._AsyncCheckpointProcess)
    assert isinstance(get_context("spawn").Process, type)
    assert issubclass(get_context("spawn").Process, background.SpawnProcess)  # type: ignore[attr-defined]
    assert "Thread" not in inspect.getsource(background._TorchsProcess)


def test_plans_are_cached_by_class_name_on_the_planner() -> None:
    """`dcp/planner.py`, ArenaPlanner.create_local_plan: DCP's caching with a sharper test of "unchanged".

    Without it: delete the method's caching and pass `enable_plan_caching=False`; planning then costs each save again.
    """
    one = default_planner.DefaultSavePlanner(enable_plan_caching=True)
    assert one._cached_plans_key == "DefaultSavePlanner"
    assert isinstance(planner.SavePlanner._cached_save_plan, dict)
    create = inspect.getsource(default_planner.DefaultSavePlanner.create_local_plan)
    finish = inspect.getsource(default_planner.DefaultSavePlanner.finish_plan)
    assert "self._pending_local_plan = plan" in create and "return SavePlan([], usable=False)" in create
    assert "SavePlanner._cached_save_plan[self._cached_plans_key] = (" in finish


def test_shards_are_named_and_described_as_torch_does() -> None:
    """`dcp/writer.py` and `shard.py`: the name of a rank's file, and where in it a tensor lies.

    Without it: name the files and describe them as the new FileSystemWriter does; FileSystemReader has to find them.
    """
    source = inspect.getsource(filesystem._FileSystemWriter)
    assert 'f"{storage_plan.prefix}{file_count}{DEFAULT_SUFFIX}"' in source
    info = filesystem._StorageInfo("__0_0.distcp", 5, 7)
    assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 5, 7)
    assert filesystem.CURRENT_DCP_VERSION and filesystem.DEFAULT_SUFFIX == ".distcp"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (0,), (4, 0), (33, 100)])
def test_a_shard_holds_what_torch_save_writes(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """`dcp/shard.py`: the bytes around a tensor's raw bytes depend on its dtype and shape alone.

    Where that no longer holds `envelope_of` sees it and torch.save does the work: correct, and slower for many tensors.
    """
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    item = SimpleNamespace(index=MetadataIndex("name"))
    shard.write_shard(tmp_path / "shard", [item], lambda _: tensor)  # type: ignore[list-item]
    with shard.without_crc():
        saved = io.BytesIO()
        torch.save(tensor, saved)
        assert shard.envelope_of(dtype, torch.Size(shape)) is not None
    assert (tmp_path / "shard").read_bytes() == saved.getvalue()


def test_metadata_is_not_sent_around() -> None:
    """`dcp/planner.py`: only its type is looked at by those who receive it."""
    entry = BytesStorageMetadata()
    sent = pickle.loads(pickle.dumps(planning.LocalMetadata({"name": entry})))
    assert type(sent) is Metadata and sent.state_dict_metadata == {}
    assert {field.name for field in dataclasses.fields(Metadata)} >= {"state_dict_metadata", "planner_data"}


def test_finish_runs_on_rank_zero_after_every_rank_has_written() -> None:
    """`dcp/writer.py`: the commit. Without it there is no commit: change nothing before this holds again."""
    source = inspect.getsource(state_dict_saver._save_state_dict)
    assert 'distW.all_reduce("write", write_data, finish_checkpoint)' in source


def test_tensors_over_the_arena_are_written_as_they_are() -> None:
    """`dcp/stager.py`, views: DCP clones a tensor whose storage is larger than itself."""
    memory = bytearray(64)
    tensor = torch.frombuffer(memory, dtype=torch.float32, count=4, offset=16)
    assert tensor.untyped_storage().size() == tensor.nbytes == 16


def test_memory_is_pinned_and_unpinned_by_address() -> None:
    """`dcp/stager.py`: torch's own stager does it so. Without it: leave the pinning out, copies take longer."""
    assert list(inspect.signature(pin_memory).parameters) == ["data_ptr", "size"]
    assert list(inspect.signature(unpin_memory).parameters) == ["data_ptr"]
