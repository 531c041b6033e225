"""The supervisor of one node: looks at the machine, starts the ranks, and starts them again after a crash.

`python -m trainer launch` imports no torch. Its exit code says what the platform should do: 0 finished, 75 start me
again (`restart.exit_reclaimed`), 78 change something first, 1 crashed too often.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from trainer.checkpoint import commit
from trainer.checkpoint.lease import Lease
from trainer.config.load import load_config
from trainer.config.settings import PROJECT, Config, RestartConfig
from trainer.data.plan import BatchPlan
from trainer.launch.attempt import Attempt, Node, saved_step, say
from trainer.launch.exit_reason import Ended
from trainer.launch.signals import Inbox, Stopped
from trainer.launch.spawn import rank_command
from trainer.ledger import Ledger, read_events, save_time_s
from trainer.machine.gpus import Ranks, count_gpus, decide_ranks, usable_cores
from trainer.machine.nodes import Nodes, find_nodes
from trainer.outcome import RECLAIMED, ConfigError, Reason, UnavailableError, exit_code
from trainer.processes import adopt_orphans, reap
from trainer.reclaim.request import Action
from trainer.storage import capacity, volume
from trainer.wording import counted

MOST_BACKOFF_S = 60.0


def launch(
    overrides: Sequence[str] = (),
    *,
    gpus: int | None = None,
    accepted: Sequence[str] = (),
    command: Callable[..., list[str]] = rank_command,
    project: Path = PROJECT,
) -> int:
    """Run this node until training is finished, is reclaimed, or has crashed too often.

    Args:
        gpus: ranks of this node; None counts the GPUs and follows `gpu.on_count_change`.
        command: the arguments of the interpreter that runs a rank.

    Returns:
        The exit code: 0, `restart.exit_reclaimed`, 78, or 1.
    """
    again = RECLAIMED
    with Inbox() as inbox:
        try:
            config = load_config(overrides, project)
            again, inbox.grace_s = config.restart.exit_reclaimed, config.reclaim.grace_s
            reason = _run(config, inbox, gpus, partial(command, overrides, accepted))
        except Stopped as stopped:
            say(f"{stopped} before a new step was made: nothing to save, exit {again}")
            reason = Reason.RECLAIMED
        except (ConfigError, UnavailableError) as error:
            reason = error.reason
            say(reason.line(str(error)))
        except OSError as error:
            reason = Reason.UNAVAILABLE
            say(reason.line(f"the volume or this machine fails ({error}); nothing was changed"))
        return exit_code(reason, again)


def _run(config: Config, inbox: Inbox, gpus: int | None, command: Callable[..., list[str]]) -> Reason:
    """Look at the volume and the machine, take the run's lease, and supervise the ranks."""
    for line in volume.prepare(config):
        say(line)
    saved = commit.complete(config.run_dir)
    if saved and saved[0].step >= config.train.steps:
        say(f"run {config.run_name} is finished: step {saved[0].step} of {config.train.steps} is saved")
        return Reason.FINISHED
    nodes = find_nodes(config.nodes)
    ranks = decide_ranks(gpus, count_gpus(), usable_cores(), config.gpu, config.run.provider)
    _show_plan(config, ranks, nodes)
    if saved:  # else rank 0 looks, once it has the model
        size, source = saved[0].bytes, f"as step {saved[0].step}"
        say(capacity.check_room(config, size, source, ranks.count, nodes.count, len(saved)))
    with ExitStack() as stack:
        runtime = Path(tempfile.mkdtemp(prefix="trainer-"))
        stack.callback(shutil.rmtree, runtime, ignore_errors=True)
        lease = ledger = None
        if nodes.is_first:
            lease = Lease.acquire(config.run_dir)
            stack.callback(lease.release)
            ledger = Ledger(config.run_dir, 0)
            stack.callback(ledger.close)
        adopt_orphans()
        node = Node(config, runtime, ranks, nodes, inbox, command, lease, ledger)
        _watch_notices(node, stack)
        return Supervisor(node).run()


def _show_plan(config: Config, ranks: Ranks, nodes: Nodes) -> None:
    plan = BatchPlan(config.data.global_batch, config.data.micro_batch, ranks.count * nodes.count)
    this = "one of them" if nodes.rank is None else f"number {nodes.rank}"
    where = "" if nodes.count == 1 else f" on each of {nodes.count} nodes (this is {this}, says {nodes.source})"
    say(f"{counted(ranks.count, 'GPU rank' if ranks.gpu else 'CPU rank')}{where}: {ranks.why}")
    say(plan.describe())
    if plan.padding_share > 0.25:
        say(
            f"warning: {plan.padding_share:.0%} of the work is padding; a data.global_batch of "
            f"{plan.world_size * plan.micro_batches_per_rank * plan.micro_batch} would cost the same"
        )


