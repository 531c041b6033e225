"""The recovery drill: what a lost GPU does to this project, rehearsed before it happens.

`python -m trainer drill`: (1) train on some ranks without an interruption, (2) train again and save, (3) SIGKILL
every process, (4) resume on another number of ranks, (5) compare the two runs step by step. The real launcher runs
the real loop; the runs have a folder of their own. On CPU ranks the model is a small one unless keys are given.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import psutil

from trainer.checkpoint import commit
from trainer.config.load import load_config
from trainer.config.settings import PROJECT, Config
from trainer.ledger import read_events
from trainer.machine.gpus import count_gpus
from trainer.outcome import FINISHED, ConfigError
from trainer.steps import Step, read_counting
from trainer.task import build_task
from trainer.wording import counted

_POLL_S = 0.02


class Tolerance(NamedTuple):
    """Largest relative difference between two runs that do the same sums in another order."""

    loss: float
    grad_norm: float
    state: float  # norm of a tensor's difference over the norm of the tensor
    why: str


EXACT = Tolerance(0.0, 0.0, 0.0, "by equality, bit for bit")
# A dropped optimizer state or another learning rate is off by 0.1 to 1 in `state`, in any precision.
_ORDER = "within tolerances: without train.reproducible the order of sums shows"
FP32 = Tolerance(loss=1e-5, grad_norm=1e-4, state=5e-3, why=f"{_ORDER} (fp32)")
BF16 = Tolerance(loss=1e-2, grad_norm=1e-1, state=5e-2, why=f"{_ORDER} (bf16)")


class Check(NamedTuple):
    """One line of the verdict."""

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Recovery:
    """What the interruption cost. Seconds from the SIGKILL; speed of steady steps in what the task counts."""

    killed_after_step: int
    resumed_from_step: int
    start_s: float  # until all ranks were there and the checkpoint was loaded
    first_step_s: float  # until the first new step was in the metrics
    load_s: float  # of start_s, the checkpoint
    units_per_s_before: float
    units_per_s_after: float


@dataclass(frozen=True)
class Runs:
    """Both runs, as they are on the disk, and the lines of their metrics that count."""

    whole: Config
    cut: Config
    expected: list[Step]
    found: list[Step]
    before: list[Step]  # of the interrupted run, until the SIGKILL
    recovery: Recovery


class RunFailed(Exception):
    """A run of the drill did not end as it should. One line."""


def drill(overrides: Sequence[str], *, save_ranks: int, resume_ranks: int, steps: int, output: Path | None) -> int:
    """Rehearse a recovery, print the verdict, write `drill.json` and `drill.png` into `output`.

    Returns:
        0 if the resumed run is the run that was never interrupted, else 1.

    Raises:
        ConfigError: more ranks than GPUs, or a setting that does not fit.
    """
    gpus = count_gpus()
    if 0 < gpus < max(save_ranks, resume_ranks):
        raise ConfigError(
            f"--save-ranks is {save_ranks}, --resume-ranks is {resume_ranks} and this machine has {gpus} GPUs; give "
            f"numbers up to {gpus}, or an empty CUDA_VISIBLE_DEVICES for a drill on CPU ranks"
        )
    output = (output or PROJECT / "drill").absolute()
    settings = _settings(overrides, steps, small=not gpus)
    train = load_config(settings).train  # refuses what does not fit now, not after minutes
    if train.reproducible != "false":  # a drill asks for it unless it is told otherwise
        tolerance = EXACT
    else:
        tolerance = FP32 if train.dtype == "float32" or (train.dtype == "auto" and not gpus) else BF16
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in ("drill.json", "drill.png"):  # of an earlier drill
            (output / name).unlink(missing_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="runs-", dir=output))
    except OSError as error:
        raise ConfigError(f"--output is {output} ({error.strerror}); it must be a folder that can be written") from None

    began, passed, written = time.monotonic(), False, "drill.json"
    verdict: dict[str, Any] = {"passed": False, "save_ranks": save_ranks, "resume_ranks": resume_ranks, "steps": steps}
    verdict |= {"device": "gpu" if gpus else "cpu", "overrides": list(overrides)}
    try:
        runs = _rehearse([*settings, f"checkpoint.dir={folder}"], save_ranks, resume_ranks, folder)
        resumed_from = runs.recovery.resumed_from_step
        click.echo(f"5. compared with the run that was never interrupted, {tolerance.why}")
        checks = compare_lines(runs.expected, runs.found, steps, tolerance)
        checks += compare_checkpoints(runs.whole.run_dir, runs.cut.run_dir, resumed_from, tolerance)
        _print(checks, runs.recovery, save_ranks, resume_ranks)
        _draw(runs, f"{save_ranks} → {resume_ranks} ranks", output / "drill.png")
        passed, written = all(check.passed for check in checks), "drill.json, drill.png"
        lost = [line for line in runs.before if line.step > resumed_from]  # they had to be done again
        verdict |= {"judged": tolerance.why, "checks": [check._asdict() for check in checks]}
        verdict["recovery"] = asdict(runs.recovery)
        for name, lines in (("uninterrupted", runs.expected), ("interrupted", runs.found), ("lost", lost)):
            verdict[name] = [asdict(line) for line in lines]
    except RunFailed as failure:
        click.echo(f"   {failure}")
        verdict["error"] = str(failure)
    verdict |= {"passed": passed, "seconds": round(time.monotonic() - began, 1)}
    (output / "drill.json").write_text(json.dumps(verdict, indent=1))

    word = click.style("PASSED", fg="green") if passed else click.style("FAILED", fg="red", bold=True)
    click.echo(f"{word} in {verdict['seconds']:.0f} s; in {output}: {written}")
    if passed:
        shutil.rmtree(folder)
    else:
        click.echo(f"the runs and their logs are kept in {folder}")
    return 0 if passed else 1


def _settings(overrides: Sequence[str], steps: int, small: bool) -> list[str]:
    """What both runs are started with: defaults, then what was given, then what makes it a drill."""
    given = {override.partition("=")[0] for override in overrides}
    defaults: dict[str, Any] = {"train.reproducible": "true"}
    if small:
        defaults |= build_task(load_config(overrides)).small
    fixed = {
        "train.steps": steps, "train.eval_every_steps": 0, "logging.tensorboard": "false", "nodes.count": 1,
        "checkpoint.every_steps": max(1, steps // 6), "checkpoint.retune": "false", "checkpoint.keep_last": steps,
        "volume.mount": "", "volume.allow_ephemeral": "true", "reclaim.notice": "none",
        "restart.max_crash_restarts": 0,
    }  # fmt: skip
    return [
        *(f"{key}={value}" for key, value in defaults.items() if key not in given),
        *overrides,
        *(f"{key}={value}" for key, value in fixed.items()),
    ]


def _rehearse(settings: Sequence[str], save_ranks: int, resume_ranks: int, folder: Path) -> Runs:
    """Steps 1 to 4. Raises RunFailed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves like Ctrl-C: through what ends the runs
    whole, cut = (load_config([*settings, f"run.name={name}"]) for name in ("uninterrupted", "interrupted"))
    click.echo(f"1. {whole.train.steps} steps on {counted(save_ranks, 'rank')} without an interruption")
    with _Run(settings, whole, save_ranks, folder / "uninterrupted.log") as run:
        run.wait()
    every = "every step" if whole.checkpoint.every_steps == 1 else f"every {whole.checkpoint.every_steps} steps"
    click.echo(f"2. the same again, saved {every}")
    with _Run(settings, cut, save_ranks, folder / "interrupted.log") as run:
        run.wait_for(lambda: _is_time_to_kill(cut))
        killed = time.time()
        processes = run.kill()
    before = read_counting(cut.run_dir)
    click.echo(f"3. SIGKILL to all {processes} processes after step {before[-1].step}")
    click.echo(f"4. resumed on {counted(resume_ranks, 'rank')}")
    with _Run(settings, cut, resume_ranks, folder / "resumed.log") as run:
        run.wait_for(lambda: read_counting(cut.run_dir)[-1].attempt > before[-1].attempt)
        first_step_s = time.time() - killed
        run.wait()
    found, events = read_counting(cut.run_dir), read_events(cut.run_dir)
    started = [event for event in events if event.event == "attempt_started"][-1]
    recovery = Recovery(
        killed_after_step=before[-1].step,
        resumed_from_step=started.step or 0,
        start_s=round(started.time - killed, 2),
        first_step_s=round(first_step_s, 2),
        load_s=next((event.load_s or 0.0 for event in reversed(events) if event.event == "resumed"), 0.0),
        units_per_s_before=_steady(before),
        units_per_s_after=_steady([line for line in found if line.attempt == started.attempt]),
    )
    return Runs(whole, cut, read_counting(whole.run_dir), found, before, recovery)


