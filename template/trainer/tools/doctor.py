"""`python -m trainer doctor`: the checklist. Would a run on this machine survive an interruption?

Each check looks at one thing and says ok, warn (it will cost something) or fail (it will not work), and what to do.
What the launcher refuses is found by the launcher's own functions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import json
import math
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import click

from trainer.checkpoint import commit as commits
from trainer.config.fingerprint import compare_fingerprints, fingerprint
from trainer.config.load import load_config
from trainer.config.settings import CONFIG_FILE, PROJECT, STARTUP_FILE, Config
from trainer.data.plan import BatchPlan
from trainer.interval import IntervalError, compute_interval
from trainer.ledger import read_events, save_time_s
from trainer.machine import gpus, nodes
from trainer.machine.gpus import Ranks
from trainer.outcome import RECLAIMED, ConfigError, Damaged, UnavailableError
from trainer.reclaim import notices
from trainer.reclaim import request as requests
from trainer.storage import capacity, mount, volume
from trainer.storage.mount import Kind
from trainer.tools.report.account import read_account
from trainer.tools.report.advice import suggestions
from trainer.wording import counted, span

OLDEST_TORCH, FIRST_UNTRIED_TORCH = (2, 11), (2, 16)
_REQUIREMENTS = Path("startup/requirements.txt")
_READ_WHOLE_BYTES = 4 << 30  # a newest checkpoint up to this size is read and its checksums compared
_TIMED_BYTES = 128 << 20  # at most this much is written to estimate how long a save takes
_OVER_A_WRITE = 1.5  # a save against a plain write of its bytes
_DRILL_AGE_S = 90 * 86_400.0


class Check(NamedTuple):
    """One line of the checklist."""

    name: str
    text: str
    remedy: str = ""
    grade: Literal["ok", "warn", "fail"] = "ok"


ok = functools.partial(Check, grade="ok")
warn = functools.partial(Check, grade="warn")
fail = functools.partial(Check, grade="fail")


def doctor(overrides: Sequence[str], as_json: bool = False, project: Path = PROJECT) -> int:
    """Print the checklist. Returns the exit code: 0 if nothing fails, else 1."""
    found = list(examine(overrides, project))
    counts = {grade: sum(check.grade == grade for check in found) for grade in ("ok", "warn", "fail")}
    if as_json:
        click.echo(json.dumps({**counts, "checks": [check._asdict() for check in found]}, indent=2))
    else:
        width = max(len(check.name) for check in found)
        for check in found:
            click.echo(f"{check.grade:<4}  {check.name:<{width}}  {check.text}")
            if check.remedy:
                click.echo(f"{'':<6}{'':<{width}}  -> {check.remedy}")
        verdict = "not ready yet" if counts["fail"] else "ready to be interrupted"
        grades = f"{counted(counts['warn'], 'warning')}, {counted(counts['fail'], 'failure')}"
        click.echo(f"{verdict}: {counted(len(found), 'check')}, {grades}")
    return 1 if counts["fail"] else 0


def examine(overrides: Sequence[str], project: Path = PROJECT) -> Iterator[Check]:
    """Every check of the list, in its order; one that breaks is a failed check, not the end of the list."""
    try:
        config = load_config(overrides, project)
    except ConfigError as error:
        yield fail("configuration", str(error), "nothing else can be checked before that")
        return
    yield ok("configuration", f"{CONFIG_FILE} and {STARTUP_FILE} are valid; run {config.run_name!r}")
    for name, check in CHECKS.items():
        try:
            yield from check(config)
        except ConfigError as error:
            yield fail(name, str(error))
        except (UnavailableError, OSError) as error:
            yield fail(name, str(error), "see that the volume is attached and readable, then try again")


def check_storage(config: Config) -> Iterator[Check]:
    """Persistent, on the volume, able to rename and fsync, and large enough."""
    lines = volume.prepare(config)
    place, found = mount.inspect(config.run_dir), volume.probe(config.run_dir)
    lost = place.verdict == "FAIL" and config.run.provider != "local" and not config.volume.allow_ephemeral
    for line in lines:
        remedy = "put checkpoint.dir on a disk that outlives the machine, and name its mount in volume.mount"
        grade = fail if lost and place.why in line else warn
        yield grade("storage", line.removeprefix("warning: "), remedy)
    if not lines:
        yield ok("storage", f"{config.checkpoint_root} {place.why}")
    if not found.fsync:
        yield warn("commit", "this mount refuses fsync: a save may be lost with the machine just after it")
    elif found.rename_atomic:
        yield ok("commit", "a directory was written, synced and renamed there")
    else:
        yield ok("commit", "directories cannot be renamed atomically there: writing COMMIT.json last is the commit")
    yield _room("disk", config, functools.partial(capacity.check_disk, config))


def size_of_checkpoint(config: Config) -> tuple[int, str, int]:
    """Bytes of one checkpoint, where the figure is from, and how many complete ones there are.

    Raises ConfigError where there is none, and the task builds no model to estimate it from.
    """
    if found := commits.complete(config.run_dir):
        return found[0].bytes, f"as step {found[0].step}", len(found)
    try:
        from trainer.task import build_task, checkpoint_bytes

        return checkpoint_bytes(build_task(config)), "estimated from the model", 0
    except Exception as error:  # a task may raise anything, and the rest of the list is worth having
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"the model cannot be built to estimate a checkpoint ({what})") from None


def _room(name: str, config: Config, check: Callable[[int, str, int], str]) -> Check:
    """One of the launcher's checks of room as a line of the list."""
    try:
        size = size_of_checkpoint(config)
    except ConfigError as error:
        return warn(name, str(error))
    try:
        return ok(name, check(*size))
    except ConfigError as error:
        return fail(name, str(error))


