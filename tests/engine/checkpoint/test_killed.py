"""The writer killed at every system call of a save: the newest checkpoint is the one before or the one after."""

from __future__ import annotations

import builtins
import io
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.checkpoint.alone import manager, one_rank, save
from trainer.checkpoint import commit as commits
from trainer.checkpoint import retention
from trainer.checkpoint.commit_mode import MODES
from trainer.checkpoint.dcp import shard, writer

CALLS = [
    "open", "write", "pwrite", "fsync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "ftruncate",
]  # fmt: skip


def _killed_at(number: int, work: Callable[[], None]) -> bool:
    """Run `work` in a fork that is killed with SIGKILL before its call `number`. Returns whether it was."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            _count_down(number)
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def _count_down(number: int) -> None:
    """From here on in this process, the call `number` of those that touch a disk kills it."""
    left = number

    def counted(call: Callable[..., Any], every: int = 1) -> Callable[..., Any]:
        calls = itertools.count()

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= next(calls) % every == 0
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    builtins.open = io.open = counted(open)
    shard.ShardStream.write = counted(shard.ShardStream.write, every=3)  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with one_rank() as group:
        yield group


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory where there is one: a hundred saves wait for no disk."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as path:
        yield Path(path)


@pytest.mark.parametrize("mode", ["rename", "manifest"])
def test_killed_anywhere_in_a_save_the_state_is_the_one_before_or_after(
    memory: Path, group: dist.ProcessGroup, mode: Any
) -> None:
    """Retention is part of it: one checkpoint is kept, so the commit of step 2 removes that of step 1."""
    template, run_dir = memory / "template", memory / "run"
    save(template, 1, mode=mode)

    def work() -> None:
        save(run_dir, 2, mode=mode, keep_last=1)
        if writer.kept.deleting is not None:
            writer.kept.deleting.join()

    seen: list[int] = []
    number = 0
    killed = True
    while killed:
        number += 1
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(template, run_dir)
        killed = _killed_at(number, work)
        found = commits.complete(run_dir)
        for commit in found:
            commits.verify(commit)
        assert not commits.quarantined(run_dir), "what is torn is not damage"
        seen.append(found[0].step)
        if number % 5 == 0 or not killed or seen[-1] != seen[max(0, number - 2)]:
            checkpoints, state = manager(run_dir, group, mode=mode)
            resumed = checkpoints.resume()  # which also looks at every number
            assert resumed is not None and resumed.step == found[0].step == state.step
            # And the next attempt saves that very step and tidies up.
            retention.delete_files(retention.sweep(run_dir, 2, MODES[mode]))
            save(run_dir, 2, attempt=2, mode=mode)
            if writer.kept.deleting is not None:
                writer.kept.deleting.join()
            assert commits.complete(run_dir)[0].step == 2
            assert not [path for path in run_dir.iterdir() if path.name.startswith((".step", ".removing"))]
    assert number > 30
    assert seen == sorted(seen), "once it is committed it stays"
    assert set(seen) == {1, 2}
