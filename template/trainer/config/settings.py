"""Every setting of a run: two YAML files and ``KEY=VALUE`` overrides, parsed into frozen dataclasses.

`config.yaml` says what is trained, `startup/nexgpu.yaml` where and how it runs; no setting stands in both. An absent
key takes the default below, so that a newer trainer runs an older file. Units are in the names: `_s` seconds.
This module imports nothing heavy, since the launcher and every report start with it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.outcome import CONFIG, RECLAIMED, ConfigError

PROJECT = Path(__file__).resolve().parents[2]
CONFIG_FILE = Path("config.yaml")
STARTUP_FILE = Path("startup/nexgpu.yaml")


class Invalid(ValueError):
    """A value that its dataclass refuses: the field and what would be right."""

    def __init__(self, name: str, right: str) -> None:
        super().__init__(f"{name} must be {right}")
        self.name, self.right = name, right


def require(condition: bool, name: str, right: str) -> None:
    if not condition:
        raise Invalid(name, right)


def at_least(section: Any, minimum: float, *names: str) -> None:
    for name in names:
        require(getattr(section, name) >= minimum, name, f"{minimum} or more")


# ---------------------------------------------------------------------------------------------------------------------
# config.yaml


@dataclass(frozen=True)
class NoSettings:
    """The section `model:` of a task that has none."""


@dataclass(frozen=True)
class DataConfig:
    """The global batch, its order and its loader. A task adds keys of its own to `data:` in a subclass of this."""

    global_batch: int = 32  # samples per optimizer step, whatever the number of GPUs
    micro_batch: int = 4  # samples per forward pass of one rank
    workers: int = 0  # data-loader processes per rank
    prefetch: int = 2  # batches that each worker prepares ahead
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "global_batch", "micro_batch", "prefetch")
        at_least(self, 0, "workers", "seed")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and the learning-rate schedule of `optim.py`, both functions of the global step."""

    lr: float = 3e-3
    min_lr_share: float = 0.1  # of lr, reached at the last step
    warmup_steps: int = 40
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    gradient_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    ema_decay: float = 0.0  # of the averaged weights; 0: none are kept
    fused: bool = False

    def __post_init__(self) -> None:
        require(self.lr > 0, "lr", "above 0")
        at_least(self, 0, "warmup_steps", "weight_decay", "gradient_clip", "epsilon")
        require(0 <= self.min_lr_share <= 1, "min_lr_share", "between 0 and 1")
        for name in ("beta1", "beta2", "ema_decay"):
            require(0 <= getattr(self, name) < 1, name, "at least 0 and below 1")