def _is_time_to_kill(config: Config) -> bool:
    """In the second third of the run, some steps after a checkpoint that will be resumed from."""
    every = config.checkpoint.every_steps
    saved = max((found.step for found in commit.complete(config.run_dir)), default=0)
    lines = read_counting(config.run_dir)
    return saved >= 2 * every and bool(lines) and lines[-1].step >= saved + max(1, every // 2)


def _steady(lines: Sequence[Step]) -> float:
    """Median units per second without the first two steps, which warm up."""
    return float(statistics.median(line.units_per_s for line in (lines[2:] or lines)))


class _Run:
    """The launcher, started on `ranks` ranks. Leaving the block ends whatever is left of it."""

    def __init__(self, settings: Sequence[str], config: Config, ranks: int, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "trainer", "launch", "--gpus", str(ranks), *settings]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, f"run.name={config.run_name}"],
                cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.kill()

    def wait(self) -> None:
        """Until it has finished."""
        if self.process.wait() != FINISHED:
            raise self._failed()

    def wait_for(self, event: Callable[[], bool]) -> None:
        """Until `event`; an end before it is a failure."""
        while not event():
            if self.process.poll() is not None:
                raise self._failed()
            time.sleep(_POLL_S)

    def kill(self) -> int:
        """SIGKILL to all of its processes, as when the machine is gone. Returns how many there were."""
        launcher = psutil.Process(self.process.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        psutil.wait_procs(processes[1:])
        return len(processes)

    def _failed(self) -> RunFailed:
        code = self.process.returncode
        if code == FINISHED:
            return RunFailed("the run was finished before it could be killed; give more --steps or a larger model")
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
        errors = [line for line in lines if re.match(r"(\[\d+\] ?)?[\w.]*(Error|Exception|Failed): ", line)]
        last = (errors or lines)[-1]
        return RunFailed(f"a run of the drill ended with exit code {code}: {last} (all of it: {self.log})")


def compare_lines(expected: Sequence[Step], found: Sequence[Step], steps: int, tolerance: Tolerance) -> list[Check]:
    """The metrics of the uninterrupted run against those that count of the interrupted one, step by step."""
    by_step = {line.step: line for line in found}
    missing = [step for step in range(1, steps + 1) if step not in by_step]
    once = not missing and len(found) == len(by_step) and len(expected) == steps
    text = f"{len(found)} of {steps} steps" + (f", missing {missing[:5]}" if missing else "")
    checks = [Check("every step once", once, text)]
    for name, what, limit in (
        ("batch_hash", "samples of each batch", 0.0),
        ("samples", "samples consumed", 0.0),
        ("lr", "learning rate", 0.0),
        ("loss", "loss", tolerance.loss),
        ("grad_norm", "gradient norm", tolerance.grad_norm),
    ):
        pairs = ((line, by_step[line.step]) for line in expected if line.step in by_step)
        values = ((line.step, getattr(line, name), getattr(other, name)) for line, other in pairs)
        off = [(step, one, other) for step, one, other in values if one != other]
        apart = [abs(other - one) / max(abs(one), 1e-30) if limit else math.inf for _, one, other in off]
        if not off:
            text = "equal at every step"
        elif limit:
            text = f"at most {max(apart):.1e} apart (limit {limit:.0e}), from step {off[0][0]} on"
        else:
            text = f"differs from step {off[0][0]} on: {off[0][1]} and {off[0][2]}"
        checks.append(Check(what, all(one <= limit for one in apart), text))  # NaN is not within a limit
    return checks


def compare_checkpoints(expected: Path, found: Path, resumed_from: int, tolerance: Tolerance) -> list[Check]:
    """Weights and optimizer state of every checkpoint that both runs have after the resume, tensor by tensor."""
    kinds = {"weights": "model.", "optimizer state": "optim."}
    saved, again = ({one.step for one in commit.complete(run_dir)} for run_dir in (expected, found))
    later = sorted(step for step in saved & again if step > resumed_from)
    if not later:
        return [Check(kind, False, f"no checkpoint after step {resumed_from} in both runs") for kind in kinds]
    return [_compare_tensors(kind, prefix, expected, found, later, tolerance.state) for kind, prefix in kinds.items()]


def _compare_tensors(kind: str, prefix: str, expected: Path, found: Path, steps: Sequence[int], limit: float) -> Check:
    """By the first step and tensor that is too far apart."""
    from trainer.checkpoint.dcp.reader import load_tensors

    worst, where, count = 0.0, "", 0
    for step in steps:
        (one, _), (other, _) = (load_tensors(run_dir, step, [prefix]) for run_dir in (expected, found))
        if odd := sorted(one.keys() ^ other.keys()):
            return Check(kind, False, f"step {step}: {odd[0]} is in one of the runs only ({len(odd)} such)")
        for name, tensor in one.items():
            if (tensor == other[name]).all():
                continue
            before, after = tensor.double(), other[name].double()
            apart = ((after - before).norm() / before.norm().clamp(min=1e-30)).item()
            if not apart <= (0 if name.endswith(".step") else limit):
                most = f" (limit {limit:.0e})" if limit else ""
                return Check(kind, False, f"step {step}: {name} is {apart:.1e} apart{most}")
            worst, where = max((worst, where), (apart, f"{name}, step {step}"))
        count = len(one)
    text = f"{counted(count, 'tensor')} of steps {', '.join(map(str, steps))}: "
    return Check(kind, True, text + ("equal" if worst == 0 else f"at most {worst:.1e} apart ({where})"))


def _print(checks: Sequence[Check], recovery: Recovery, save_ranks: int, resume_ranks: int) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = click.style("pass", fg="green") if check.passed else click.style("FAIL", fg="red", bold=True)
        click.echo(f"   {mark}  {check.name:<{width}}  {check.found}")
    lost = recovery.killed_after_step - recovery.resumed_from_step
    for line in (
        f"killed after step {recovery.killed_after_step}, resumed from step {recovery.resumed_from_step}: "
        f"{counted(lost, 'step')} done again",
        f"recovery {recovery.first_step_s:.1f} s from SIGKILL to the first new step: {recovery.start_s:.1f} s until "
        f"the ranks had loaded it ({recovery.load_s:.1f} s of them reading), "
        f"{recovery.first_step_s - recovery.start_s:.1f} s for the step",
        f"{recovery.units_per_s_before:,.0f} units/s on {counted(save_ranks, 'rank')} before, "
        f"{recovery.units_per_s_after:,.0f} on {resume_ranks} after",
    ):
        click.echo(f"   {line}")


def _draw(runs: Runs, title: str, path: Path) -> None:
    """Loss and gradient norm of both runs over the steps, the interruption marked."""
    from matplotlib.figure import Figure

    killed, resumed = runs.recovery.killed_after_step, runs.recovery.resumed_from_step
    dots = {"marker": "o", "markersize": 3.5}
    curves: list[tuple[list[Step], dict[str, Any]]] = [
        (runs.expected, {"color": "0.75", "linewidth": 6, "label": "never interrupted", "solid_capstyle": "round"}),
        (runs.before, {"color": "tab:blue", "label": "until SIGKILL", **dots}),
        ([line for line in runs.found if line.step > resumed], {"color": "tab:red", "label": "resumed", **dots}),
    ]
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, name in zip(panels, ("loss", "grad_norm"), strict=True):
        for lines, style in curves:
            axes.plot([line.step for line in lines], [getattr(line, name) for line in lines], **style)
        axes.axvline(killed, color="tab:blue", linestyle=":", linewidth=1)
        axes.axvline(resumed, color="tab:red", linestyle=":", linewidth=1)
        axes.axvspan(resumed, killed, color="tab:red", alpha=0.08, linewidth=0)
        axes.set_ylabel(name.replace("grad_", "gradient "))
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.02)
    panels[0].annotate(
        f"killed after step {killed},\nresumed from step {resumed}",
        (killed, 1), xycoords=("data", "axes fraction"), xytext=(6, -4),
        textcoords="offset points", va="top", fontsize=9,
    )  # fmt: skip
    panels[0].legend(frameon=False, loc="lower left")
    first_step_s = runs.recovery.first_step_s
    panels[0].set_title(f"Recovery drill, {title}: first new step {first_step_s:.1f} s after SIGKILL", loc="left")
    panels[1].set_xlabel("step")
    panels[1].xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=150)