def check_access(config: Config) -> Iterator[Check]:
    """Only owner and group may put a checkpoint there: DCP's metadata is a pickle, and checksums prove no author."""
    for directory in (config.checkpoint_root, config.run_dir):
        mode = directory.stat().st_mode if directory.is_dir() else 0
        if mode & stat.S_IWOTH:
            text = f"all users can write {directory} (mode {stat.S_IMODE(mode):04o}): "
            text += "a checkpoint that somebody else puts there can run code"
            if mount.inspect(directory).kind is Kind.OBJECT_STORE:  # the mount invents modes
                yield warn("access", text, "mount it with a umask")
            else:
                yield fail("access", text, f"chmod o-w {shlex.quote(str(directory))}")
            return
    yield ok("access", "only owner and group can write checkpoints")


def check_ranks(config: Config) -> Iterator[Check]:
    """The GPUs that are here against those that the configuration asks for; memory for the saves."""
    found = gpus.count_gpus()
    try:
        ranks = gpus.decide_ranks(None, found, gpus.usable_cores(), config.gpu, config.run.provider)
    except (ConfigError, UnavailableError) as error:
        remedy = f"gpu.count={found} is what this machine has" if found else "run.provider=local trains on CPU ranks"
        yield fail("gpus", str(error), remedy)
        ranks = Ranks(max(1, found), found > 0, "")
    else:
        if ranks.count == config.gpu.count:
            yield ok("gpus", ranks.why)
        else:
            yield warn("gpus", ranks.why, "the global batch stays; training is slower or faster by that")
    try:
        count = nodes.find_nodes(config.nodes).count
    except ConfigError as error:
        yield warn("nodes", str(error), "fine on a machine that is not one of the run's nodes")
        count = config.nodes.count
    plan = BatchPlan(config.data.global_batch, config.data.micro_batch, ranks.count * count)
    if plan.padding_share > 0.25:
        fits = plan.world_size * plan.micro_batches_per_rank * plan.micro_batch
        remedy = f"a data.global_batch of {fits} costs the same time (for a new run: it changes the numbers)"
        yield warn("batch", plan.describe(), remedy)
    else:
        yield ok("batch", plan.describe())
    yield _room(
        "memory", config, lambda size, source, _: capacity.check_memory(config, size, source, ranks.count, count)
    )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages(config: Config, installed: Callable[[str], str | None] = _installed) -> Iterator[Check]:
    """The torch that is installed, within the tested versions and equal to the pin; the other pins."""
    requirements = config.project / _REQUIREMENTS
    text = requirements.read_text() if requirements.is_file() else ""
    pins = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.M))
    if not pins:
        yield warn("pins", f"{_REQUIREMENTS} pins nothing", "pin every package, or versions change")
    version, pin, remedy = installed("torch"), pins.pop("torch", None), "bash startup/onstart.sh sets it up"
    oldest, untried = (".".join(map(str, limit)) for limit in (OLDEST_TORCH, FIRST_UNTRIED_TORCH))
    if version is None:
        yield fail("torch", "torch is not installed here", remedy)
    elif not OLDEST_TORCH <= tuple(map(int, re.findall(r"\d+", version)[:2])) < FIRST_UNTRIED_TORCH:
        yield fail("torch", f"torch {version} is installed; it must be >={oldest},<{untried}", remedy)
    elif pin is not None and pin.partition("+")[0] != version.partition("+")[0]:
        yield warn("torch", f"torch {version} is installed and {pin} is pinned in {_REQUIREMENTS}", remedy)
    else:
        yield ok("torch", f"torch {version}, " + ("as pinned" if pin else f"within >={oldest},<{untried}"))
    others = [f"{name} {found} ({pin})" for name, pin in pins.items() if (found := installed(name)) not in (None, pin)]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        yield warn("pins", f"other versions than pinned: {', '.join(others[:3])}{more}", remedy)
    elif pins:
        yield ok("pins", f"{counted(len(pins), 'other package')} pinned, and what is installed of them agrees")


