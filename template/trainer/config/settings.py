"""Every setting of a run, as frozen dataclasses: one for each section of the two YAML files.

`config.yaml` says what is trained, `startup/nexgpu.yaml` where and how it runs; no setting is in both. An absent
key takes the default below, so that a newer trainer runs an older file. Units are in the names: `_s` seconds. The type
of a field says what it may be; what depends on another field is checked in `__post_init__`. This module imports nothing
heavy, since the launcher and every report start with it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from trainer.outcome import CONFIG, RECLAIMED, ConfigError

PROJECT = Path(__file__).resolve().parents[2]
CONFIG_FILE = Path("config.yaml")
STARTUP_FILE = Path("startup/nexgpu.yaml")
FILE_SECTIONS = {
    CONFIG_FILE: ("model", "data", "optim", "train", "parallel", "logging"),
    STARTUP_FILE: ("run", "image", "gpu", "nodes", "volume", "checkpoint", "reclaim", "restart"),
}


class Limits:
    """What the values of a field must satisfy, as part of its type: `Annotated[float, Limits("above 0", ...)]`.

    Args:
        right: the same in words, after "it must be".
        keywords: of JSON Schema, those of `_TESTS`; a pattern is one for the whole text. The schema of the startup
            config is made from them.
    """

    def __init__(self, right: str, **keywords: float | str) -> None:
        self.right, self.keywords = right, keywords

    def allow(self, value: Any) -> bool:
        return all(_TESTS[keyword](value, limit) for keyword, limit in self.keywords.items())


_TESTS: dict[str, Callable[[Any, Any], Any]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
    "pattern": lambda text, pattern: re.fullmatch(pattern, text),
}

PositiveInt = Annotated[int, Limits("1 or more", minimum=1)]
NonNegativeInt = Annotated[int, Limits("0 or more", minimum=0)]
PositiveFloat = Annotated[float, Limits("above 0", exclusiveMinimum=0)]
NonNegativeFloat = Annotated[float, Limits("0 or more", minimum=0)]
Share = Annotated[float, Limits("between 0 and 1", minimum=0, maximum=1)]
ShareBelowOne = Annotated[float, Limits("at least 0 and below 1", minimum=0, exclusiveMaximum=1)]
Target = Annotated[float, Limits("a share above 0 and below 1, such as 0.05", exclusiveMinimum=0, exclusiveMaximum=1)]
ExitCode = Annotated[int, Limits(f"between 1 and 255 and not {CONFIG}", minimum=1, maximum=255)]
_NAME = Limits(
    "letters, digits, '.', '_' and '-' only, beginning with a letter or digit",
    pattern="([A-Za-z0-9][A-Za-z0-9._-]{0,99})?",
)
_NOTICE = Limits(
    "auto, none, aws, gcp, azure, alibaba, file:PATH or command:COMMAND",
    pattern="auto|none|aws|gcp|azure|alibaba|(file|command):.*[^:]",
)


class Invalid(ValueError):
    """A value that does not fit the others of its section: the field and what would be right."""

    def __init__(self, name: str, right: str) -> None:
        super().__init__(f"{name} must be {right}")
        self.name, self.right = name, right


def require(condition: bool, name: str, right: str) -> None:
    """For `__post_init__`: raise `Invalid` for the field `name` unless `condition` holds; it must be `right`."""
    if not condition:
        raise Invalid(name, right)


# ---------------------------------------------------------------------------------------------------------------------
# config.yaml


@dataclass(frozen=True)
class NoSettings:
    """The section `model:` of a task that has none."""


@dataclass(frozen=True)
class DataConfig:
    """The global batch, its order and its loader. A task adds keys of its own to `data:` in a subclass of this."""

    global_batch: PositiveInt = 32  # samples per optimizer step, whatever the number of GPUs
    micro_batch: PositiveInt = 4  # samples per forward pass of one rank
    workers: NonNegativeInt = 0  # data-loader processes per rank
    prefetch: PositiveInt = 2  # batches that each worker prepares ahead
    seed: NonNegativeInt = 0


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and the learning-rate schedule of `optim.py`, both functions of the global step."""

    lr: PositiveFloat = 3e-3
    min_lr_share: Share = 0.1  # of lr, reached at the last step
    warmup_steps: NonNegativeInt = 40
    beta1: ShareBelowOne = 0.9
    beta2: ShareBelowOne = 0.95
    epsilon: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    gradient_clip: NonNegativeFloat = 1.0  # largest norm of the gradient; 0: no clipping
    ema_decay: ShareBelowOne = 0.0  # of the averaged weights; 0: none are kept
    fused: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """The loop of `train.py`."""

    steps: PositiveInt = 2000  # optimizer steps of the whole run
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on accelerators
    reproducible: Literal["auto", "true", "false"] = "auto"  # the same bits on any number of ranks; auto: on CPUs
    compile: bool = False
    activation_checkpointing: bool = False
    eval_every_steps: NonNegativeInt = 50  # 0: never
    eval_batches: PositiveInt = 2  # global batches per evaluation


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid out over the ranks (`parallel.py`)."""

    strategy: Literal["fsdp", "hsdp", "ddp"] = "fsdp"


@dataclass(frozen=True)
class LoggingConfig:
    """Progress lines and TensorBoard."""

    every_steps: PositiveInt = 10  # progress lines
    tensorboard: bool = True


# ---------------------------------------------------------------------------------------------------------------------
# startup/nexgpu.yaml


@dataclass(frozen=True)
class RunConfig:
    """The name of the run: its directory below `checkpoint.dir`."""

    name: Annotated[str, _NAME] = ""  # empty: the name of the project's folder
    provider: Literal["local", "nexgpu", "aws", "gcp", "azure", "runpod", "vast", "slurm", "kubernetes"] = "local"


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

    count: PositiveInt = 1
    min_count: PositiveInt = 1
    on_count_change: Literal["rescale", "hold", "fail"] = "rescale"

    def __post_init__(self) -> None:
        require(self.min_count <= self.count, "min_count", f"at most gpu.count ({self.count})")


@dataclass(frozen=True)
class NodesConfig:
    """Nodes of the run; the rendezvous comes from the platform's environment where it has one."""

    count: PositiveInt = 1
    rendezvous: str = ""  # HOST:PORT of node 0; empty: from the environment
    port: Annotated[int, Limits("between 1 and 65535", minimum=1, maximum=65535)] = 29400


