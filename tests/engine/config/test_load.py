"""Settings: two files, overrides, one clear line for each mistake, and what must not change under a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from trainer.cli import main
from trainer.config.fingerprint import compare_fingerprints, fingerprint
from trainer.config.load import load_config
from trainer.config.settings import CONFIG_FILE, FILE_SECTIONS, STARTUP_FILE
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
        (CONFIG_FILE, "optim:\n  lr: [1]\n", ["optim.lr", "[1]", "a number"]),
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