def _watch_notices(node: Node, stack: ExitStack) -> None:
    stop = threading.Event()
    stack.callback(stop.set)

    def watch() -> None:
        from trainer.reclaim.notices import watch  # here, since its imports take a while: the ranks start meanwhile

        watch(node.config, node.inbox.post, stop)

    threading.Thread(target=watch, name="notices", daemon=True).start()


class CrashBudget:
    """The restarts that are left after crashes; each new checkpoint restores all of them."""

    def __init__(self, settings: RestartConfig, saved: int) -> None:
        self._settings, self._saved = settings, saved
        self._before: tuple[int, str] | None = None  # step and last line of the crash before, where they are known
        self.used = 0

    def spend(self, crash: Ended, saved: int) -> str:
        """Take one restart. Returns why there is none, else an empty text.

        Args:
            saved: step of the newest complete checkpoint.
        """
        if saved > self._saved:
            self._saved, self._before, self.used = saved, None, 0
        this = None if crash.outside else (crash.step, crash.message.splitlines()[-1])
        if this is not None and this == self._before:
            return "it crashed in the same way at the same step, with no new checkpoint since"
        self._before = this
        if self.used >= self._settings.max_crash_restarts:
            return f"restart.max_crash_restarts is {self._settings.max_crash_restarts}"
        self.used += 1
        return ""

    @property
    def pause_s(self) -> float:
        """Before the restart that was taken."""
        return float(min(MOST_BACKOFF_S, self._settings.backoff_s * 2 ** (self.used - 1)))


class Supervisor:
    """Starts the ranks of `node`, over and over, until there is a reason to stop."""

    def __init__(self, node: Node) -> None:
        self.node, self.config, self.inbox = node, node.config, node.inbox

    def run(self) -> Reason:
        """Returns why this node stops. Raises Stopped where a request to stop came while no rank was running."""
        budget = CrashBudget(self.config.restart, saved_step(self.config.run_dir))
        while True:
            ended = self._attempt()
            step = saved_step(self.config.run_dir)
            if ended.reason is Reason.CRASHED and step >= self.config.train.steps:
                ended = Ended(Reason.FINISHED, step)  # and a rank crashed after that
            self._tell_end(ended, step)
            if ended.reason is not Reason.CRASHED:
                return ended.reason
            if why := budget.spend(ended, step):
                self._wait_for_daemons()
                step = saved_step(self.config.run_dir)
                say(f"giving up at step {ended.step}: {why}; step {step} is saved")
                return Reason.CRASHED
            most = self.config.restart.max_crash_restarts
            say(f"restart {budget.used} of {most} from step {step} in {budget.pause_s:.0f} s")
            self._pause(budget.pause_s)

    def _attempt(self) -> Ended:
        self.inbox.idle = True
        self._stop_if_asked()
        number = None
        if self.node.lease and self.node.ledger:
            self.node.ledger.attempt = number = self.node.lease.next_epoch()
        self.inbox.idle = False
        say(f"starting the ranks{'' if number is None else f', attempt {number}'}; the first step takes longest")
        return Attempt(self.node, number).supervise()

    def _tell_end(self, ended: Ended, saved: int) -> None:
        """To the ledger and the log; `saved` is the step of the newest checkpoint."""
        if self.node.ledger:
            self.node.ledger.record_end(ended.reason, ended.step, ended.message)
        if ended.reason is Reason.FINISHED:
            say(f"finished: step {ended.step} of {self.config.train.steps}")
        elif ended.reason is Reason.CRASHED:
            say(f"crashed: {ended.message}")
        elif ended.reason in (Reason.CONFIG, Reason.UNAVAILABLE):
            say(ended.reason.line(ended.message))
        else:
            lost = f", {counted(ended.step - saved, 'step')} lost" if ended.step > saved else ""
            again = self.config.restart.exit_reclaimed
            what = f"step {saved} is saved{lost}" if saved else f"no step was saved{lost}"
            say(f"{ended.reason}: {what}; start me again (exit {again})")
            if ended.message:
                say(f"while exiting: {ended.message}")

    # -- while no rank runs --------------------------------------------------------------------------------------------

    def _pause(self, seconds: float) -> None:
        """Before a restart: let the daemons of the dead ranks finish their save, and whatever broke recover."""
        self.inbox.idle = True
        until = time.monotonic() + seconds
        self._wait_for_daemons()
        while (left := until - time.monotonic()) > 0:
            self.inbox.wait(left)
            self._stop_if_asked()

    def _wait_for_daemons(self) -> None:
        """Wait for orphaned checkpoint daemons: twice the time of a save, at most its deadline."""
        usual_s = save_time_s(read_events(self.config.run_dir)) or 5.0
        until = time.monotonic() + min(self.config.checkpoint.deadline_s, 2 * usual_s + 5)
        while reap() and time.monotonic() < until:
            self.inbox.wait(0.1)
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """With no rank running, a request to stop is an exit. Raises Stopped."""
        for request in self.inbox.take():
            if request.action >= Action.STOP:
                self.node.record_notice(request, "no rank was running")
                raise Stopped(request.source)
