"""The image classifier: its data, what moves an image, and that it learns by the engine as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.image_classifier import ImageClassifier
from tasks.image_classifier.data import Images
from trainer.config.load import load_config
from trainer.outcome import ConfigError, Reason
from trainer.records import read_records
from trainer.task import build_task
from trainer.train import train

TASK = "task=image_classifier"


def test_training_and_validation_share_no_image_and_hold_all() -> None:
    config = load_config([TASK])
    training, held_out = Images(config, validation=False), Images(config, validation=True)
    assert len(training) + len(held_out) == 1797
    assert training.images.shape[1:] == (8, 8) and 0 <= training.images.min() < training.images.max() <= 1
    assert set(held_out.classes) == set(range(10))


def test_an_image_moves_by_its_seed_epoch_and_number_alone() -> None:
    images = Images(load_config([TASK]), validation=False)
    numbers = np.arange(40)
    once, _ = images.samples(numbers, np.full(40, 3))
    backwards, _ = images.samples(numbers[::-1], np.full(40, 3))
    later, _ = images.samples(numbers, np.full(40, 4))
    assert torch.equal(once, backwards.flip(0)) and not torch.equal(once, later)
    held_out = Images(load_config([TASK]), validation=True)
    assert torch.equal(held_out.samples(numbers, numbers)[0][:, 0], torch.from_numpy(held_out.images[numbers]))


def test_a_file_that_holds_no_images_is_refused_in_one_line(tmp_path: Path) -> None:
    for text, said in (
        ("a,b\n", "cannot be read"),
        ("1,2,3\n", "a square image"),
        ("1,1,1,1,10\n", "classes up to 10"),
    ):
        (tmp_path / "rows.csv").write_text(text)
        with pytest.raises(ConfigError, match=said) as caught:
            Images(load_config([TASK, f"data.path={tmp_path / 'rows.csv'}"]), validation=False)
        assert "\n" not in str(caught.value)


def test_the_loss_of_a_batch_is_the_sum_over_its_images() -> None:
    task = ImageClassifier(load_config([TASK]))
    model = task.build_model().eval()
    images, classes = task.train.samples(np.arange(6), np.zeros(6, dtype=np.int64))
    whole = task.loss(model, (images, classes))
    parts = [task.loss(model, (images[part], classes[part])) for part in (slice(0, 2), slice(2, 6))]
    assert whole.sum.item() == pytest.approx(sum(part.sum.item() for part in parts))
    assert whole.weight == sum(part.weight for part in parts) == 6
    assert whole.metrics["accuracy"] == sum(part.metrics["accuracy"] for part in parts)


def trained(settings: list[str]) -> tuple[Reason, int]:
    config = load_config(settings)
    return train(config, build_task(config))


def test_it_learns_and_its_accuracy_is_recorded_by_name(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    settings = [
        TASK, f"checkpoint.dir={tmp_path}", "run.name=run", "volume.allow_ephemeral=true", "train.steps=100",
        "train.eval_every_steps=100", "model.blocks=2", "data.micro_batch=16", "optim.warmup_steps=10",
        "logging.tensorboard=false",
    ]  # fmt: skip
    assert ranks(2, trained, settings) == [(Reason.FINISHED, 100)] * 2
    lines = read_records(tmp_path / "run", "metrics")
    assert all(0 <= line["accuracy"] <= 1 for line in lines) and lines[0]["accuracy"] < 0.5
    assert lines[-1]["val_accuracy"] > 0.7 and lines[-1]["val_loss"] < 1.0
