"""The supervisor of one node: looks at the machine, starts the ranks through torchrun, stops and restarts them.

`python -m trainer launch` imports no torch. Its exit code says what the platform should do: 0 finished, 75 start me
again (`restart.exit_reclaimed`), 78 change something first, 1 crashed too often.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer.checkpoint import commit
from trainer.checkpoint.lease import Lease
from trainer.config.load import load_config
from trainer.config.settings import PROJECT, Config
from trainer.data.plan import BatchPlan
from trainer.launch.attempt import Start, rank_environment, torchrun_command
from trainer.launch.exit_reason import Ended, translate
from trainer.launch.signals import Inbox, Request, Stopped
from trainer.launch.spawn import REPORT
from trainer.ledger import Ledger, read_ledger, save_time_s
from trainer.machine.gpus import count_gpus, decide_ranks, usable_cores
from trainer.machine.nodes import find_nodes
from trainer.outcome import CONFIG, FINISHED, RECLAIMED, ConfigError, Reason, UnavailableError
from trainer.processes import STACKS, adopt_orphans, alive, reap
from trainer.reclaim import request as requests
from trainer.reclaim.request import Action
from trainer.storage import capacity, volume

CRASHED = 1
HEARTBEAT_S = 60.0  # between the ledger's signs of life
LINGER_S = 20.0  # for ranks that hang after one of them has crashed
MOST_BACKOFF_S = 60.0
OVERDUE_S, OVERDUE_TIMES = 60.0, 20.0  # a step that takes longer than both, and this often as long as usual, is said


def say(text: str) -> None:
    """One line for whoever watches the log."""
    print(f"[launch] {text}", file=sys.stderr, flush=True)


def launch(
    overrides: Sequence[str] = (),
    *,
    gpus: int | None = None,
    accepted: Sequence[str] = (),
    command: Callable[[Start], list[str]] = torchrun_command,
    project: Path = PROJECT,
) -> int:
    """Run this node until training is finished, reclaimed, or beyond repair.

    Args:
        gpus: ranks of this node; None counts the GPUs and follows `gpu.on_count_change`.
        command: builds the command line that runs the ranks.

    Returns:
        The exit code: 0, `restart.exit_reclaimed`, 78, or 1.
    """
    code = RECLAIMED
    with Inbox() as inbox:
        try:
            config = load_config(overrides, project)
            code, inbox.grace_s = config.restart.exit_reclaimed, config.reclaim.grace_s
            return Supervisor(config, inbox, gpus, overrides, accepted, command).run()
        except Stopped as stopped:
            say(f"{stopped} before a new step was made: nothing to save, exit {code}")
            return code
        except ConfigError as error:
            say(f"error: {error}")
            return CONFIG
        except UnavailableError as error:
            say(f"not now: {error}")
            return code
        except OSError as error:
            say(f"not now: the volume or this machine fails ({error}); nothing was changed")
            return code


class Supervisor:
    """Runs the ranks of one node, over and over, until there is an exit code."""

    def __init__(
        self,
        config: Config,
        inbox: Inbox,
        gpus: int | None,
        overrides: Sequence[str],
        accepted: Sequence[str],
        command: Callable[[Start], list[str]],
    ) -> None:
        self.config, self.inbox, self.given = config, inbox, gpus
        self.overrides, self.accepted, self.command = overrides, accepted, command
        self.ledger: Ledger | None = None
        self.lease: Lease | None = None
        self.stop: Request | None = None
        self.kill_at: float | None = None

    def run(self) -> int:
        config = self.config
        for line in volume.prepare(config):
            say(line)
        if (step := self.newest_step()) >= config.train.steps:
            say(f"run {config.run_name} is finished: step {step} of {config.train.steps} is saved")
            return FINISHED
        self.nodes = find_nodes(config.nodes)
        self.cores = usable_cores()
        self.ranks = decide_ranks(self.given, count_gpus(), self.cores, config.gpu, config.run.provider)
        self._show_plan()
        if found := commit.complete(config.run_dir):  # else rank 0 looks, once it has the model
            size, source = found[0].bytes, f"as step {found[0].step}"
            for line in capacity.check_room(config, size, source, self.ranks.count, self.nodes.count, len(found)):
                say(line)
        with ExitStack() as stack:
            self.runtime = Path(tempfile.mkdtemp(prefix="trainer-"))
            stack.callback(shutil.rmtree, self.runtime, ignore_errors=True)
            if self.nodes.is_first:
                self.lease = Lease.acquire(config.run_dir)
                stack.callback(self._give_back)
                self.ledger = Ledger(config.run_dir, 0)
                stack.callback(self.ledger.close)
            adopt_orphans()
            return self._until_done(stack)

    def newest_step(self) -> int:
        """Step of the newest complete checkpoint; 0 where there is none."""
        return max((found.step for found in commit.complete(self.config.run_dir)), default=0)

    def _show_plan(self) -> None:
        data, nodes = self.config.data, self.nodes
        plan = BatchPlan(data.global_batch, data.micro_batch, self.ranks.count * nodes.count)
        kind = "GPU" if self.ranks.gpu else "CPU"
        this = "one of them" if nodes.rank is None else f"number {nodes.rank}"
        where = "" if nodes.count == 1 else f" on each of {nodes.count} nodes (this is {this}, says {nodes.source})"
        say(f"{self.ranks.count} {kind} rank{'s' * (self.ranks.count != 1)}{where}: {self.ranks.why}")
        say(plan.describe())
        if plan.padding_share > 0.25:
            say(
                f"warning: {plan.padding_share:.0%} of the work is padding; a data.global_batch of "
                f"{plan.world_size * plan.micro_batches_per_rank * plan.micro_batch} would cost the same"
            )

    # -- the loop over starts ------------------------------------------------------------------------------------------

    def _until_done(self, stack: ExitStack) -> int:
        restart = self.config.restart
        restarts, saved, before = 0, self.newest_step(), None
        while True:
            ended = self._run_ranks(stack)
            step = self.newest_step()
            if ended.reason is Reason.CRASHED and step >= self.config.train.steps:
                ended = Ended(Reason.FINISHED, step)  # and then one fell over on the way out
            self._record_end(ended)
            match ended.reason:
                case Reason.FINISHED:
                    say(f"finished: step {ended.step} of {self.config.train.steps}")
                    return FINISHED
                case Reason.CONFIG:
                    raise ConfigError(ended.message)
                case Reason.UNAVAILABLE:
                    raise UnavailableError(ended.message)
                case Reason.RECLAIMED | Reason.INTERRUPTED:
                    lost = max(0, ended.step - step)
                    state = f"step {step} is saved" if not lost else f"step {step} is saved, {lost} steps are lost"
                    say(f"{ended.reason}: {state}; start me again (exit {restart.exit_reclaimed})")
                    if ended.message:
                        say(f"on the way out, {ended.message}")
                    return restart.exit_reclaimed
            say(f"crashed: {ended.message}")
            if step > saved:
                restarts, saved, before = 0, step, None  # progress: the budget is whole again
            crash = (ended.step, ended.message.splitlines()[-1])
            if ended.outside:
                before = None
            elif crash == before:
                return self._give_up(ended, "it crashed in the same way at the same step, with no new checkpoint since")
            else:
                before = crash
            if restarts >= restart.max_crash_restarts:
                return self._give_up(ended, f"restart.max_crash_restarts is {restart.max_crash_restarts}")
            restarts += 1
            pause = min(MOST_BACKOFF_S, restart.backoff_s * 2 ** (restarts - 1))
            say(f"restart {restarts} of {restart.max_crash_restarts} from step {step} in {pause:.0f} s")
            self._pause(pause)

    def _give_up(self, ended: Ended, why: str) -> int:
        self._let_daemons_end()
        say(f"giving up at step {ended.step}: {why}; step {self.newest_step()} is saved")
        return CRASHED

    def _pause(self, seconds: float) -> None:
        """Before a restart: let the daemons of the dead ranks commit what they hold, and whatever broke recover."""
        self.inbox.idle = True
        until = time.monotonic() + seconds
        self._let_daemons_end()
        while (left := until - time.monotonic()) > 0:
            self.inbox.wait(left)
            self._refuse_if_asked()

    def _refuse_if_asked(self) -> None:
        """With no rank running, a request to stop is an exit. Raises Stopped."""
        for request in self.inbox.take():
            if request.want >= Action.STOP:
                if self.ledger:
                    self._record_notice(request, "no rank was running")
                raise Stopped(request.source)

    def _let_daemons_end(self) -> None:
        """Wait for orphaned checkpoint daemons: twice the time of a save, at most its deadline."""
        usual = save_time_s(read_ledger(self.config.run_dir)) or 5.0
        until = time.monotonic() + min(self.config.checkpoint.deadline_s, 2 * usual + 5)
        while reap() and time.monotonic() < until:
            self.inbox.wait(0.1)
            self._refuse_if_asked()

    def _give_back(self) -> None:
        if self.lease:
            self.lease.release()

    # -- one start -----------------------------------------------------------------------------------------------------

    def _run_ranks(self, stack: ExitStack) -> Ended:
        """Start the ranks, watch them, pass requests on, enforce the deadline; return why they ended."""
        self.inbox.idle = True
        self._refuse_if_asked()
        for leftover in self.runtime.iterdir():
            leftover.unlink()
        attempt = None
        if self.lease and self.ledger:
            self.ledger.attempt = attempt = self.lease.next_epoch()
        self.stop = self.kill_at = None
        self.killed_because = ""
        grace_s = self.config.reclaim.grace_s
        start = Start(
            self.runtime, attempt, self.ranks.count, self.nodes, self.config.run_name,
            int(max(30, grace_s)) + 15, self.overrides, self.accepted,
        )  # fmt: skip
        self.inbox.idle = False
        say(f"starting the ranks{'' if attempt is None else f', attempt {attempt}'}; the first step takes longest")
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            self.command(start),
            cwd=self.config.project,
            env=rank_environment(self.ranks, self.nodes, self.cores),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a signal to our process group is ours to pass on
        )
        self._watch_notices(stack)
        self._supervise()
        return self._ended()

    def _watch_notices(self, stack: ExitStack) -> None:
        """Start asking for notices, once; after the ranks, since its imports take a while."""
        if hasattr(self, "watcher"):
            return
        from trainer.reclaim.notices import Notice, Watcher

        def report(notice: Notice, deadline: float | None) -> None:
            self.inbox.post(Request(notice.want, notice.source, deadline))

        self.watcher = Watcher(self.config, report)
        self.watcher.start()
        stack.callback(self.watcher.stop)

    def _supervise(self) -> None:
        heartbeat = self.started + HEARTBEAT_S
        self.reported = self.overdue = self.started
        self.crash_seen: float | None = None
        descriptor = os.pidfd_open(self.process.pid)
        try:
            while self.process.poll() is None:
                pause = 0.5 if self.kill_at is None else min(0.5, self.kill_at - time.monotonic())
                self.inbox.wait(pause, descriptor)
                for request in self.inbox.take():
                    self._pass_on(request)
                self._hear_ranks()
                now = time.monotonic()
                if self.kill_at is not None and now >= self.kill_at:
                    self._kill("the platform kills next: ending the ranks before it does")
                if self.lease and self.lease.lost:
                    self._kill("another launcher has taken this run over")
                if self.crash_seen and now > self.crash_seen + LINGER_S:
                    self._kill("a rank has crashed and the others hang")
                self._look_for_stuck_step(now)
                if now > heartbeat:
                    heartbeat = now + HEARTBEAT_S
                    self._record("heartbeat")
                reap(self.process.pid)
        finally:
            os.close(descriptor)

    def _pass_on(self, request: Request) -> None:
        """Decide what the time that is left is enough for, and ask the ranks for it."""
        if request.want < Action.STOP:
            if not self.stop:
                say(f"{request.source}: saving early, training goes on")
                self._record_notice(request, "saving early")
                requests.post_request(self.runtime, request.want, request.source)
            return
        if self.stop:
            sooner = request.deadline is not None and (
                self.stop.deadline is None or request.deadline < self.stop.deadline
            )
            if not (sooner and request.want == Action.STOP):
                return
        now = time.monotonic()
        left = float("inf") if request.deadline is None else request.deadline - now
        margin = min(3.0, left / 4)
        usual = max((beat.usual_s for beat in requests.read_beats(self.runtime).values()), default=0.0)
        try:
            save_s, pending_s = self._save_times()
        except Exception as error:  # a record that cannot be read decides nothing: try to save
            say(f"the ledger does not tell how long a save takes ({type(error).__name__}: {error})")
            save_s, pending_s = None, 0.0
        steps = 2 if self.ranks.gpu else 1  # on GPUs what is agreed on is acted on one step later
        want, why = requests.decide(left - margin, steps * usual, save_s, pending_s)
        if self.nodes.count == 1 and requests.revoke_start(self.runtime):
            say(f"{request.source} before a new step was made: nothing to save")
            self.stop = request
            self._record_notice(request, "no step was made")
            self._kill("")
            return
        self.stop = request if not self.stop else Request(Action.STOP, request.source, request.deadline, False)
        requests.post_request(self.runtime, want, request.source, request.deadline, person=request.person)
        if request.deadline is not None:
            self.kill_at = request.deadline - max(0.5, min(2.0, left / 10))
        say(f"{request.source}: {why}")
        self._record_notice(request, why)

    def _save_times(self) -> tuple[float | None, float]:
        """Seconds of a save in this run (None: not measured), and until the one in flight is durable (0: none)."""
        events = read_ledger(self.config.run_dir)
        usual = save_time_s(events)
        attempt = self.ledger.attempt if self.ledger else max((event.get("attempt", 0) for event in events), default=0)
        mine = [event for event in events if event.get("attempt") == attempt]
        started = [event for event in mine if event.get("event") == "save_started"]
        over = {event.get("step") for event in mine if event.get("event") in ("save_committed", "save_failed")}
        if not started or started[-1].get("step") in over:
            return usual, 0.0
        return usual, max(0.1, (usual or 0.0) - (time.time() - started[-1]["time"]))

    def _hear_ranks(self) -> None:
        """Take up a request that came to a rank directly, and notice that a rank has crashed."""
        if self.crash_seen is None and self._broken():
            self.crash_seen = time.monotonic()
        asked = requests.read_request(self.runtime)
        if asked and not self.stop and self.crash_seen is None:
            _, source, deadline, person = asked
            self._pass_on(Request(Action.STOP, f"{source} to a rank", deadline, person))

    def _broken(self) -> bool:
        """Whether a rank has crashed: torchrun then signals the others, which is no reclaim."""
        if any(status["reason"] == Reason.CRASHED for status in self._statuses()):
            return True
        return not self._statuses() and any(not alive(pid) for pid in requests.rank_processes(self.runtime))

    def _look_for_stuck_step(self, now: float) -> None:
        beats = requests.read_beats(self.runtime).values()
        last = max((beat.moment for beat in beats), default=self.started)
        usual = max((beat.usual_s for beat in beats), default=0.0)
        if usual and now - last > max(OVERDUE_S, OVERDUE_TIMES * usual) and self.overdue != last and not self.stop:
            self.overdue = last
            say(f"step {self._last_step() + 1} has taken {now - last:.0f} s so far, {usual:.2g} s is usual")
        limit = self.config.restart.stuck_after_s
        if self.stop or now - max(last, self.reported) < limit:
            return
        self.reported = now
        step = f"step {self._last_step() + 1}" if beats else "the start"
        say(f"{step} has taken {now - last:.0f} s (restart.stuck_after_s is {limit:.0f}); every rank's stacks follow")
        self._record("stuck", seconds=round(now - last, 1), step=self._last_step())
        for pid in requests.rank_processes(self.runtime):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACKS)
        if self.config.restart.restart_stuck:
            self.inbox.wait(2.0)  # for the stacks to be written
            self._kill(f"{step} has taken {now - last:.0f} s: restarting (restart.restart_stuck)")

    def _kill(self, why: str) -> None:
        """SIGKILL torchrun, and with it (parent death) the ranks; their checkpoint daemons may end their save."""
        if why:
            say(why)
        self.killed_because = why
        processes = requests.rank_processes(self.runtime)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _ended(self) -> Ended:
        report: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            report = json.loads((self.runtime / REPORT).read_text())
        if self.lease and self.lease.lost:
            return Ended(Reason.UNAVAILABLE, self._last_step(), "another launcher has taken this run over")
        statuses = self._statuses()
        ended = translate(statuses, report, self.process.returncode or 0, self.ranks.count, self.stop)
        if ended.reason is Reason.CRASHED and self.killed_because and not self.crash_seen:
            ended = Ended(Reason.CRASHED, ended.step, self.killed_because)
        if ended.step == 0:
            made_steps = bool(requests.read_beats(self.runtime))
            step = self._last_step() if made_steps else self.newest_step()
            ended = Ended(ended.reason, step, ended.message, ended.outside)
        return ended

    def _statuses(self) -> list[dict[str, Any]]:
        """What the ranks of this node wrote at their end, first one first."""
        found = []
        for path in self.runtime.glob("status_*.json"):
            with contextlib.suppress(OSError, ValueError):
                found.append((path.stat().st_mtime, json.loads(path.read_text())))
        return [status for _, status in sorted(found, key=lambda one: one[0])]

    # -- the ledger ----------------------------------------------------------------------------------------------------

    def _record(self, event: str, **fields: Any) -> None:
        if self.ledger:
            self.ledger.record(event, **fields)

    def _record_notice(self, request: Request, decision: str) -> None:
        left = None if request.deadline is None else round(request.deadline - time.monotonic(), 1)
        self._record("reclaim_noticed", source=request.source, deadline_s=left, decision=decision)

    def _record_end(self, ended: Ended) -> None:
        message = {"message": ended.message} if ended.message else {}
        self._record("stopped", step=ended.step, reason=ended.reason, **message)
        if ended.reason is Reason.FINISHED:
            self._record("finished", step=ended.step)

    def _last_step(self) -> int:
        """The last step in the metrics, or of the newest checkpoint."""
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            path = self.config.run_dir / "metrics.jsonl"
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 8192))
                return int(json.loads(file.read().rstrip(b"\n").rpartition(b"\n")[2])["step"])
        return self.newest_step()
