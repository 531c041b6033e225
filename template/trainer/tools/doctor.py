"""`python -m trainer doctor`: the checklist. Are this machine and this configuration fit for being interrupted?

Each check looks at one thing and returns one or more `Check`s: ok, warn (it will cost something) or fail (it will not
work), with what to do. What the launcher refuses is found by the launcher's own functions, not by a second opinion.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
from trainer.tools.report.account import Account, read_account
from trainer.tools.report.advice import suggestions
from trainer.wording import span

OLDEST_TORCH, FIRST_UNTRIED_TORCH = (2, 11), (2, 16)
_REQUIREMENTS = Path("startup/requirements.txt")
_READ_WHOLE_BYTES = 4 << 30  # a newest checkpoint up to this size is read and its checksums compared
_TIMED_BYTES = 128 << 20  # at most this much is written to estimate how long a save takes
_OVER_A_WRITE = 1.5  # a save against a plain write of its bytes
_DRILL_AGE_S = 90 * 86_400.0


@dataclass(frozen=True)
class Check:
    """One line of the checklist."""

    name: str
    grade: Literal["ok", "warn", "fail"]
    text: str
    remedy: str = ""


def doctor(overrides: Sequence[str], as_json: bool = False, project: Path = PROJECT) -> int:
    """Print the checklist. Returns the exit code: 0 if nothing fails, else 1."""
    found = list(examine(overrides, project))
    counts = {grade: sum(check.grade == grade for check in found) for grade in ("ok", "warn", "fail")}
    if as_json:
        click.echo(json.dumps({**counts, "checks": [dataclasses.asdict(check) for check in found]}, indent=2))
    else:
        click.echo("\n".join(to_text(found)))
    return 1 if counts["fail"] else 0


def examine(overrides: Sequence[str], project: Path = PROJECT) -> Iterator[Check]:
    """Every check of the list, in its order; one that breaks is a failed check, not the end of the list."""
    try:
        config = load_config(overrides, project)
    except ConfigError as error:
        yield Check("configuration", "fail", str(error), "until then nothing else can be checked")
        return
    yield Check("configuration", "ok", f"{CONFIG_FILE} and {STARTUP_FILE} are understood; run {config.run_name!r}")
    checks: list[Callable[[], Iterable[Check]]] = [
        lambda: check_storage(config),
        lambda: check_access(config),
        lambda: check_ranks(config),
        lambda: check_packages(project / _REQUIREMENTS, _installed),
        lambda: check_image(config),
        lambda: check_interval(config),
        lambda: check_history(config),
        lambda: check_notices(config),
        lambda: check_exit_codes(config),
        lambda: check_checkpoints(config),
        lambda: check_drill(project / "drill" / "drill.json", time.time()),
        lambda: check_secrets(project),
    ]
    for check in checks:
        try:
            yield from check()
        except ConfigError as error:
            yield Check("configuration", "fail", str(error))
        except (UnavailableError, OSError) as error:
            yield Check("access", "fail", str(error), "see that the volume is attached and readable, then try again")


def to_text(found: Sequence[Check]) -> list[str]:
    """The checklist for a terminal."""
    width = max(len(check.name) for check in found)
    lines = []
    for check in found:
        lines.append(f"{check.grade:<4}  {check.name:<{width}}  {check.text}")
        if check.remedy:
            lines.append(f"{'':<6}{'':<{width}}  -> {check.remedy}")
    warned, failed = (sum(check.grade == grade for check in found) for grade in ("warn", "fail"))
    verdict = "fit for being interrupted" if not failed else "not fit yet"
    return [*lines, f"{verdict}: {len(found)} checks, {warned} warnings, {failed} failures"]


# ---------------------------------------------------------------------------------------------------------------------
# The disk


def check_storage(config: Config) -> Iterator[Check]:
    """Persistent, on the volume, able to rename and fsync, and roomy enough."""
    try:
        lines = volume.prepare(config)
        place, found = mount.inspect(config.run_dir), volume.probe(config.run_dir)
    except (ConfigError, UnavailableError) as error:
        yield Check("storage", "fail", str(error))
        return
    lost = place.verdict == "FAIL" and config.run.provider != "local" and not config.volume.allow_ephemeral
    warnings = [line.removeprefix("warning: ") for line in lines]
    remedy = "put checkpoint.dir on a disk that outlives the machine, and name its mount in volume.mount"
    for line in warnings:
        yield Check("storage", "fail" if lost and place.why in line else "warn", line, remedy)
    if not warnings:
        yield Check("storage", "ok", f"{config.checkpoint_root} {place.why}")
    if not found.fsync:
        yield Check("commit", "warn", "this mount refuses fsync: a save may be lost with the machine just after it")
    elif found.rename_atomic:
        yield Check("commit", "ok", "a directory was written, synced and renamed there")
    else:
        yield Check("commit", "ok", "directories do not rename atomically there: COMMIT.json last is the commit")
    size, source, complete = size_of_checkpoint(config)
    yield _refusal("disk", lambda: capacity.check_disk(config, size, source, complete))


def size_of_checkpoint(config: Config) -> tuple[int, str, int]:
    """Bytes of one checkpoint, where the figure is from, and how many complete ones there are."""
    found = commits.complete(config.run_dir)
    if found:
        return found[0].bytes, f"as step {found[0].step}", len(found)
    from trainer.task import build_task, checkpoint_bytes

    return checkpoint_bytes(build_task(config)), "estimated from the model", 0


def _refusal(name: str, check: Callable[[], str]) -> Check:
    """A check of the launcher as a line of the list."""
    try:
        return Check(name, "ok", check())
    except ConfigError as error:
        return Check(name, "fail", str(error))


def check_access(config: Config) -> Iterator[Check]:
    """Nobody else may put a checkpoint there: DCP's metadata is a pickle, and checksums prove no author."""
    for directory in dict.fromkeys((config.checkpoint_root, config.run_dir)):
        if not directory.is_dir():
            continue
        mode = directory.stat().st_mode
        if mode & stat.S_IWOTH:
            made_up = mount.inspect(directory).kind is Kind.OBJECT_STORE
            yield Check(
                "access",
                "warn" if made_up else "fail",
                f"everybody can write {directory} (mode {stat.S_IMODE(mode):04o}): a planted checkpoint runs code",
                "mount it with a umask" if made_up else f"chmod o-w {shlex.quote(str(directory))}",
            )
            return
    yield Check("access", "ok", "nobody but owner and group can write checkpoints")


