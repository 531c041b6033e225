"""A rank that only pretends to train, for tests of the launcher: the same files, signals and records, without torch.

The environment variable FAKE_RANKS holds what to do as JSON:
    step_s, save_s   seconds of a step and of a save
    crash_at         raise at this step; crash_words: the message; crash_once: only in the run's first attempt
    hang_at          stand still at this step
    refuse           a wrong configuration, in these words
    load_s           seconds before the first step
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "template"))

from trainer.checkpoint.commit import COMMIT, Commit, FileSum, complete, directory_name, encode
from trainer.checkpoint.lease import commit_lock
from trainer.config.fingerprint import fingerprint
from trainer.config.load import load_config
from trainer.config.settings import Config
from trainer.launch.supervisor import launch
from trainer.ledger import Ledger
from trainer.outcome import ConfigError, Reason, Status
from trainer.reclaim.rank import Reclaim, prepare_rank
from trainer.reclaim.request import Action
from trainer.records import Records

FAKE = json.loads(os.environ.get("FAKE_RANKS", "{}"))


def command(overrides: Sequence[str], accepted: Sequence[str], runtime: Path, attempt: int | None) -> list[str]:
    """In place of `trainer.launch.spawn.rank_command`."""
    return [__file__, str(runtime), str(attempt or 0), *overrides]


def save(run_dir: Path, step: int, attempt: int, config: Config, ledger: Ledger) -> None:
    if any(found.step == step for found in complete(run_dir)):
        return
    ledger.record("save_started", step=step)
    time.sleep(FAKE.get("save_s", 0.0))
    being_written = run_dir / f".{directory_name(step)}.{attempt}"
    being_written.mkdir()
    (being_written / ".metadata").write_bytes(b"state")
    files = {".metadata": FileSum(5, "none", "")}
    done = Commit(being_written, step, step, attempt, 1, time.time(), fingerprint(config), "none", "", files)
    (being_written / COMMIT).write_bytes(encode(done))
    with commit_lock(run_dir, attempt):
        being_written.rename(run_dir / directory_name(step))
    ledger.record("save_committed", step=step, write_s=FAKE.get("save_s", 0.0), bytes=5)


def train(runtime: Path, attempt: int, config: Config) -> tuple[Reason, int]:
    if "refuse" in FAKE:
        raise ConfigError(FAKE["refuse"])
    ledger, metrics = Ledger(config.run_dir, attempt), Records(config.run_dir, "metrics", attempt)
    with Reclaim(runtime, config.reclaim.grace_s) as reclaim:
        first = max((found.step for found in complete(config.run_dir)), default=0) + 1
        time.sleep(FAKE.get("load_s", 0.0))
        ledger.record("attempt_started", world_size=1, step=first - 1)
        if reclaim.requested() >= Action.STOP:
            return _reason(reclaim), first - 1
        for step in range(first, config.train.steps + 1):
            while step == FAKE.get("hang_at"):
                time.sleep(1)
            if step == FAKE.get("crash_at") and not (FAKE.get("crash_once") and attempt > 1):
                raise RuntimeError(FAKE.get("crash_words", "planted"))
            time.sleep(FAKE.get("step_s", 0.01))
            metrics.write({"step": step, "attempt": attempt})
            want = reclaim.requested()
            stop = want >= Action.STOP
            if (
                step == config.train.steps
                or want in (Action.SAVE, Action.STOP)
                or step % config.checkpoint.every_steps == 0
            ):
                save(config.run_dir, step, attempt, config, ledger)
            if step == config.train.steps:
                break
            if stop:
                return _reason(reclaim), step
    return Reason.FINISHED, config.train.steps


def _reason(reclaim: Reclaim) -> Reason:
    return Reason.INTERRUPTED if reclaim.interrupted else Reason.RECLAIMED


def be_a_rank() -> int:
    runtime, attempt, *overrides = sys.argv[1:]
    prepare_rank(Path(runtime))
    config = load_config(overrides, Path.cwd())
    reason, step, message = Reason.CRASHED, 0, ""
    try:
        reason, step = train(Path(runtime), int(attempt), config)
    except ConfigError as error:
        reason, message = Reason.CONFIG, str(error)
    except Exception:
        message = traceback.format_exc()
        step = FAKE.get("crash_at", 0)
    Status(reason, step, message).write(Path(runtime))
    return 0 if reason.is_clean else 1


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        sys.exit(launch(sys.argv[2:], gpus=1, command=command, project=Path.cwd()))
    sys.exit(be_a_rank())
