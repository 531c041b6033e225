"""One writer per run: real processes that hold, die, stop and come back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer
from trainer.checkpoint import lease as leases
from trainer.checkpoint.lease import Fenced, Lease, commit_lock, current_epoch, read_record
from trainer.outcome import UnavailableError

BEAT_S, STALE_S = 0.1, 1.5

HOLDER = """
import sys
from pathlib import Path
from trainer.checkpoint.lease import Fenced, Lease, commit_lock
from trainer.outcome import UnavailableError
lease = Lease.acquire(Path(sys.argv[1]), {"told": "extra"}, heartbeat_s=float(sys.argv[2]), stale_s=float(sys.argv[3]))
epoch = lease.next_epoch()
print(epoch, flush=True)
for word in sys.stdin:
    try:
        match word.strip():
            case "commit":
                with commit_lock(lease.run_dir, epoch):
                    answer = "committed"
            case "next":
                answer = epoch = lease.next_epoch()
            case "lost":
                answer = lease.lost
            case "release":
                lease.release()
                answer = "released"
            case "lock":
                with commit_lock(lease.run_dir, epoch):
                    print("locked", flush=True)
                    sys.stdin.readline()
                    answer = "unlocked"
    except (Fenced, UnavailableError) as error:
        answer = f"{type(error).__name__}: {error}"
    print(answer, flush=True)
