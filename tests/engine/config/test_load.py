"""Settings: two files, overrides, one clear line for each mistake, and what must not change under a run."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainer.cli import main
from trainer.config import load
from trainer.config.fingerprint import compare_fingerprints, fingerprint
from trainer.config.load import load_config, sections_of
from trainer.config.settings import (
    CONFIG_FILE,
    FILE_SECTIONS,
    PROJECT,
    STARTUP_FILE,
    Config,
    DataConfig,
    Limits,
    NoSettings,
)
from trainer.outcome import ConfigError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "startup").mkdir()
    (tmp_path / CONFIG_FILE).write_text("data:\n  global_batch: 16\noptim:\n  lr: 1e-3\n")
    (tmp_path / STARTUP_FILE).write_text("run:\n  name: demo\ncheckpoint:\n  dir: ./saves\n  keep_last: 5\n")
    return tmp_path


def test_values_are_parsed_by_the_type_of_their_field(project: Path) -> None:
    config = load_config(
        ["train.steps=1e2", "data.seed=7", "train.compile=yes", "optim.lr=3e-4", "run.name=7"], project
    )
    assert config.data.global_batch == 16
    assert (config.train.steps, config.data.seed, config.train.compile) == (100, 7, True)
    assert (config.optim.lr, config.run_name) == (3e-4, "7")
    assert load_config([], project).optim.lr == 1e-3  # YAML itself reads 1e-3 as text


def test_absent_keys_and_files_take_the_defaults(tmp_path: Path) -> None:
    config = load_config([], tmp_path)
    assert config.data.global_batch == 32
    assert config.run_dir == tmp_path / "checkpoints" / tmp_path.name


def test_no_setting_stands_in_both_files() -> None:
    first, second = (set(names) for names in FILE_SECTIONS.values())
    assert not first & second


def test_the_last_of_several_overrides_wins_and_relative_directories_start_at_the_project(project: Path) -> None:
    config = load_config(["train.steps=5", "train.steps=6"], project)
    assert config.train.steps == 6
    assert config.run_dir == project / "saves" / "demo"


def test_giving_the_interval_turns_retuning_off(project: Path) -> None:
    assert load_config([], project).checkpoint.retune
    given = load_config(["checkpoint.every_steps=10"], project).checkpoint
    assert (given.every_steps, given.retune) == (10, False)
    assert load_config(["checkpoint.every_steps=10", "checkpoint.retune=true"], project).checkpoint.retune


@pytest.mark.parametrize(
    ("file", "text", "parts"),
    [
        (CONFIG_FILE, "train:\n  step: 3\n", ["config.yaml", "train.step", "did you mean train.steps"]),
        (CONFIG_FILE, "train:\n  steps: many\n", ["config.yaml", "train.steps", "'many'", "a whole number"]),
        (CONFIG_FILE, "train:\n  steps: 2.5\n", ["train.steps", "2.5", "a whole number"]),
        (CONFIG_FILE, "train:\n  steps: true\n", ["train.steps", "True", "a whole number"]),
        (CONFIG_FILE, "train:\n  compile: maybe\n", ["train.compile", "'maybe'", "true or false"]),
        (CONFIG_FILE, "optim:\n  lr: .nan\n", ["optim.lr", "a finite number"]),
        (CONFIG_FILE, "optim:\n  lr: [1]\n", ["optim.lr", "[1]", "a finite number"]),
        (CONFIG_FILE, "optim:\n  lr: 0\n", ["optim.lr is 0;", "above 0"]),
        (CONFIG_FILE, "data: []\n", ["config.yaml", "data is []", "a section of keys"]),
        (CONFIG_FILE, "task: nothing\n", ["config.yaml: task is 'nothing'", "a folder of tasks/", "language_model)"]),
        (CONFIG_FILE, "task: ../trainer\n", ["config.yaml: task is '../trainer'", "a folder of tasks/"]),
        (CONFIG_FILE, "task: [1]\n", ["config.yaml: task is [1]", "text"]),
        (CONFIG_FILE, "parallel:\n  strategy: magic\n", ["parallel.strategy", "'magic'", "fsdp, hsdp, ddp"]),
        (CONFIG_FILE, "gpu:\n  count: 8\n", ["config.yaml", "'gpu'", "belongs in startup/nexgpu.yaml"]),
        (CONFIG_FILE, "train: 3\n", ["config.yaml", "train", "a section of keys"]),
        (CONFIG_FILE, "- 1\n", ["config.yaml", "sections"]),
        (CONFIG_FILE, "a: [1\n", ["config.yaml", "valid YAML"]),
        (CONFIG_FILE, "a: " + "[" * 3000, ["config.yaml", "valid YAML"]),
        (CONFIG_FILE, "train:\n  steps: 2026-11-31\n", ["config.yaml", "day is out of range"]),
        (CONFIG_FILE, "train:\n  steps: 1" + "0" * 400, ["train.steps", "a whole number"]),
        (STARTUP_FILE, "checkpoint:\n  keep_last: 0\n", ["nexgpu.yaml", "checkpoint.keep_last", "0", "1 or more"]),
        (STARTUP_FILE, "restart:\n  exit_reclaimed: 78\n", ["restart.exit_reclaimed", "not 78"]),
        (STARTUP_FILE, "image:\n  ref: a/b:latest\n", ["image.ref", "'a/b:latest'", "digest", "allow_tag"]),
        (STARTUP_FILE, "run:\n  name: ../up\n", ["run.name", "'../up'", "letters"]),
        (STARTUP_FILE, "reclaim:\n  notice: maybe\n", ["reclaim.notice", "'maybe'", "file:PATH"]),
        (STARTUP_FILE, "gpu:\n  count: 2\n  min_count: 3\n", ["gpu.min_count", "3", "at most gpu.count (2)"]),
    ],
)
def test_each_mistake_is_one_line_that_says_what_would_be_right(
    project: Path, file: Path, text: str, parts: list[str]
) -> None:
    (project / file).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config([], project)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("override", ["train.steps", "=3", "train.steps=", "train=3", "model.heads=5"])
def test_a_wrong_override_is_refused_by_name(project: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"^command line"):
        load_config([override], project)


def test_every_default_is_allowed() -> None:
    for section, kind in sections_of(Config.task).items():
        hints = typing.get_type_hints(kind, include_extras=True)
        for each in dataclasses.fields(kind):
            for limits in typing.get_args(hints[each.name])[1:]:
                assert not isinstance(limits, Limits) or limits.allow(each.default), f"{section}.{each.name}"


def test_whole_numbers_are_exact(project: Path) -> None:
    (project / CONFIG_FILE).write_text(f"data:\n  seed: {2**63 + 1}\n")
    assert load_config([], project).data.seed == 2**63 + 1
    assert load_config([f"data.seed={2**61 + 1}"], project).data.seed == 2**61 + 1


# ---------------------------------------------------------------------------------------------------------------------
# Tasks


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], str]]:
    """`task(settings)` makes a task with that text as its `settings.py` (None: without one) and gives its name."""
    monkeypatch.setattr(load, "PROJECT", tmp_path)
    made: list[str] = []

    def make(settings: str | None) -> str:
        made.append(f"made_{len(made)}")
        folder = tmp_path / "tasks" / made[-1]
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("import torch, nothing_like_this\n")
        if settings is not None:
            (folder / "settings.py").write_text(settings)
        return made[-1]

    yield make
    for name in made:
        sys.modules.pop(f"tasks.{name}.settings", None)


TASK_SETTINGS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Annotated, Literal
from trainer import task
from trainer.task import Limits, PositiveInt

@dataclass(frozen=True)
class ModelConfig:
    depth: PositiveInt
    norm: Literal["batch", "layer"] = "batch"

@dataclass(frozen=True)
class DataConfig(task.DataConfig):
    crop: Annotated[int, Limits("a multiple of nothing, at most 9", maximum=9)] = 3
"""