@dataclass(frozen=True)
class TrainConfig:
    """The loop of `train.py`."""

    steps: int = 2000  # optimizer steps of the whole run
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on accelerators
    reproducible: Literal["auto", "true", "false"] = "auto"  # the same bits on any number of ranks; auto: on CPUs
    compile: bool = False
    activation_checkpointing: bool = False
    eval_every_steps: int = 50  # 0: never
    eval_batches: int = 2  # global batches per evaluation

    def __post_init__(self) -> None:
        at_least(self, 1, "steps", "eval_batches")
        at_least(self, 0, "eval_every_steps")


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out over the ranks (`parallel.py`)."""

    strategy: Literal["fsdp", "hsdp", "ddp"] = "fsdp"


@dataclass(frozen=True)
class LoggingConfig:
    """What a person sees."""

    every_steps: int = 10  # progress lines
    tensorboard: bool = True

    def __post_init__(self) -> None:
        at_least(self, 1, "every_steps")


# ---------------------------------------------------------------------------------------------------------------------
# startup/nexgpu.yaml


@dataclass(frozen=True)
class RunConfig:
    """The name of the run: its directory below `checkpoint.dir`."""

    name: str = ""  # empty: the name of the project's folder
    provider: Literal["local", "nexgpu", "aws", "gcp", "azure", "runpod", "vast", "slurm", "kubernetes"] = "local"

    def __post_init__(self) -> None:
        require(
            not self.name or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.name) is not None,
            "name",
            "letters, digits, '.', '_' and '-' only, beginning with a letter or digit",
        )


@dataclass(frozen=True)
class ImageConfig:
    """The container image, pinned."""

    ref: str = ""
    allow_tag: bool = False

    def __post_init__(self) -> None:
        require(
            not self.ref or self.allow_tag or re.search(r"@sha256:[0-9a-f]{64}$", self.ref) is not None,
            "ref",
            "pinned by digest (NAME@sha256:…), or image.allow_tag true",
        )


@dataclass(frozen=True)
class GpuConfig:
    """GPUs of one node, and what to do when the instance has another number of them."""

    count: int = 1
    min_count: int = 1
    on_count_change: Literal["rescale", "hold", "fail"] = "rescale"

    def __post_init__(self) -> None:
        at_least(self, 1, "count", "min_count")
        require(self.min_count <= self.count, "min_count", f"at most gpu.count ({self.count})")


@dataclass(frozen=True)
class NodesConfig:
    """Nodes of the run; the rendezvous comes from the platform's environment where it has one."""

    count: int = 1
    rendezvous: str = ""  # HOST:PORT of node 0; empty: from the environment
    port: int = 29400

    def __post_init__(self) -> None:
        at_least(self, 1, "count")
        require(1 <= self.port <= 65535, "port", "between 1 and 65535")


@dataclass(frozen=True)
class VolumeConfig:
    """The persistent disk. Empty: none, the checkpoints lie on a disk that you vouch for."""

    mount: str = ""
    allow_ephemeral: bool = False  # accept memory, a container layer or an instance's own disk

    def __post_init__(self) -> None:
        require(not self.mount or self.mount.startswith("/"), "mount", "an absolute path, or empty for none")


@dataclass(frozen=True)
class CheckpointConfig:
    """Where checkpoints go, how often, how many stay (`checkpoint/`), and what the interval is calculated from."""

    dir: str = "./checkpoints"
    every_steps: int = 500
    retune: bool = True  # recompute every_steps from what the run measures
    keep_last: int = 3
    keep_every_steps: int = 0  # milestones that are never removed; 0: none
    commit: Literal["auto", "rename", "manifest"] = "auto"
    max_failed_saves: int = 3  # in a row; then the run stops
    deadline_s: float = 900.0  # a save that takes longer counts as failed
    mtbi_s: float = 14_400.0
    step_time_s: float = 0.8
    save_time_s: float = 30.0
    save_stall_s: float = 3.0
    restart_time_s: float = 300.0
    badput_target: float = 0.05

    def __post_init__(self) -> None:
        require(bool(self.dir), "dir", "a path")
        at_least(self, 1, "every_steps", "keep_last", "max_failed_saves")
        at_least(self, 0, "keep_every_steps", "save_stall_s", "restart_time_s")
        for name in ("deadline_s", "mtbi_s", "step_time_s", "save_time_s"):
            require(getattr(self, name) > 0, name, "above 0")
        require(0 < self.badput_target < 1, "badput_target", "a share above 0 and below 1, such as 0.05")


@dataclass(frozen=True)
class ReclaimConfig:
    """The platform's way of taking the machine away (`reclaim.py`)."""

    grace_s: float = 30.0  # from the signal to the platform's SIGKILL; 0: no warning is given
    notice: str = "auto"  # auto, none, aws, gcp, azure, alibaba, file:PATH, command:COMMAND

    def __post_init__(self) -> None:
        at_least(self, 0, "grace_s")
        require(
            self.notice in ("auto", "none", "aws", "gcp", "azure", "alibaba")
            or (self.notice.startswith(("file:", "command:")) and not self.notice.endswith(":")),
            "notice",
            "auto, none, aws, gcp, azure, alibaba, file:PATH or command:COMMAND",
        )


