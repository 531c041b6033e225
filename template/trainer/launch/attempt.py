"""One start of the ranks of this node: watch them, pass requests on, enforce deadlines, and say why they ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.checkpoint import commit
from trainer.checkpoint.lease import Lease
from trainer.config.settings import Config
from trainer.launch.exit_reason import Ended, translate
from trainer.launch.signals import Inbox
from trainer.launch.spawn import start_ranks
from trainer.ledger import Ledger, read_events, save_time_s
from trainer.machine.gpus import Ranks
from trainer.machine.nodes import Nodes
from trainer.outcome import Reason, read_statuses
from trainer.processes import STACKS, STOP_SIGNALS, alive, reap
from trainer.reclaim import request as requests
from trainer.reclaim.request import Action, Request

HEARTBEAT_S = 60.0  # between two `heartbeat` events in the ledger
LINGER_S = 10.0  # for the other ranks, once one has failed
LEAVE_S = 120.0  # once one has ended well: all do so after the same step
OVERDUE_S, OVERDUE_TIMES = 60.0, 20.0  # a step is slow above the first, and so many usual ones
HANGING = "a rank has ended and the others hang"
TAKEN_OVER = "another launcher has taken this run over"


def say(text: str) -> None:
    """Print one line for the log."""
    print(f"[launch] {text}", file=sys.stderr, flush=True)


def saved_step(run_dir: Path) -> int:
    """Step of the newest complete checkpoint; 0 where there is none."""
    return max((found.step for found in commit.complete(run_dir)), default=0)


@dataclass(frozen=True)
class Node:
    """What all starts of the ranks on this node have in common. Only node 0 has a lease and a ledger."""

    config: Config
    runtime: Path
    ranks: Ranks
    nodes: Nodes
    inbox: Inbox
    command: Callable[[Path, int | None], list[str]]  # of a rank, from the runtime directory and the attempt
    lease: Lease | None = None
    ledger: Ledger | None = None

    def record(self, event: str, **fields: Any) -> None:
        if self.ledger:
            self.ledger.record(event, **fields)

    def record_notice(self, request: Request, decision: str) -> None:
        left = None if request.deadline is None else round(request.deadline - time.monotonic(), 1)
        self.record("reclaim_noticed", source=request.source, deadline_s=left, decision=decision)

    def last_step(self) -> int:
        """The last step in the metrics, or of the newest checkpoint."""
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            path = self.config.run_dir / "metrics.jsonl"
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 8192))
                return int(json.loads(file.read().rstrip(b"\n").rpartition(b"\n")[2])["step"])
        return saved_step(self.config.run_dir)


class Attempt:
    """Starts the ranks of `node`; `supervise` returns once they are gone.

    Args:
        number: the lease's epoch; None on nodes other than the first.
    """

    def __init__(self, node: Node, number: int | None) -> None:
        self.node, self.config, self.runtime, self.number = node, node.config, node.runtime, number
        self.stop: Request | None = None  # the request to stop that was passed on, with its nearest deadline
        self.stop_action = Action.NOTHING  # what the ranks were told
        self.kill_at, self.kill_why = float("inf"), ""  # time.monotonic()
        self.killed = False
        self.failures: dict[int, int] = {}  # exit codes by number of the process, in the order of their end
        self.crash_seen = False
        for leftover in self.runtime.iterdir():
            leftover.unlink()
        self.started = self.overdue = self.reported = time.monotonic()  # the newest steps that were reported
        words = node.command(node.runtime, number)
        self.processes = start_ranks(words, node.config, node.runtime, node.ranks.count, node.nodes)

    def supervise(self) -> Ended:
        """Watch the ranks, pass requests on, enforce the deadline; return why they ended."""
        inbox, heartbeat = self.node.inbox, self.started + HEARTBEAT_S
        running = {os.pidfd_open(process.pid): number for number, process in enumerate(self.processes)}
        while running:
            inbox.wait(0.5 if self.killed else min(0.5, self.kill_at - time.monotonic()), *running)
            for request in inbox.take():
                self._pass_on(request)
            for descriptor, number in list(running.items()):
                if (code := self.processes[number].poll()) is not None:
                    os.close(descriptor)
                    del running[descriptor]
                    self._has_ended(number, code)
            self._read_ranks_files()
            now = time.monotonic()
            if self.node.lease and self.node.lease.lost:
                self._kill_by(now, TAKEN_OVER)
            self._check_step_time(now)
            if now >= self.kill_at and not self.killed:
                self._kill()
            if now > heartbeat:
                heartbeat = now + HEARTBEAT_S
                self.node.record("heartbeat")
            reap({process.pid for process in self.processes})
        return self._ended()

    def _kill_by(self, moment: float, why: str) -> None:
        if moment < self.kill_at:
            self.kill_at, self.kill_why = moment, why

    def _kill(self) -> None:
        """SIGKILL what was started, and with torchrun (parent death) the ranks; their daemons may end their save."""
        if self.kill_why:
            say(self.kill_why)
        self.killed = True
        for process in self.processes:
            process.kill()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _pass_on(self, request: Request) -> None:
        """Decide what the time that is left is enough for, and ask the ranks for it."""
        if request.action < Action.STOP:
            if not self.stop:
                say(f"{request.source}: saving early, training goes on")
                self.node.record_notice(request, "saving early")
                (self.runtime / requests.SAVE_EARLY).touch()
            return
        if self.stop and (request.deadline or float("inf")) >= (self.stop.deadline or float("inf")):
            return
        left = float("inf") if request.deadline is None else request.deadline - time.monotonic()
        action, why = self._decide(left)
        if self.node.nodes.count == 1 and requests.revoke_start(self.runtime):
            say(f"{request.source} before a new step was made: nothing to save")
            self.stop = request
            self.node.record_notice(request, "no step was made")
            self._kill_by(0.0, "")
            return
        self.stop = replace(request, person=request.person and not self.stop)
        if action > self.stop_action:
            self.stop_action = action
            replace(request, action=action).write(self.runtime / requests.STOP)
        if request.deadline is not None:
            moment = request.deadline - max(0.5, min(2.0, left / 10))
            self._kill_by(moment, "the grace period is nearly over: ending the ranks")
        say(f"{request.source}: {why}")
        self.node.record_notice(request, why)

    def _decide(self, left_s: float) -> tuple[Action, str]:
        try:
            save_s, pending_s = self._save_times()
        except Exception as error:  # a record that cannot be read decides nothing: try to save
            say(f"cannot read from the ledger how long a save takes ({type(error).__name__}: {error})")
            save_s, pending_s = None, 0.0
        usual_s = max((beat.usual_s for beat in requests.read_beats(self.runtime).values()), default=0.0)
        steps = 2 if self.node.ranks.gpu else 1  # on GPUs what is agreed on is acted on one step later
        return requests.decide(requests.usable_s(left_s), steps * usual_s, save_s, pending_s)

    def _save_times(self) -> tuple[float | None, float]:
        """Seconds of a save in this run (None: not measured), and until the pending one is durable (0: none)."""
        events = read_events(self.config.run_dir)
        usual_s = save_time_s(events)
        number = self.number or max((event.attempt for event in events), default=0)
        mine = [event for event in events if event.attempt == number]
        started = [event for event in mine if event.event == "save_started"]
        over = {event.step for event in mine if event.event in ("save_committed", "save_failed")}
        if not started or started[-1].step in over:
            return usual_s, 0.0
        return usual_s, max(0.1, (usual_s or 0.0) - (time.time() - started[-1].time))

    # -- what the ranks show -------------------------------------------------------------------------------------------

    def _has_ended(self, number: int, code: int) -> None:
        """A rank is gone: its peers follow, or wait for it in a collective. Torchrun looks after its ranks itself."""
        if self.node.nodes.count > 1 or self.killed:
            return
        if code:
            self.failures[number] = code
        if -code in STOP_SIGNALS:  # it could not handle it yet
            deadline = time.monotonic() + self.config.reclaim.grace_s
            self._pass_on(Request(Action.STOP, f"{signal.Signals(-code).name} to a rank", deadline))
        elif code:
            self.crash_seen = True
        self._kill_by(time.monotonic() + (LINGER_S if code else LEAVE_S), HANGING)

    def _read_ranks_files(self) -> None:
        """Notice that a rank has crashed, and take up a request that came to a rank directly."""
        if not self.crash_seen and self._has_crashed():
            self.crash_seen = True
            self._kill_by(time.monotonic() + LINGER_S, HANGING)
        signalled = Request.read(self.runtime / requests.SIGNALLED)
        if signalled and not self.stop and not self.crash_seen:  # after a crash torchrun signals the others
            self._pass_on(replace(signalled, source=f"{signalled.source} to a rank"))

    def _has_crashed(self) -> bool:
        if statuses := read_statuses(self.runtime):
            return any(status.reason is Reason.CRASHED for status in statuses)
        return any(not alive(pid) for pid in requests.rank_processes(self.runtime))

    def _check_step_time(self, now: float) -> None:
        """Say that a step takes unusually long; show where it hangs, and restart it where that is set."""
        if self.stop:
            return
        beats = requests.read_beats(self.runtime).values()
        last = max((beat.moment for beat in beats), default=self.started)
        usual = max((beat.usual_s for beat in beats), default=0.0)
        if usual and now - last > max(OVERDUE_S, OVERDUE_TIMES * usual) and self.overdue != last:
            self.overdue = last
            say(f"step {self.node.last_step() + 1} has taken {now - last:.0f} s so far, {usual:.2g} s is usual")
        limit = self.config.restart.stuck_after_s
        if now - max(last, self.reported) < limit:
            return
        self.reported = now
        step = self.node.last_step()
        what = f"step {step + 1}" if beats else "the start"
        say(f"{what} has taken {now - last:.0f} s (restart.stuck_after_s is {limit:.0f}); all stacks follow")
        self.node.record("stuck", seconds=round(now - last, 1), step=step)
        for pid in requests.rank_processes(self.runtime):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS)
        if self.config.restart.restart_stuck:
            self.node.inbox.wait(2.0)  # for the stacks to be written
            self._kill_by(now, f"{what} has taken {now - last:.0f} s: restarting (restart.restart_stuck)")

    def _ended(self) -> Ended:
        if self.node.lease and self.node.lease.lost:
            return Ended(Reason.UNAVAILABLE, self.node.last_step(), TAKEN_OVER)
        statuses = read_statuses(self.runtime)
        report: dict[str, Any] = {"failures": self.failures}
        if self.node.nodes.count > 1:
            report = {}
            with contextlib.suppress(OSError, ValueError):
                report = json.loads((self.runtime / requests.STARTER_REPORT).read_text())
        ended = translate(statuses, report, self.processes[0].returncode, self.node.ranks.count, self.stop)
        if ended.reason is Reason.CRASHED and self.killed and not self.crash_seen:
            ended = replace(ended, message=self.kill_why, outside=False)
        if ended.step == 0:  # no rank wrote one
            made_steps = bool(requests.read_beats(self.runtime))
            ended = replace(ended, step=self.node.last_step() if made_steps else saved_step(self.config.run_dir))
        return ended