def test_a_task_brings_the_keys_of_its_model_and_data(task: Callable[[str | None], str], project: Path) -> None:
    name = task(TASK_SETTINGS)
    config = load_config([f"task={name}", "model.depth=2", "data.crop=5", "data.seed=1"], project)
    assert (config.task, config.model.depth, config.model.norm) == (name, 2, "batch")
    assert (config.data.crop, config.data.seed, config.data.global_batch) == (5, 1, 16)
    assert {"model.depth", "data.crop", "data.global_batch"} <= fingerprint(config).keys()
    for given, said in (
        (["model.wide=2", "model.depth=2"], "unknown key 'model.wide'; model has depth, norm"),
        (["model.depth=0"], "command line: model.depth is '0'; it must be 1 or more"),
        (["model.depth=1", "data.crop=10"], "data.crop is '10'; it must be a multiple of nothing, at most 9"),
        ([], "config.yaml: model.depth is missing"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config([f"task={name}", *given], project)
        assert said in str(caught.value)


def test_a_task_without_settings_has_the_engines_keys_alone(task: Callable[[str | None], str], project: Path) -> None:
    name = task(None)
    config = load_config([f"task={name}"], project)
    assert (config.model, type(config.data)) == (NoSettings(), DataConfig)
    with pytest.raises(ConfigError, match=r"unknown key 'model\.heads'; model has no keys"):
        load_config([f"task={name}", "model.heads=2"], project)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("class ModelConfig:\n    depth = 1\n", "ModelConfig is .*; it must be a frozen dataclass"),
        ("from trainer.config.settings import NoSettings as DataConfig\n", r"extends trainer\.task\.DataConfig"),
        ("ModelConfig = 3\n", "ModelConfig is 3; it must be a frozen dataclass"),
        ("def broken(:\n", "SyntaxError: "),
        ("import nothing_like_this\n", "ModuleNotFoundError: .*it must be importable"),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass ModelConfig:\n    sizes: list[int] = 1\n",
            r"model\.sizes has the type list\[int\]; it must be bool, int, float, str",
        ),
    ],
)
def test_settings_of_a_task_that_are_not_right_are_one_line(
    task: Callable[[str | None], str], project: Path, settings: str, said: str
) -> None:
    name = task(settings)
    with pytest.raises(ConfigError, match=said) as caught:
        load_config([f"task={name}", "model.sizes=3"], project)
    assert "\n" not in str(caught.value)