def check_image(config: Config) -> Iterator[Check]:
    """The container image by digest: a tag can name another image tomorrow."""
    ref = config.image.ref
    if "@sha256:" in ref:
        yield ok("image", f"pinned by digest: {ref}")
    elif ref:
        remedy = f"docker buildx imagetools inspect {shlex.quote(ref)} shows its digest: image.ref NAME@sha256:DIGEST"
        yield warn("image", f"{ref} is a tag, which can move under the run", f"{remedy}, then image.allow_tag false")
    else:
        grade = ok if config.run.provider == "local" else warn
        yield grade("image", "no container image is named (image.ref)")


def check_interval(config: Config) -> Iterator[Check]:
    """An interval exists for the assumed figures, and the configured one lies between floor and ceiling."""
    settings = config.checkpoint
    try:
        plan = compute_interval(**settings.figures)
    except IntervalError as error:
        yield fail("interval", str(error), f"change these figures in {STARTUP_FILE}, checkpoint")
        return
    where = f"floor {plan.floor_steps}, optimum {plan.optimum_steps}, ceiling {plan.ceiling_steps}"
    if plan.floor_steps <= settings.every_steps <= plan.ceiling_steps:
        yield ok("interval", f"a save every {settings.every_steps} steps ({where})")
        return
    below = settings.every_steps < plan.floor_steps
    cost = "a save would not end before the next is due" if below else "more is lost than checkpoint.badput_target"
    remedy = f"checkpoint.every_steps={plan.save_interval_steps} follows from the figures"
    remedy += "; the run retunes it" if settings.retune else ""
    yield warn("interval", f"checkpoint.every_steps is {settings.every_steps}: {cost} ({where})", remedy)


def check_history(config: Config) -> Iterator[Check]:
    """The grace period against the time of a save; the assumptions against what the run measured."""
    found = read_account(config)
    save_s, source = save_time_s(read_events(config.run_dir)), "measured"
    if save_s is None:
        save_s, source = config.checkpoint.save_time_s, "assumed"
        with contextlib.suppress(ConfigError):
            if config.run_dir.is_dir():
                save_s = _OVER_A_WRITE * timed_write(config.run_dir, size_of_checkpoint(config)[0])
                source = "estimated from a write of that size"
    measured = {one.key: one.measured for one in found.assumptions if one.measured is not None}
    step_s = measured.get("checkpoint.step_time_s") or config.checkpoint.step_time_s
    yield check_grace(config, found.current_steps, step_s, save_s, source)
    if advice := suggestions(found, config.checkpoint, config.reclaim.grace_s):
        more = f", and {len(advice) - 1} more" if advice[1:] else ""
        yield warn("assumptions", advice[0] + more, "python -m trainer report shows what was measured")
    else:
        yield ok("assumptions", "what the run measured agrees with them" if measured else "nothing measured yet")


def timed_write(directory: Path, size: int) -> float:
    """Seconds to write `size` bytes into `directory` and sync them; a part of large ones stands for all."""
    part = os.urandom(min(size, _TIMED_BYTES))
    with tempfile.TemporaryFile(dir=directory) as file:
        begin = time.monotonic()
        file.write(part)
        file.flush()
        os.fsync(file.fileno())
        return (time.monotonic() - begin) * max(1.0, size / _TIMED_BYTES)


