"""The task that config.yaml names keeps what the engine relies on; what is broken is said in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import contract
import pytest

from trainer.records import read_records
from trainer.task import Config, ConfigError, Task, build_task, load_config
from trainer.train import train


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Your settings with the task's small ones, and checkpoints that lie elsewhere."""
    small = build_task(load_config()).small
    return [
        *(f"{key}={value}" for key, value in small.items()),
        f"checkpoint.dir={tmp_path_factory.mktemp('checkpoints')}", "volume.allow_ephemeral=true", "volume.mount=",
        "logging.tensorboard=false", "train.eval_every_steps=2", "train.dtype=float32", "train.compile=false",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def task(settings: list[str]) -> Task:
    return _opened(load_config(settings))


def _opened(config: Config) -> Task:
    task = build_task(config)
    assert isinstance(task, Task), "build_task(config) must return a trainer.task.Task"
    try:
        task.prepare()
        assert len(task.train) > 0, "train holds no samples"
        len(task.validation)
    except (ConfigError, OSError) as error:
        pytest.skip(f"the data is not on this machine: {error}")
    return task


def _assert_whole(broken: Iterator[str]) -> None:
    if found := list(broken):
        pytest.fail("\n".join(found), pytrace=False)


def test_samples_are_a_function_of_their_numbers(task: Task) -> None:
    again = _opened(task.config)
    _assert_whole(contract.broken_samples(task.train, again.train, "train"))
    if len(task.validation):
        _assert_whole(contract.broken_samples(task.validation, again.validation, "validation"))


def test_the_model_is_built_alike_everywhere(task: Task) -> None:
    _assert_whole(contract.broken_model(task))


def test_the_loss_of_a_batch_is_the_sum_of_those_of_its_parts(task: Task) -> None:
    _assert_whole(contract.broken_loss(task))


def test_the_learning_rate_is_a_function_of_the_step(task: Task) -> None:
    _assert_whole(contract.broken_learning_rate(task))


def trained(settings: list[str]) -> None:
    config = load_config(settings)
    train(config, build_task(config))


def test_it_trains_on_two_ranks_as_on_one(ranks: Callable[..., list[Any]], task: Task, settings: list[str]) -> None:
    losses = []
    for size in (1, 2):
        mine = [*settings, f"run.name=on_{size}", "train.steps=3"]
        ranks(size, trained, mine)
        lines = read_records(load_config(mine).run_dir, "metrics")
        assert [line["step"] for line in lines] == [1, 2, 3]
        losses.append([line["loss"] for line in lines])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6), "the losses on two ranks are not those on one"