def test_settings_are_read_without_torch(project: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from trainer.config.load import load_config; load_config()"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(PROJECT)})


# ---------------------------------------------------------------------------------------------------------------------
# What a checkpoint remembers


def test_a_fingerprint_refuses_warns_or_passes_by_class_of_change(project: Path) -> None:
    saved = fingerprint(load_config([], project))
    free = fingerprint(load_config(["checkpoint.keep_last=9", "logging.every_steps=1", "data.workers=3"], project))
    assert compare_fingerprints(saved, free) == []

    warned = fingerprint(load_config(["data.micro_batch=2", "train.steps=9"], project))
    assert len(compare_fingerprints(saved, warned)) == 2

    changed = fingerprint(load_config(["optim.lr=0.5", "data.seed=3"], project))
    with pytest.raises(ConfigError) as caught:
        compare_fingerprints(saved, changed, ["data.seed"])
    assert "optim.lr was 0.001 and is 0.5" in str(caught.value)
    assert "--accept optim.lr" in str(caught.value)
    assert "data.seed" not in str(caught.value)
    assert len(compare_fingerprints(saved, changed, ["optim.lr", "data.seed"])) == 2


@pytest.mark.parametrize("arguments", [["launch", "--gpus", "two"], ["launch", "--bogus"], ["train", "--gpus", "0"]])
def test_a_wrong_option_is_a_wrong_configuration_and_no_crash(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 78 and "Error: " in done.output