"""


class Holder:
    """Another process with the lease."""

    def __init__(self, run_dir: Path, *prefix: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", HOLDER, str(run_dir), str(BEAT_S), str(STALE_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(trainer.__file__).resolve().parents[1])},
        )
        self.epoch = int(self.answer())

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.answer()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()


@contextlib.contextmanager
def holder(run_dir: Path, *prefix: str) -> Iterator[Holder]:
    one = Holder(run_dir, *prefix)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def acquire(run_dir: Path) -> Lease:
    return Lease.acquire(run_dir, heartbeat_s=BEAT_S, stale_s=STALE_S)


def took_s(run_dir: Path) -> float:
    begin = time.monotonic()
    acquire(run_dir).release()
    return time.monotonic() - begin


def test_each_start_of_the_ranks_raises_the_epoch(tmp_path: Path) -> None:
    assert current_epoch(tmp_path) == 0
    with acquire(tmp_path) as lease:
        assert [lease.next_epoch() for _ in range(3)] == [1, 2, 3]
        assert not lease.lost
    with acquire(tmp_path) as lease:
        assert lease.next_epoch() == 4
    assert current_epoch(tmp_path) == 4
    assert read_record(tmp_path).released  # type: ignore[union-attr]


def test_a_living_holder_is_named_with_its_age(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        with pytest.raises(UnavailableError) as refused:
            acquire(tmp_path)
        assert str(other.process.pid) in str(refused.value) and "attempt 1" in str(refused.value)
        assert "s ago" in str(refused.value) and "\n" not in str(refused.value)
        assert other.ask("next") == "2", "and is not disturbed"
        assert json.loads((tmp_path / "lease.json").read_text())["holder"]["told"] == "extra"


def test_after_a_kill_on_the_same_machine_the_next_start_takes_over_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        other.signal(signal.SIGKILL)
        assert took_s(tmp_path) < STALE_S / 2


def test_after_a_release_there_is_no_wait_wherever_the_next_start_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holder(tmp_path) as other:
        assert other.ask("release") == "released"
        monkeypatch.setattr(leases, "_kernel", lambda descriptor: "another machine")
        assert took_s(tmp_path) < STALE_S / 2


def test_another_machine_waits_until_the_heartbeat_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_kernel", lambda descriptor: "another machine")
    monkeypatch.setattr(leases, "_try_lock", lambda descriptor: True)  # its locks do not reach over here
    with holder(tmp_path) as other:
        with pytest.raises(UnavailableError, match=str(other.process.pid)):
            acquire(tmp_path)
        other.signal(signal.SIGKILL)
        assert took_s(tmp_path) >= STALE_S


def test_a_stopped_holder_is_taken_over_and_comes_back_to_nothing(tmp_path: Path) -> None:
    with holder(tmp_path) as zombie:
        zombie.signal(signal.SIGSTOP)
        with acquire(tmp_path) as lease:
            epoch = lease.next_epoch()
            assert epoch > zombie.epoch
            record = read_record(tmp_path)
            zombie.signal(signal.SIGCONT)
            assert zombie.ask("commit").startswith("Fenced: attempt 1")
            assert zombie.ask("next").startswith("UnavailableError: run")
            assert zombie.ask("lost") == "True"
            assert zombie.ask("release") == "released"
            with commit_lock(tmp_path, epoch):
                pass
            after = read_record(tmp_path)
            assert record is not None and after is not None
            assert (after.holder, after.epoch, after.released) == (record.holder, record.epoch, False)
            assert lease.next_epoch() == epoch + 1
        # The run's lock is that of the new holder: a third start sees it.
        with holder(tmp_path), pytest.raises(UnavailableError):
            acquire(tmp_path)


def test_of_two_that_take_over_one_gets_it(tmp_path: Path) -> None:
    with holder(tmp_path) as zombie:
        zombie.signal(signal.SIGSTOP)
        script = HOLDER.replace("print(epoch, flush=True)", "print(epoch, flush=True); sys.stdin.read()")
        both = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(tmp_path), str(BEAT_S), str(STALE_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": str(Path(trainer.__file__).resolve().parents[1])},
            )
            for _ in range(2)
        ]
        texts = [process.communicate("\n") for process in both]
    assert sorted(text[0].strip() for text in texts) == ["", "2"]
    assert any("UnavailableError" in text[1] for text in texts)


def test_whoever_cannot_have_the_commit_lock_names_its_holder(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        assert other.ask("lock") == "locked"
        with (
            pytest.raises(UnavailableError, match=f"process {other.process.pid}"),
            commit_lock(tmp_path, 1, timeout_s=0.2),
        ):
            pass
        assert other.ask("") == "unlocked"
        with commit_lock(tmp_path, 1, timeout_s=5):
            pass


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "[" * 100_000, '{"epoch": 1, "more": 2}', '{"epoch": "abc"}', '{"epoch": 3, "beat": null}',
        '{"epoch": 1e30}', f'{{"epoch": {10**30}}}', '{"epoch": 3, "time": "now"}', '{"epoch": 3, "holder": []}', None,
    ],
)  # fmt: skip
def test_a_lost_lease_file_never_lowers_the_epoch(tmp_path: Path, content: str | None) -> None:
    with acquire(tmp_path) as lease:
        for _ in range(7):
            lease.next_epoch()
    (tmp_path / ".step_00000010.7").mkdir()
    (tmp_path / "lease.json").unlink()
    if content is not None:
        (tmp_path / "lease.json").write_text(content)
    assert current_epoch(tmp_path) == 7
    with acquire(tmp_path) as lease:
        assert lease.next_epoch() == 8


def test_an_older_attempt_is_fenced_and_the_newest_is_not(tmp_path: Path) -> None:
    with acquire(tmp_path) as lease:
        for _ in range(3):
            lease.next_epoch()
        with commit_lock(tmp_path, 3):
            pass
        with pytest.raises(Fenced, match=r"attempt 2 .* attempt 3 has begun"), commit_lock(tmp_path, 2):
            pass


def test_children_do_not_inherit_the_lock(tmp_path: Path) -> None:
    lease = acquire(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as child:
        lease.release()
        descriptor = os.open(tmp_path / ".lease.lock", os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        child.kill()


@pytest.mark.slow
def test_another_pid_namespace_over_the_same_volume(tmp_path: Path) -> None:
    namespace = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with holder(tmp_path, *namespace) as other:
        assert json.loads((tmp_path / "lease.json").read_text())["holder"]["pid"] < 10, "its own numbers"
        with pytest.raises(UnavailableError, match="is held by process"):
            acquire(tmp_path)
        other.signal(signal.SIGKILL)
        assert took_s(tmp_path) < STALE_S / 2