# ---------------------------------------------------------------------------------------------------------------------
# The machine


def check_ranks(config: Config) -> Iterator[Check]:
    """The GPUs that are here against those that the configuration asks for; memory for the saves."""
    found = gpus.count_gpus()
    try:
        ranks = gpus.decide_ranks(None, found, gpus.usable_cores(), config.gpu, config.run.provider)
    except (ConfigError, UnavailableError) as error:
        remedy = f"gpu.count={found} is what this machine has" if found else "run.provider=local trains on CPU ranks"
        yield Check("gpus", "fail", str(error), remedy)
        ranks = Ranks(max(1, found), found > 0, "")
    else:
        changed = ranks.count != config.gpu.count
        remedy = "the global batch stays; training is slower or faster by that" if changed else ""
        yield Check("gpus", "warn" if changed else "ok", ranks.why, remedy)
    try:
        count = nodes.find_nodes(config.nodes).count
    except ConfigError as error:
        yield Check("nodes", "warn", str(error), "fine on a machine that is not one of the run's nodes")
        count = config.nodes.count
    plan = BatchPlan(config.data.global_batch, config.data.micro_batch, ranks.count * count)
    wasted = plan.padding_share > 0.25
    fits = plan.world_size * plan.micro_batches_per_rank * plan.micro_batch
    yield Check(
        "batch",
        "warn" if wasted else "ok",
        plan.describe(),
        f"a data.global_batch of {fits} costs the same time (for a new run: it changes the numbers)" if wasted else "",
    )
    size, source, _ = size_of_checkpoint(config)
    yield _refusal("memory", lambda: capacity.check_memory(config, size, source, ranks.count, count))


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages(requirements: Path, installed: Callable[[str], str | None]) -> Iterator[Check]:
    """The torch that is installed, in the range that is tried and equal to the pin; the other pins.

    Args:
        installed: the version of a package, None where it is not there.
    """
    pins = read_pins(requirements)
    if not pins:
        yield Check("pins", "warn", f"{_REQUIREMENTS} pins nothing", "another day another torch: pin every package")
    version, remedy = installed("torch"), "bash startup/onstart.sh sets the environment up"
    wanted = f">={_dotted(OLDEST_TORCH)},<{_dotted(FIRST_UNTRIED_TORCH)}"
    pin = pins.pop("torch", None)
    if version is None:
        yield Check("torch", "fail", "torch is not installed here", remedy)
    elif not OLDEST_TORCH <= release(version) < FIRST_UNTRIED_TORCH:
        yield Check("torch", "fail", f"torch {version} is installed; it must be {wanted}", remedy)
    elif pin is not None and pin.partition("+")[0] != version.partition("+")[0]:
        yield Check("torch", "warn", f"torch {version} is installed and {pin} is pinned in {_REQUIREMENTS}", remedy)
    else:
        yield Check("torch", "ok", f"torch {version}, as pinned" if pin else f"torch {version}, within {wanted}")
    others = {name: found for name, pin in pins.items() if (found := installed(name)) not in (None, pin)}
    if others:
        shown = ", ".join(f"{name} {found} ({pins[name]})" for name, found in list(others.items())[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        yield Check("pins", "warn", f"other versions than pinned: {shown}{more}", remedy)
    elif pins:
        yield Check("pins", "ok", f"{len(pins)} other packages are pinned, and what is installed of them agrees")


def read_pins(requirements: Path) -> dict[str, str]:
    """Package -> version of the lines `name==version` of a requirements file; none where there is no file."""
    if not requirements.is_file():
        return {}
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", requirements.read_text(), re.M))


def release(version: str) -> tuple[int, ...]:
    """Major and minor of `2.13.0+cpu`."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_image(config: Config) -> Iterator[Check]:
    """The container image by digest: a tag can name another image tomorrow."""
    ref = config.image.ref
    if "@sha256:" in ref:
        yield Check("image", "ok", f"pinned by digest: {ref}")
    elif not ref:
        local = config.run.provider == "local"
        yield Check("image", "ok" if local else "warn", "no container image is named (image.ref)")
    else:
        yield Check(
            "image",
            "warn",
            f"{ref} is a tag, which can move under the run",
            f"docker buildx imagetools inspect {shlex.quote(ref)} shows its digest: image.ref NAME@sha256:DIGEST, "
            f"then image.allow_tag false",
        )


# ---------------------------------------------------------------------------------------------------------------------
# The plan


def check_interval(config: Config) -> Iterator[Check]:
    """An interval exists for the assumed figures, and the configured one lies between floor and ceiling."""
    settings = config.checkpoint
    try:
        plan = compute_interval(
            settings.mtbi_s, settings.step_time_s, settings.save_time_s, settings.save_stall_s,
            settings.restart_time_s, settings.badput_target,
        )  # fmt: skip
    except IntervalError as error:
        yield Check("interval", "fail", str(error), f"change these figures in {STARTUP_FILE}, checkpoint")
        return
    where = f"floor {plan.floor_steps}, optimum {plan.optimum_steps}, ceiling {plan.ceiling_steps}"
    if plan.floor_steps <= settings.every_steps <= plan.ceiling_steps:
        yield Check("interval", "ok", f"a save every {settings.every_steps} steps ({where})")
        return
    below = settings.every_steps < plan.floor_steps
    cost = "a save would not be done before the next is due" if below else "more is lost than checkpoint.badput_target"
    yield Check(
        "interval",
        "warn",
        f"checkpoint.every_steps is {settings.every_steps}: {cost} ({where})",
        f"checkpoint.every_steps={plan.save_interval_steps} follows from the figures"
        + ("; the run retunes it" if settings.retune else ""),
    )


def check_history(config: Config) -> Iterator[Check]:
    """The grace period against the time of a save; the assumptions against what the run measured."""
    found = read_account(config)
    save_s, source = save_time_s(read_events(config.run_dir)), "measured"
    if save_s is None and not config.run_dir.is_dir():
        save_s, source = config.checkpoint.save_time_s, "assumed"
    elif save_s is None:
        size, _, _ = size_of_checkpoint(config)
        save_s, source = _OVER_A_WRITE * timed_write(config.run_dir, size), "estimated from a write of that size"
    step_s = next(one.measured for one in found.assumptions if one.key == "checkpoint.step_time_s")
    yield check_grace(config, found.current_steps, step_s or config.checkpoint.step_time_s, save_s, source)
    yield from _check_assumptions(config, found)


def timed_write(directory: Path, size: int) -> float:
    """Seconds to write `size` bytes into `directory` and sync them; a part of large ones stands for all."""
    part = min(max(size, 1), _TIMED_BYTES)
    block = os.urandom(min(part, 1 << 20))
    with tempfile.TemporaryFile(dir=directory) as file:
        begin = time.monotonic()
        for _ in range(-(-part // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return (time.monotonic() - begin) * max(1.0, size / part)


def check_grace(config: Config, every_steps: int, step: float, save: float, source: str) -> Check:
    """What a reclaim would cost, by the launcher's own decision.

    Args:
        step, save: seconds of a step and of a save until it is durable.
        source: where the latter is from.
    """
    grace_s = config.reclaim.grace_s
    left_s = grace_s - min(3.0, grace_s / 4)  # the launcher's margin
    in_flight = math.ceil(save / step)  # steps made while a save is written
    figures = f"a save takes {span(save)} ({source}), the grace period is {grace_s:g} s"
    if requests.decide(left_s, step, save, save)[0] is requests.Action.STOP:
        return Check("grace", "ok", f"{figures}: no step is lost at a reclaim")
    if requests.decide(left_s, step, save, 0.0)[0] is requests.Action.STOP:
        return Check(
            "grace",
            "ok",
            f"{figures}: no step is lost at a reclaim, up to {in_flight} when a save is just being written",
        )
    mean, most = every_steps // 2 + in_flight, every_steps + in_flight
    return Check(
        "grace",
        "warn",
        f"{figures}: too little for a last save; a reclaim loses about {mean} steps ({span(mean * step)}), "
        f"{most} at most",
        "a longer grace period where the platform has one (requests.grace_s says which), a notice source, "
        "or saves more often (checkpoint.every_steps)",
    )


def _check_assumptions(config: Config, found: Account) -> Iterator[Check]:
    if not any(one.measured is not None for one in found.assumptions):
        yield Check("assumptions", "ok", "nothing measured yet")
        return
    advice = suggestions(found, config.checkpoint, config.reclaim.grace_s)
    if advice:
        more = f", and {len(advice) - 1} more" if advice[1:] else ""
        yield Check("assumptions", "warn", advice[0] + more, "python -m trainer report shows what was measured")
    else:
        yield Check("assumptions", "ok", "what the run measured agrees with them")


# ---------------------------------------------------------------------------------------------------------------------
# The reclaim

_SERVERS: dict[str, type[notices.Aws] | type[notices.Gcp] | type[notices.Azure] | type[notices.Alibaba]] = {
    "aws": notices.Aws,
    "gcp": notices.Gcp,
    "azure": notices.Azure,
    "alibaba": notices.Alibaba,
}


def check_notices(config: Config) -> Iterator[Check]:
    """Whatever is to announce a reclaim answers."""
    kind, _, argument = config.reclaim.notice.partition(":")
    if kind == "auto" and config.run.provider in _SERVERS:
        kind = config.run.provider
    if kind in _SERVERS:
        if answers(kind):
            yield Check("notices", "ok", f"the metadata server of {kind} answers")
        else:
            yield Check(
                "notices",
                "fail",
                f"the metadata server of {kind} does not answer: a reclaim comes without notice",
                "is this one of its machines? A container needs a hop limit of 2; requests.notice=none does without",
            )
    elif kind == "file":
        yield _check_file(config.project / Path(argument).expanduser())
    elif kind == "command":
        yield _check_command(argument, config.project)
    elif kind == "none" or config.run.provider == "local":
        yield Check("notices", "ok", "none are asked for; SIGTERM, SIGINT and SIGUSR1 stop the run cleanly")
    else:
        with ThreadPoolExecutor(len(_SERVERS)) as pool:
            found = [name for name, there in zip(_SERVERS, pool.map(answers, _SERVERS), strict=True) if there]
        said = f"the metadata server of {found[0]} answers" if found else "no metadata server answers, signals only"
        yield Check("notices", "ok", f"{said}; SIGTERM, SIGINT and SIGUSR1 stop the run cleanly")


def answers(kind: str) -> bool:
    """Whether the metadata server of `kind` is there."""
    try:
        return _SERVERS[kind]().present()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _check_file(path: Path) -> Check:
    if path.exists():
        return Check("notices", "fail", f"{path} is there already: a start would stop at once", "remove it")
    if not path.parent.is_dir():
        return Check("notices", "warn", f"{path} cannot appear: there is no {path.parent}", "make that directory")
    return Check("notices", "ok", f"a reclaim is announced by {path} appearing")


def _check_command(command: str, directory: Path) -> Check:
    try:
        code = subprocess.run(
            ["sh", "-c", command],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=10,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return Check("notices", "warn", f"{command!r} takes more than 10 s", "a notice would come late: make it quick")
    if code == 0:
        return Check("notices", "fail", f"{command!r} exits with 0, a reclaim now", "it must fail until there is one")
    if code in (126, 127):
        return Check("notices", "fail", f"{command!r} cannot be run (exit {code})", "name a command that is there")
    return Check("notices", "ok", f"{command!r} runs, and sees no reclaim (exit {code})")


def check_exit_codes(config: Config) -> Iterator[Check]:
    """What the platform's files make of the code that means "start me again"."""
    code = config.restart.exit_reclaimed
    deploy = config.project / "deploy"
    named = [path for path in _texts(deploy) if re.search(rf"\b{RECLAIMED}\b", path.read_text(errors="replace"))]
    if code != RECLAIMED and named:
        shown = ", ".join(str(path.relative_to(config.project)) for path in named[:4])
        yield Check(
            "exit codes",
            "warn",
            f"restart.exit_reclaimed is {code} and {shown} know {RECLAIMED}",
            f"put {code} there too, or leave it at {RECLAIMED}",
        )
    else:
        yield Check("exit codes", "ok", f"0 finished, {code} start again, 78 do not start again")
    if shutil.which("bash") is None:
        yield Check("exit codes", "fail", "there is no bash here, which restart.sh needs", "install it")


# ---------------------------------------------------------------------------------------------------------------------
# What there is already


def check_checkpoints(config: Config) -> Iterator[Check]:
    """The newest complete checkpoint is whole, and this configuration may go on from it."""
    run_dir = config.run_dir
    if remains := commits.remains(run_dir):
        yield Check(
            "damage",
            "warn",
            f"{len(remains)} checkpoints were set aside as damaged, such as {remains[-1].name}",
            "look at the disk, then delete them",
        )
    complete = commits.complete(run_dir)
    broken = [path for path in commits.directories(run_dir) if path not in [one.directory for one in complete]]
    broken = [path for path in broken if path not in remains]
    if broken:
        yield Check(
            "damage", "warn", f"{broken[0].name} is incomplete or damaged", "python -m trainer checkpoints verify"
        )
    if not complete:
        begun = bool(remains or broken)
        text = "no complete checkpoint is left: a start would be refused" if begun else "none yet"
        yield Check("checkpoint", "fail" if begun else "ok", text)
        return
    newest = complete[0]
    age = span(max(0.0, time.time() - newest.time))
    try:
        if newest.bytes <= _READ_WHOLE_BYTES:
            begin = time.monotonic()
            commits.verify(newest)
            how = f"read whole in {span(time.monotonic() - begin)}, every checksum holds"
        else:
            commits.check_file(newest, newest.metadata)
            how = "its sizes and metadata hold; `python -m trainer checkpoints verify` reads the rest"
    except Damaged as damage:
        yield Check(
            "checkpoint",
            "fail",
            f"the newest is damaged: {damage}",
            f"the next start sets it aside and goes on from step {complete[1].step}"
            if complete[1:]
            else "no other is left",
        )
        return
    yield Check("checkpoint", "ok", f"step {newest.step}, {age} old: {how}")
    try:
        warnings = compare_fingerprints(newest.fingerprint, fingerprint(config))
    except ConfigError as error:
        yield Check("resume", "fail", str(error))
    else:
        yield Check(
            "resume", "warn" if warnings else "ok", "; ".join(warnings) or "this configuration may go on from it"
        )


def check_drill(verdict: Path, now: float) -> Iterator[Check]:
    """The last recovery drill passed, and not too long ago."""
    rehearse = "python -m trainer drill rehearses a recovery in a few minutes"
    try:
        found = json.loads(verdict.read_text())
        age_s = now - verdict.stat().st_mtime
    except FileNotFoundError:
        yield Check("drill", "warn", "recovery was never rehearsed here", rehearse)
        return
    except ValueError:
        yield Check("drill", "warn", f"{verdict} cannot be understood", rehearse)
        return
    if not isinstance(found, dict) or not isinstance(found.get("passed"), bool):
        yield Check("drill", "warn", f"{verdict} is no drill's", rehearse)
        return
    what = f"the last drill, {found.get('save_ranks', '?')} -> {found.get('resume_ranks', '?')} ranks,"
    if not found["passed"]:
        failed = ", ".join(check["name"] for check in found.get("checks", []) if not check["passed"])
        yield Check("drill", "fail", f"{what} failed: {failed or 'see'} ({verdict})", "mend that, then drill again")
    elif age_s > _DRILL_AGE_S:
        yield Check("drill", "warn", f"{what} passed {span(age_s)} ago", rehearse)
    else:
        yield Check("drill", "ok", f"{what} passed {span(max(0.0, age_s))} ago")


# ---------------------------------------------------------------------------------------------------------------------
# Secrets

_LOOKS_SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{18,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bsk-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|\brpa_[A-Za-z0-9]{30,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^\s/:@{}$]+:[^\s/@{}$]+@"
)
_SECRET_KEY = re.compile(
    r"""^[\s"'-]*[\w.-]*(?:token|secret|password|passwd|api[_-]?key|access[_-]?key|private[_-]?key)["']?\s*[:=]\s*"""
    r"""(?P<value>[^\s#].*)$""",
    re.I,
)
_NO_LITERAL = re.compile(
    r"""^(?:["'\s\[\]{},|>~]*|null|true|false|\d{1,6}|["']?\$.*|["']?[A-Z][A-Z_]*|["']?\{\{.*)["',\s]*(?:#.*)?$""", re.I
)


def check_secrets(project: Path) -> Iterator[Check]:
    """No key or password stands in the YAML files, or in what is deployed; `.env` is for its owner's eyes."""
    paths = [project / CONFIG_FILE, project / ".copier-answers.yml", *_texts(project / "startup", ".yaml", ".yml")]
    paths += _texts(project / "deploy")
    found = [f"{path.relative_to(project)} line {line}" for path in paths for line in find_secrets(path)]
    if found:
        yield Check(
            "secrets",
            "fail",
            f"what looks like a secret stands in {', '.join(found[:4])}",
            "take it out, put it into the platform's store or .env (mode 0600), and revoke it if it was ever pushed",
        )
    else:
        yield Check("secrets", "ok", "none in the YAML files and in deploy/")
    env = project / ".env"
    if env.is_file() and env.stat().st_mode & 0o077:
        yield Check(
            "secrets", "fail", f".env can be read by others (mode {env.stat().st_mode & 0o777:04o})", "chmod 600 .env"
        )


def find_secrets(path: Path) -> list[int]:
    """Numbers of the lines of `path` that look like a literal secret."""
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        key = _SECRET_KEY.match(line)
        if _LOOKS_SECRET.search(line) or (key and not _NO_LITERAL.match(key["value"].strip())):
            found.append(number)
    return found


def _texts(folder: Path, *suffixes: str) -> list[Path]:
    """Files below `folder` that a person could have written, of these suffixes if any are given."""
    if not folder.is_dir():
        return []
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size < 1 << 20)
    return [path for path in files if not suffixes or path.suffix in suffixes]