def check_grace(config: Config, every_steps: int, step: float, save: float, source: str) -> Check:
    """What a reclaim would cost, by the launcher's own decision; `step` and `save` in seconds."""
    grace_s = config.reclaim.grace_s
    left_s = requests.usable_s(grace_s)
    in_flight = math.ceil(save / step)  # steps made while a save is written
    figures = f"a save takes {span(save)} ({source}), the grace period is {grace_s:g} s"
    if requests.decide(left_s, step, save, save)[0] is requests.Action.STOP:
        return ok("grace", f"{figures}: no step is lost at a reclaim")
    if requests.decide(left_s, step, save, 0.0)[0] is requests.Action.STOP:
        return ok("grace", f"{figures}: no step is lost at a reclaim, up to {in_flight} while a save is being written")
    mean, most = every_steps // 2 + in_flight, every_steps + in_flight
    lost = f"a reclaim loses about {counted(mean, 'step')} ({span(mean * step)}), {most} at most"
    remedy = "a longer grace period where the platform has one (reclaim.grace_s says which), a notice source, "
    remedy += "or saves more often (checkpoint.every_steps)"
    return warn("grace", f"{figures}: too little for a last save; {lost}", remedy)


def check_notices(config: Config) -> Iterator[Check]:
    """What announces a reclaim can be reached."""
    kind, _, argument = config.reclaim.notice.partition(":")
    signals = "SIGTERM, SIGINT and SIGUSR1 stop the run cleanly"
    if kind == "auto" and config.run.provider in notices.CLOUDS:
        kind = config.run.provider
    if kind in notices.CLOUDS:
        if answers(kind):
            yield ok("notices", f"the metadata server of {kind} answers")
        else:
            text = f"the metadata server of {kind} does not answer: a reclaim comes without notice"
            remedy = "is this one of its machines? A container needs a hop limit of 2; reclaim.notice=none asks none"
            yield fail("notices", text, remedy)
    elif kind == "file":
        path = config.project / Path(argument).expanduser()
        if path.exists():
            yield fail("notices", f"{path} is there already: a start would stop at once", "remove it")
        elif not path.parent.is_dir():
            yield warn("notices", f"{path} cannot appear: there is no {path.parent}", "make that directory")
        else:
            yield ok("notices", f"a reclaim is announced by {path} appearing")
    elif kind == "command":
        yield _check_command(argument, config.project)
    elif kind == "none" or config.run.provider == "local":
        yield ok("notices", f"none are asked for; {signals}")
    else:
        with ThreadPoolExecutor(len(notices.CLOUDS)) as pool:
            found = list(itertools.compress(notices.CLOUDS, pool.map(answers, notices.CLOUDS)))
        said = f"the metadata server of {found[0]} answers" if found else "no metadata server answers, signals only"
        yield ok("notices", f"{said}; {signals}")


def answers(kind: str) -> bool:
    """Whether the metadata server of `kind` is there."""
    try:
        return notices.CLOUDS[kind]().present()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _check_command(command: str, directory: Path) -> Check:
    try:
        shell, quiet = ["sh", "-c", command], subprocess.DEVNULL
        code = subprocess.run(shell, cwd=directory, stdin=quiet, stdout=quiet, stderr=quiet, timeout=10).returncode
    except subprocess.TimeoutExpired:
        return warn("notices", f"{command!r} takes more than 10 s", "a notice would come late: make it faster")
    if code == 0:
        return fail("notices", f"{command!r} exits with 0, a reclaim now", "it must fail until there is one")
    if code in (126, 127):
        return fail("notices", f"{command!r} cannot be run (exit {code})", "name a command that is there")
    return ok("notices", f"{command!r} runs, and sees no reclaim (exit {code})")


def check_exit_codes(config: Config) -> Iterator[Check]:
    """Whether the files in deploy/ know the code that means "start me again"."""
    code = config.restart.exit_reclaimed
    files = sorted(path for path in (config.project / "deploy").rglob("*") if path.is_file())
    known = [path for path in files if re.search(rf"\b{RECLAIMED}\b", path.read_text(errors="replace"))]
    if code != RECLAIMED and known:
        shown = ", ".join(str(path.relative_to(config.project)) for path in known[:4])
        remedy = f"put {code} there too, or leave it at {RECLAIMED}"
        yield warn("exit codes", f"restart.exit_reclaimed is {code} and {shown} know {RECLAIMED}", remedy)
    else:
        yield ok("exit codes", f"0 finished, {code} start again, 78 do not start again")
    if shutil.which("bash") is None:
        yield fail("exit codes", "there is no bash here, which startup/onstart.sh is started with", "install it")


