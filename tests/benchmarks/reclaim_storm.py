"""Reclaim a training run at random moments, over and over: always exit 75, never a deadlock, no step lost.

    python tests/benchmarks/reclaim_storm.py --rounds 50 --ranks 4 --target rank --target group --seed 0
    python tests/benchmarks/reclaim_storm.py --cost --ranks 2

Each round starts `python -m trainer launch` (data-loader workers included), and after a random while, before or after
the first new step, sends SIGTERM, SIGINT or SIGUSR1 to the launcher, to what starts the ranks, to one rank, or to all
process groups at once, sometimes twice. It has to exit with 75, with newest checkpoint, last line of the metrics and
`stopped` in the ledger at the same step. The next round carries on. Prints seconds from signal to exit.

With --cost instead: what asking and agreeing cost per step, beside a step of the demo with its default settings.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

TEMPLATE = Path(__file__).resolve().parents[2] / "template"
sys.path.insert(0, str(TEMPLATE))

from trainer.checkpoint import commit as commits  # noqa: E402
from trainer.config.settings import Config  # noqa: E402
from trainer.launch.spawn import start_ranks  # noqa: E402
from trainer.machine.nodes import Nodes  # noqa: E402
from trainer.records import read_records  # noqa: E402

SETTINGS = [
    "run.name=storm", "train.steps=100000", "train.eval_every_steps=7", "train.eval_batches=1", "data.workers=1",
    "logging.tensorboard=false", "model.layers=1", "model.width=32", "model.heads=2", "data.sequence_length=32",
    "data.global_batch=8", "data.micro_batch=2", "checkpoint.every_steps=10", "reclaim.notice=none",
    "reclaim.grace_s=60",
]  # fmt: skip
TARGETS = ("launcher", "rank", "group")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PATIENCE_S = 120.0


# A rank that does nothing but ask and agree.
AGREES = """
import pathlib, sys, time, torch
from trainer import parallel
from trainer.agreement import Agreement
from trainer.reclaim.rank import Reclaim
from trainer.reclaim.request import Action
folder = pathlib.Path(sys.argv[1])
with Reclaim(folder, 30) as reclaim, parallel.join() as world:
    agreement, sums = Agreement(world, 2000), torch.zeros(2, dtype=torch.float64, device=world.device)
    agreement.begin(1, action=Action.NOTHING, save_due=False)
    took = []
    for step in range(1, 1001):
        begin = time.perf_counter()
        decision, _ = agreement.decide(
            step, sums, (0, 0), action=reclaim.requested(), save_due=False, save_done=False, save_failed=False
        )
        agreement.complete(sums[0], decision)
        took.append(time.perf_counter() - begin)
    (folder / f"took_{world.rank}").write_text(str(sorted(took)[len(took) // 2]))
"""


class Lost(AssertionError):
    """A promise was broken."""


class Run:
    """A project and the launchers that are started in it, one after the other."""

    def __init__(self, directory: Path, ranks: int, settings: Sequence[str] = ()) -> None:
        self.project = directory / "storm"
        for package in ("trainer", "tasks"):
            shutil.copytree(TEMPLATE / package, self.project / package)
        self.run_dir = self.project / "checkpoints" / "storm"
        self.command = [sys.executable, "-m", "trainer", "launch", "--gpus", str(ranks), *SETTINGS, *settings]
        self.ranks, self.log = ranks, self.project / "log"
        self.launcher: psutil.Popen | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.launcher = psutil.Popen(
                self.command, cwd=self.project, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def steps_made(self, since: int) -> int:
        return self.last_line() - since

    def last_line(self) -> int:
        return max((line["step"] for line in read_records(self.run_dir, "metrics")), default=0)

    def saved(self) -> int:
        return max((found.step for found in commits.complete(self.run_dir)), default=0)

    def stopped(self) -> list[dict[str, Any]]:
        return [event for event in read_records(self.run_dir, "ledger") if event["event"] == "stopped"]

    def signal(self, target: str, number: signal.Signals, chance: random.Random) -> None:
        """To `target` as it is now; what does not exist yet is passed over."""
        assert self.launcher is not None
        ranks: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # a start that has just ended
            ranks = self.launcher.children()
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if target == "group":
                for process in (self.launcher, *ranks):  # each leads its own
                    os.killpg(process.pid, number)
            elif target == "rank" and ranks:
                chance.choice(ranks).send_signal(number)
            else:
                self.launcher.send_signal(number)

    def wait(self) -> int:
        """Exit code of the launcher. Raises Lost where it does not end."""
        assert self.launcher is not None
        try:
            return int(self.launcher.wait(PATIENCE_S))
        except subprocess.TimeoutExpired:
            raise Lost(f"no end within {PATIENCE_S:.0f} s; see {self.log}") from None

    def kill(self) -> None:
        if self.launcher is not None and self.launcher.is_running():
            for process in (*self.launcher.children(recursive=True), self.launcher):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.launcher.wait()

    def check(self, code: int, before: int, ends: int) -> None:
        """After a round that began at step `before` with `ends` recorded. Raises Lost."""
        last, saved, stopped = self.last_line(), self.saved(), self.stopped()[ends:]
        if code != 75:
            raise Lost(f"exit {code}, not 75; see {self.log}")
        if saved != last:
            raise Lost(f"step {last} was made and step {saved} is saved; see {self.log}")
        if stopped and (len(stopped) > 1 or (last > before and stopped[0]["step"] != last)):
            raise Lost(f"step {last} was made and the ledger says {stopped}; see {self.log}")


def round_of(run: Run, target: str, number: signal.Signals, chance: random.Random, *, early: bool) -> float:
    """Start, reclaim, check. Returns seconds from the signal to the end.

    Args:
        early: at a random moment before the first new step; else after a few of them.
    """
    before, ends = run.last_line(), len(run.stopped())
    run.start()
    assert run.launcher is not None
    began = time.monotonic()
    steps, moment = chance.randrange(1, 25), chance.uniform(0, 6)
    while (time.monotonic() - began < moment) if early else (run.steps_made(before) < steps):
        if run.launcher.poll() is not None or time.monotonic() - began > PATIENCE_S:
            raise Lost(f"no step; see {run.log}")
        time.sleep(0.01)
    sent = time.monotonic()
    run.signal(target, number, chance)
    if chance.random() < 0.3:
        run.signal(target, number, chance)
    code = run.wait()
    took = time.monotonic() - sent
    if early and code < 0:  # before Python could do anything: nothing was lost
        if -code != number or run.saved() != before:
            raise Lost(f"exit {code}; see {run.log}")
        return took
    run.check(code, before, ends)
    return took


def storm(run: Run, target: str, rounds: int, chance: random.Random) -> list[float]:
    """Seconds from signal to exit of each round. Raises Lost."""
    seconds = []
    for number in range(rounds):
        kind = chance.choice(SIGNALS)
        early = number % 5 == 4
        seconds.append(round_of(run, target, kind, chance, early=early))
        print(
            f"{target} {number + 1}/{rounds}: {kind.name}{' early' if early else ''}, {seconds[-1]:.1f} s", flush=True
        )
    return seconds


def cost(place: Path, ranks: int) -> tuple[float, float]:
    """Seconds per step of asking and agreeing, and of a step of the demo (medians)."""
    run = Run(place, ranks)
    demo = [sys.executable, "-m", "trainer", "launch", "--gpus", str(ranks), "train.steps=12", "run.name=storm"]
    subprocess.run(demo, cwd=run.project, check=True, stdout=subprocess.DEVNULL)
    lines = read_records(run.run_dir, "metrics")
    step_s = statistics.median(line["seconds"] for line in lines[2:])
    (run.project / "agrees.py").write_text(AGREES)
    words, one = ["-m", "agrees", str(place)], Nodes(1, 0, "", "", "")
    if any(process.wait() for process in start_ranks(words, Config(project=run.project), place, ranks, one)):
        raise SystemExit("the ranks that only agree have failed")
    return max(float(path.read_text()) for path in place.glob("took_*")), step_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="for each target")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: rank and group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", action="store_true")
    arguments = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="reclaim_storm_"))
    if arguments.cost:
        agree_s, step_s = cost(place, arguments.ranks)
        print(
            f"{arguments.ranks} ranks: asking and agreeing {1e6 * agree_s:.0f} µs a step, a step of the demo "
            f"{1e3 * step_s:.0f} ms: {agree_s / step_s:.2%}"
        )
        shutil.rmtree(place)
        return 0 if agree_s < 0.01 * step_s else 1
    run, chance = Run(place, arguments.ranks), random.Random(arguments.seed)
    try:
        for target in arguments.target or ("rank", "group"):
            seconds = storm(run, target, arguments.rounds, chance)
            print(
                f"{target}: {len(seconds)} reclaims, exit 75 each time, no step lost; signal to exit "
                f"{statistics.median(seconds):.1f} s in the median, {max(seconds):.1f} s at most"
            )
    except Lost as lost:
        print(f"LOST: {lost}")
        return 1
    finally:
        run.kill()
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
