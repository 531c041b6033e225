"""Kill a training run at random moments, over and over, and look whether anything was lost.

    python tests/benchmarks/kill_storm.py --rounds 200 --ranks 2 --seed 0

Each round starts `python -m trainer launch` with a save every few steps, waits for a new step, and after a random
while sends SIGKILL to everything, or only to a writer process, one rank or the launcher; whatever lives on has to
carry on by itself before it is killed as well. After every round: every complete checkpoint verifies, no committed
step is gone, the next start resumes from the newest one. At the end: all losses and sample hashes are those of a run
that nobody disturbed, bit for bit, so no rank can have loaded another step than its peers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).resolve().parents[2] / "template"
sys.path.insert(0, str(TEMPLATE))

from trainer.checkpoint import commit as commits  # noqa: E402
from trainer.outcome import Damaged  # noqa: E402
from trainer.records import read_records  # noqa: E402

SETTINGS = [
    "run.name=storm", "train.steps=100000", "train.eval_every_steps=0", "logging.tensorboard=false",
    "model.layers=2", "model.width=64", "model.heads=2", "data.sequence_length=64", "data.global_batch=8",
    "data.micro_batch=2", "checkpoint.keep_last=3", "restart.backoff_s=0", "restart.max_crash_restarts=1000",
]  # fmt: skip
TARGETS = ("all", "all", "all", "writer", "rank", "launcher")
PATIENCE_S = 240.0


class Lost(AssertionError):
    """A promise was broken."""


class Run:
    """A project and its run directory; at most one launch at a time."""

    def __init__(self, directory: Path, name: str, ranks: int, every_steps: int) -> None:
        self.project = directory / name
        for package in ("trainer", "tasks"):
            shutil.copytree(TEMPLATE / package, self.project / package)
        self.checkpoints = self.project / "checkpoints"
        self.run_dir = self.checkpoints / "storm"
        self.command = [sys.executable, "-m", "trainer", "launch", "--gpus", str(ranks), *SETTINGS]
        self.command += [f"checkpoint.dir={self.checkpoints}", f"checkpoint.every_steps={every_steps}"]
        self.mark = f"KILL_STORM={uuid.uuid4().hex}"
        self.log = (self.project / "log").open("ab")
        self.launcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        name, _, value = self.mark.partition("=")
        environment = os.environ | {name: value, "PYTHONUNBUFFERED": "1"}
        self.launcher = subprocess.Popen(
            self.command, cwd=self.project, env=environment, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def processes(self) -> dict[str, list[int]]:
        """Process ids by what they are: launcher, ranks, writers, others."""
        found: dict[str, list[int]] = {"launcher": [], "rank": [], "writer": [], "other": []}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if self.mark.encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if " -m trainer launch" in words:
                    kind = "launcher"
                elif " trainer train " in words:
                    kind = "rank"
                elif "spawn_main" in words:
                    kind = "writer"
                else:
                    kind = "other"
                found[kind].append(int(entry.name))
        return found

    def kill(self, kind: str, chance: random.Random) -> None:
        found = self.processes()
        if kind == "all":
            targets = [pid for pids in found.values() for pid in pids]
            chance.shuffle(targets)
        elif kind == "launcher":
            targets = found["launcher"]
        else:
            targets = [chance.choice(found[kind])] if found[kind] else []
        for pid in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_the_rest(self) -> None:
        """Everything that is left, until nothing is."""

        def gone() -> bool:
            left = [pid for pids in self.processes().values() for pid in pids]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        until(gone, "the processes do not end")
        if self.launcher is not None:
            self.launcher.wait()

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in read_records(self.run_dir, "metrics") if isinstance(line.get("step"), int)]

    def newest_line(self) -> tuple[int, int]:
        return max(((line["attempt"], line["step"]) for line in self.steps()), default=(0, 0))

    def committed(self) -> list[int]:
        return [event["step"] for event in read_records(self.run_dir, "ledger") if event["event"] == "save_committed"]


def until(condition: Callable[[], Any], complaint: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise Lost(complaint)
        time.sleep(0.02)


def storm(run: Run, rounds: int, span_s: float, chance: random.Random) -> Counter[str]:
    """Run the rounds. Returns how often what was killed. Raises Lost."""
    killed: Counter[str] = Counter()
    newest = 0  # the step that has to survive
    orphans = False
    for number in range(1, rounds + 1):
        before = run.newest_line()[0]
        run.start()
        until(partial(_has_stepped, run, before), "no new step after a start")
        _check_resumed(run, run.newest_line()[0], newest, at_least=orphans)
        time.sleep(chance.uniform(0.0, span_s))  # the moment is what is random
        target = chance.choice(TARGETS)
        saves = len(run.committed())
        run.kill(target, chance)
        killed[target] += 1
        if target in ("writer", "rank"):
            until(partial(_has_saved, run, saves + 1), f"no save after a {target} was killed")
        orphans = target == "launcher"  # its ranks die with it, their writers may still commit before the next start
        if orphans:
            assert run.launcher is not None
            run.launcher.wait()
        else:
            run.kill_the_rest()
        newest = _check_disk(run, newest)
        print(f"round {number}/{rounds}: killed {target}, newest step {newest}", flush=True)
    return killed


def _alive(run: Run) -> bool:
    assert run.launcher is not None
    if (code := run.launcher.poll()) is not None:
        raise Lost(f"the launcher ended with {code}; see {run.project / 'log'}")
    return True


def _has_stepped(run: Run, attempt: int) -> bool:
    return _alive(run) and run.newest_line()[0] > attempt


def _has_saved(run: Run, saves: int) -> bool:
    return _alive(run) and len(run.committed()) > saves


def _check_resumed(run: Run, attempt: int, newest: int, *, at_least: bool) -> None:
    found = [
        event["step"]
        for event in read_records(run.run_dir, "ledger")
        if event["event"] == "resumed" and event["attempt"] == attempt
    ]
    step = (found or [0])[-1]
    if step < newest or (step > newest and not at_least):
        raise Lost(f"attempt {attempt} resumed from {found}, the newest checkpoint was {newest}")


def _check_disk(run: Run, newest: int) -> int:
    told = max(run.committed(), default=0)  # first: an orphaned writer may commit while the disk is looked at
    complete = commits.complete(run.run_dir)
    for commit in complete:
        try:
            commits.verify(commit)
        except Damaged:
            if commit.directory.exists():  # else that writer's retention removed it meanwhile
                raise
    if remains := commits.quarantined(run.run_dir):
        raise Lost(f"damaged: {remains}")
    now = max((commit.step for commit in complete), default=0)
    if now < max(newest, told):
        raise Lost(f"step {max(newest, told)} was committed and the newest complete one is {now}")
    return now


def check_losses(run: Run, reference: Run) -> int:
    """Compare with a run that nobody disturbed. Returns the number of lines compared."""
    last = max(line["step"] for line in run.steps())
    reference.start()
    until(lambda: _alive(reference) and reference.newest_line()[1] >= last, "the reference does not get there")
    reference.kill_the_rest()
    expected = {line["step"]: line for line in reference.steps()}
    lines = run.steps()
    for line in lines:
        for key in ("loss", "batch_hash", "samples", "lr"):
            if line[key] != expected[line["step"]][key]:
                raise Lost(f"step {line['step']}: {key} is {line[key]}, undisturbed {expected[line['step']][key]}")
    if len({line["step"] for line in lines}) != last:
        raise Lost(f"{last} steps were reached and {len({line['step'] for line in lines})} have a line")
    return len(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every-steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--span-s", type=float, default=4.0, help="of training, within which the kill comes")
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary directory")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave no processes behind
    chance = random.Random(arguments.seed)
    begin = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="kill_storm_", dir=arguments.directory))
    run = Run(place, "run", arguments.ranks, arguments.every_steps)
    reference = Run(place, "reference", arguments.ranks, 1_000_000)
    try:
        killed = storm(run, arguments.rounds, arguments.span_s, chance)
        compared = check_losses(run, reference)
    except Lost as lost:
        print(f"LOST: {lost}\nwhat is there is kept in {place}", flush=True)
        return 1
    finally:
        for one in (run, reference):
            one.kill_the_rest()
    events = read_records(run.run_dir, "ledger")
    counts = Counter(event["event"] for event in events)
    verdict = {
        "rounds": arguments.rounds,
        "ranks": arguments.ranks,
        "seed": arguments.seed,
        "killed": dict(killed),
        "steps": max(line["step"] for line in run.steps()),
        "lines_compared": compared,
        "saves_committed": counts["save_committed"],
        "saves_failed": counts["save_failed"],
        "steps_redone": sum(event["lost_steps"] for event in events if event["event"] == "resumed"),
        "committed_steps_lost": 0,
        "minutes": round((time.monotonic() - begin) / 60, 1),
    }
    print(json.dumps(verdict))
    shutil.rmtree(place, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