@dataclass(frozen=True)
class RestartConfig:
    """What the launcher does after a crash, and the exit code that means 'start me again'."""

    max_crash_restarts: int = 3
    backoff_s: float = 5.0  # before the first restart; doubled up to a minute
    exit_reclaimed: int = RECLAIMED
    stuck_after_s: float = 1800.0  # a step that takes longer is reported, with every rank's stack
    restart_stuck: bool = False

    def __post_init__(self) -> None:
        at_least(self, 0, "max_crash_restarts", "backoff_s")
        require(self.stuck_after_s > 0, "stuck_after_s", "above 0")
        require(
            1 <= self.exit_reclaimed <= 255 and self.exit_reclaimed != CONFIG,
            "exit_reclaimed",
            f"between 1 and 255 and not {CONFIG}",
        )


def home(path: str) -> Path:
    """`path` with `~` replaced by the home directory. Raises ConfigError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path!r}: there is no such home directory; write the whole path") from None


@dataclass(frozen=True)
class Config:
    """Both files as one object; `config.data.global_batch` is the key `data.global_batch`."""

    task: str = "language_model"  # a folder of tasks/
    model: Any = field(default_factory=NoSettings)  # `ModelConfig` of tasks/<task>/settings.py
    data: Any = field(default_factory=DataConfig)  # `DataConfig` there
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    image: ImageConfig = field(default_factory=ImageConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    nodes: NodesConfig = field(default_factory=NodesConfig)
    volume: VolumeConfig = field(default_factory=VolumeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    reclaim: ReclaimConfig = field(default_factory=ReclaimConfig)
    restart: RestartConfig = field(default_factory=RestartConfig)
    project: Path = PROJECT  # not a key: the folder that relative paths start from

    @property
    def checkpoint_root(self) -> Path:
        """`checkpoint.dir` as an absolute path."""
        return (self.project / home(self.checkpoint.dir)).absolute()

    @property
    def run_name(self) -> str:
        return self.run.name or self.project.name

    @property
    def run_dir(self) -> Path:
        """Directory of this run's checkpoints, ledger and metrics."""
        return self.checkpoint_root / self.run_name


FILE_SECTIONS = {
    CONFIG_FILE: ("model", "data", "optim", "train", "parallel", "logging"),
    STARTUP_FILE: ("run", "image", "gpu", "nodes", "volume", "checkpoint", "reclaim", "restart"),
}
ENGINE_SECTIONS: dict[str, type] = {
    name: typing.get_type_hints(Config)[name]
    for names in FILE_SECTIONS.values()
    for name in names
    if name not in ("model", "data")
}


def sections_of(task: str) -> dict[str, type]:
    """The dataclass of every section, `model` and `data` from the `settings.py` of `task`, in the files' order.

    That file is loaded by itself: the launcher reads settings, and the rest of a task imports torch.

    Raises:
        ConfigError: there is no such task, or its settings are not what they must be.
    """
    kinds = {"model": NoSettings, "data": DataConfig} | ENGINE_SECTIONS
    place = PROJECT / "tasks" / task
    if not re.fullmatch(r"[a-z][a-z0-9_]*", task) or not (place / "__init__.py").is_file():
        there = ", ".join(sorted(path.parent.name for path in PROJECT.glob("tasks/*/__init__.py")))
        raise ConfigError(f"task is {task!r}; it must be a folder of tasks/ with an __init__.py ({there})")
    name, file = f"tasks.{task}.settings", place / "settings.py"
    if name not in sys.modules and file.is_file():
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    for section, class_name in (("model", "ModelConfig"), ("data", "DataConfig")):
        kind = getattr(sys.modules.get(name), class_name, kinds[section])
        if not dataclasses.is_dataclass(kind) or (section == "data" and not issubclass(kind, DataConfig)):
            base = " and a subclass of trainer.task.DataConfig" if section == "data" else ""
            raise ConfigError(f"{file}: {class_name} must be a frozen dataclass{base}")
        kinds[section] = kind
    return {section: kinds[section] for names in FILE_SECTIONS.values() for section in names}
