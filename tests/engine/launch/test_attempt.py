"""One start of the ranks: torchrun's environment, the end of one of several, nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from trainer.config.settings import Config, ReclaimConfig, RunConfig
from trainer.launch import attempt
from trainer.launch.attempt import Attempt, Node
from trainer.launch.exit_reason import Ended
from trainer.launch.signals import Inbox
from trainer.launch.spawn import environment, rank_command, torchrun_arguments
from trainer.machine.gpus import Ranks
from trainer.machine.nodes import Nodes
from trainer.outcome import Reason

ONE = Nodes(1, 0, "", "", "")
Begin = Callable[..., Attempt]


@pytest.fixture
def begin(tmp_path: Path) -> Begin:
    """`begin(code, ranks)` runs the Python `code` as each rank; what they write lies in `tmp_path`."""
    (tmp_path / "runtime").mkdir()

    def run(code: str, ranks: int = 2) -> Attempt:
        config = Config(project=tmp_path, reclaim=ReclaimConfig(grace_s=20))
        words = ["-c", code]
        node = Node(config, tmp_path / "runtime", Ranks(ranks, False, ""), ONE, Inbox(), lambda runtime, attempt: words)
        return Attempt(node, 1)

    return run


def _supervise(attempt: Attempt) -> Ended:
    try:
        return attempt.supervise()
    finally:
        for process in attempt.processes:
            process.kill()


def test_each_rank_has_torchruns_environment(begin: Begin, tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    words = f"' '.join(os.environ[name] for name in {names})"
    _supervise(begin(f"import os; open('rank' + os.environ['RANK'], 'w').write({words})", 3))
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(3)] == [
        f"{rank} {rank} 3 3 127.0.0.1" for rank in range(3)
    ]


def test_the_rank_that_failed_first_is_the_one_that_is_named(begin: Begin) -> None:
    code = """
import os, sys, time
from pathlib import Path
if os.environ["RANK"] == "1":
    sys.exit(3)
while not Path("failed").exists():
    time.sleep(0.01)
sys.exit(4)
"""
    running = begin(code)
    collected = running._has_ended

    def let_the_other_fail(number: int, code: int) -> None:
        collected(number, code)
        Path(running.config.project, "failed").touch()

    running._has_ended = let_the_other_fail  # type: ignore[method-assign]
    ended = _supervise(running)
    assert (ended.reason, ended.message) == (Reason.CRASHED, "rank 1 ended with exit code 3 without a status")


def test_a_rank_that_hangs_after_another_has_failed_is_killed(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "LINGER_S", 0.2)
    running = begin("import os, time; os.environ['RANK'] == '1' and os._exit(3); time.sleep(100)")
    began = time.monotonic()
    ended = _supervise(running)
    assert time.monotonic() - began < 50
    assert running.processes[0].returncode == -signal.SIGKILL
    assert ended.reason is Reason.CRASHED and not ended.outside


def test_a_signal_to_a_rank_that_cannot_handle_it_yet_stops_all(begin: Begin) -> None:
    running = begin("import time; time.sleep(100)")
    running.processes[0].terminate()
    ended = _supervise(running)
    assert ended.reason is Reason.RECLAIMED
    assert running.stop is not None and running.stop.source == "SIGTERM to a rank"


def test_one_reason_to_kill_is_said_once_and_the_soonest_wins(begin: Begin, capfd: pytest.CaptureFixture[str]) -> None:
    running = begin("import time; time.sleep(100)")
    running._kill_by(time.monotonic() + 0.1, "soon")
    running._kill_by(time.monotonic() + 50, "later")
    assert _supervise(running).message == "soon"
    assert capfd.readouterr().err.count("soon") == 1


def _words(tmp_path: Path, accepted: Sequence[str] = ()) -> list[str]:
    nodes = Nodes(2, 1, "10.0.0.1:29400", "42.0", "Slurm")
    config = Config(project=tmp_path, run=RunConfig(name="run"), reclaim=ReclaimConfig(grace_s=60))
    return torchrun_arguments(rank_command(["a.b=c"], accepted, tmp_path, None), config, tmp_path, 4, nodes)


def test_torchrun_neither_restarts_nor_shares_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = _words(tmp_path, ["x.y", "z"])
    assert "--max-restarts=0" in words and "--nproc-per-node=4" in words and "--rdzv-id=run.42.0" in words
    assert words[2:5] == [str(os.getpid()), str(tmp_path), "75"]
    assert "--attempt" not in words and words[words.index("--accept") + 1] == "x.y,z"
    assert environment(4)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_threads_of_a_rank_are_its_share_of_the_cores_unless_the_user_has_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.launch.spawn.usable_cores", lambda: 9)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment(4)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment(4)["OMP_NUM_THREADS"] == "7"