def check_checkpoints(config: Config) -> Iterator[Check]:
    """The newest complete checkpoint is whole, and this configuration may go on from it."""
    complete, quarantined = commits.complete(config.run_dir), commits.quarantined(config.run_dir)
    if quarantined:
        text = f"{counted(len(quarantined), 'damaged checkpoint')} quarantined, such as {quarantined[-1].name}"
        yield warn("damage", text, "look at the disk, then delete them")
    accounted = {*quarantined, *(one.directory for one in complete)}
    broken = [path for path in commits.directories(config.run_dir) if path not in accounted]
    if broken:
        yield warn("damage", f"{broken[0].name} is incomplete or damaged", "python -m trainer checkpoints verify")
    if not complete:
        if quarantined or broken:
            yield fail("checkpoint", "no complete checkpoint is left: a start would be refused")
        else:
            yield ok("checkpoint", "none yet")
        return
    newest, begin = complete[0], time.monotonic()
    try:
        if newest.bytes > _READ_WHOLE_BYTES:
            commits.check_file(newest, newest.metadata)
            how = "its sizes and metadata are right; `python -m trainer checkpoints verify` reads the rest"
        else:
            commits.verify(newest)
            how = f"read whole in {span(time.monotonic() - begin)}, every checksum matches"
    except Damaged as damage:
        older = f"the next start quarantines it and goes on from step {complete[1].step}" if complete[1:] else ""
        yield fail("checkpoint", f"the newest is damaged: {damage}", older or "no other is left")
        return
    yield ok("checkpoint", f"step {newest.step}, {span(max(0.0, time.time() - newest.time))} old: {how}")
    try:
        warnings = compare_fingerprints(newest.fingerprint, fingerprint(config))
    except ConfigError as error:
        yield fail("resume", str(error))
    else:
        yield warn("resume", "; ".join(warnings)) if warnings else ok("resume", "this configuration may go on from it")


def check_drill(config: Config) -> Iterator[Check]:
    """The last recovery drill passed, and not too long ago."""
    verdict = config.project / "drill" / "drill.json"
    remedy = "python -m trainer drill rehearses a recovery in a few minutes"
    try:
        found = json.loads(verdict.read_text())
        passed, age_s = found["passed"], max(0.0, time.time() - verdict.stat().st_mtime)
    except FileNotFoundError:
        yield warn("drill", "recovery was never rehearsed here", remedy)
        return
    except (ValueError, TypeError, KeyError):
        yield warn("drill", f"{verdict} is not a drill report", remedy)
        return
    what = f"the last drill, {found.get('save_ranks', '?')} -> {found.get('resume_ranks', '?')} ranks,"
    if not passed:
        failed = ", ".join(check["name"] for check in found.get("checks", []) if not check["passed"])
        yield fail("drill", f"{what} failed: {failed or 'see'} ({verdict})", "fix that, then repeat the drill")
    elif age_s > _DRILL_AGE_S:
        yield warn("drill", f"{what} passed {span(age_s)} ago", remedy)
    else:
        yield ok("drill", f"{what} passed {span(age_s)} ago")


def check_secrets(config: Config) -> Iterator[Check]:
    """`.env`, where keys and passwords belong, can be read by its owner alone."""
    env = config.project / ".env"
    mode = stat.S_IMODE(env.stat().st_mode) if env.is_file() else 0
    if mode & 0o077:
        yield fail("secrets", f".env can be read by others (mode {mode:04o})", "chmod 600 .env")
    else:
        yield ok("secrets", "only its owner can read .env" if mode else "there is no .env")


CHECKS: dict[str, Callable[[Config], Iterator[Check]]] = {  # a check that breaks is a failure of this name
    "storage": check_storage, "access": check_access, "gpus": check_ranks, "torch": check_packages,
    "image": check_image, "interval": check_interval, "grace": check_history, "notices": check_notices,
    "exit codes": check_exit_codes, "checkpoint": check_checkpoints, "drill": check_drill, "secrets": check_secrets,
}  # fmt: skip