@dataclass(frozen=True)
class VolumeConfig:
    """The persistent disk. Empty: none, and you make sure that `checkpoint.dir` is kept."""

    mount: Annotated[str, Limits("an absolute path, or empty for none", pattern="(/.*)?")] = ""
    allow_ephemeral: bool = False  # accept memory, a container layer or an instance's own disk


@dataclass(frozen=True)
class CheckpointConfig:
    """Where checkpoints go, how often, how many stay (`checkpoint/`), and what the interval is calculated from."""

    dir: Annotated[str, Limits("a path", pattern=".+")] = "./checkpoints"
    every_steps: PositiveInt = 500
    retune: bool = True  # recompute every_steps from what the run measures
    keep_last: PositiveInt = 3
    keep_every_steps: NonNegativeInt = 0  # milestones that are never removed; 0: none
    commit: Literal["auto", "rename", "manifest"] = "auto"
    max_failed_saves: PositiveInt = 3  # in a row; then the run stops
    deadline_s: PositiveFloat = 900.0  # a save that takes longer counts as failed
    mtbi_s: PositiveFloat = 14_400.0
    step_time_s: PositiveFloat = 0.8
    save_time_s: PositiveFloat = 30.0
    save_stall_s: NonNegativeFloat = 3.0
    restart_time_s: NonNegativeFloat = 300.0
    badput_target: Target = 0.05  # of the time, for saves and lost work

    @property
    def figures(self) -> dict[str, float]:
        """What the interval is calculated from: the arguments of `interval.compute_interval`."""
        names = ("mtbi_s", "step_time_s", "save_time_s", "save_stall_s", "restart_time_s", "badput_target")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ReclaimConfig:
    """How the platform takes the machine away (`reclaim/`)."""

    grace_s: NonNegativeFloat = 30.0  # from the signal to the platform's SIGKILL; 0: no warning is given
    notice: Annotated[str, _NOTICE] = "auto"  # auto, none, aws, gcp, azure, alibaba, file:PATH, command:COMMAND


@dataclass(frozen=True)
class RestartConfig:
    """What the launcher does after a crash, and the exit code that means 'start me again'."""

    max_crash_restarts: NonNegativeInt = 3
    backoff_s: NonNegativeFloat = 5.0  # before the first restart; doubled up to a minute
    exit_reclaimed: ExitCode = RECLAIMED
    stuck_after_s: PositiveFloat = 1800.0  # a step that takes longer is reported, with every rank's stack
    restart_stuck: bool = False

    def __post_init__(self) -> None:
        require(self.exit_reclaimed != CONFIG, "exit_reclaimed", f"between 1 and 255 and not {CONFIG}")


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
