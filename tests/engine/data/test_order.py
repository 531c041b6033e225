"""The order of samples: a function of the seed and of how many were consumed, of nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.language_model.data import TokenSamples, open_samples
from tasks.language_model.settings import DataConfig, ModelConfig
from trainer.config.load import load_config
from trainer.config.settings import Config
from trainer.data.loader import loader
from trainer.data.order import SampleOrder, batch_checksum, batch_hash, permute
from trainer.data.plan import BatchPlan
from trainer.outcome import ConfigError

BATCH, SEQUENCE = 7, 4


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1))
def test_a_permutation_hits_every_sample_once(length: int, key: int) -> None:
    assert sorted(permute(np.arange(length), length, key)) == list(range(length))


def test_the_order_needs_no_table() -> None:
    numbers, _ = SampleOrder(10**12, seed=0).global_batch(5 * 10**11, 8)
    assert len(set(numbers)) == 8
    assert numbers.max() > 10**9


@given(st.integers(1, 40), st.integers(0, 200), st.integers(1, 50))
def test_each_epoch_is_complete_and_in_an_order_of_its_own(length: int, consumed: int, size: int) -> None:
    order = SampleOrder(length, seed=3)
    numbers, epochs = order.global_batch(0, 5 * length)
    for epoch in range(5):
        assert sorted(numbers[epochs == epoch]) == list(range(length))
    if length > 8:
        assert len({tuple(numbers[epochs == epoch]) for epoch in range(5)}) == 5
    late, _ = order.global_batch(consumed, size)
    assert list(late) == list(order.global_batch(0, consumed + size)[0][consumed:])


def test_another_seed_is_another_order() -> None:
    one, other = (SampleOrder(1000, seed).global_batch(0, 50)[0] for seed in (0, 1))
    assert list(one) != list(other)


def test_the_hash_of_a_batch_knows_samples_and_places_and_adds_up() -> None:
    numbers, positions = np.arange(100, 132), np.arange(32)
    whole = batch_hash(*batch_checksum(positions, numbers))
    parts = [batch_checksum(positions[part], numbers[part]) for part in (slice(20, 32), slice(0, 9), slice(9, 20))]
    assert batch_hash(*(float(sum(words)) for words in zip(*parts, strict=True))) == whole
    swapped = numbers.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert batch_hash(*batch_checksum(positions, swapped)) != whole
    assert batch_hash(*batch_checksum(positions, numbers + (positions == 31))) != whole


# ---------------------------------------------------------------------------------------------------------------------
# The loader


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Twenty-five windows or so, whose first token is their number."""
    tokens = np.arange(30 * SEQUENCE + 1) // SEQUENCE
    np.save(tmp_path / "tokens.npy", tokens.astype(np.uint8))
    data = DataConfig(
        path=str(tmp_path / "tokens.npy"), sequence_length=SEQUENCE, global_batch=BATCH, micro_batch=2, prefetch=3,
        validation_share=0.1,
    )  # fmt: skip
    return Config(model=ModelConfig(), data=data, project=tmp_path)


def _run(samples: TokenSamples, config: Config, world: int, consumed: int, steps: int, workers: int) -> list[list[int]]:
    """For each step the windows that all ranks ran, in the order of the global batch."""
    plan = BatchPlan(BATCH, 2, world)
    batches: list[dict[int, list[int]]] = [{} for _ in range(steps)]
    hashes = np.zeros((steps, 2))
    for rank in range(world):
        mine = loader(samples, config.data, plan, rank, consumed=consumed, steps=steps, seed=5, workers=workers)
        for step, micro_batches in enumerate(mine):
            for batch in micro_batches:
                hashes[step] += batch.checksum
                if not batch.is_padding:
                    batches[step][batch.index] = batch.samples[:, 0].tolist()
    ran = [[window for index in sorted(step) for window in step[index]] for step in batches]
    for step, words in enumerate(hashes):
        numbers, _ = SampleOrder(len(samples), 5).global_batch(consumed + step * BATCH, BATCH)
        assert batch_hash(*words) == batch_hash(*batch_checksum(np.arange(BATCH), numbers))
    return ran


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores: on purpose
def test_any_world_size_and_number_of_workers_runs_the_same_batches_across_epoch_ends(config: Config) -> None:
    samples = open_samples(config, validation=False)
    assert len(samples) < 5 * BATCH  # so that epochs end on the way
    whole = _run(samples, config, world=1, consumed=0, steps=16, workers=0)
    for world, workers, first, steps in [(8, 0, 0, 5), (4, 3, 5, 3), (3, 1, 8, 4), (1, 3, 12, 2), (2, 0, 14, 2)]:
        assert _run(samples, config, world, first * BATCH, steps, workers) == whole[first : first + steps]


def test_a_loader_takes_nothing_from_the_streams_of_the_users_code(config: Config) -> None:
    samples = open_samples(config, validation=False)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    random_state = random.getstate()
    _run(samples, config, world=1, consumed=0, steps=1, workers=1)
    assert torch.equal(torch.rand(1), expected)
    assert random.getstate() == random_state


def test_training_and_validation_share_no_window(config: Config) -> None:
    parts = [open_samples(config, validation=held_out) for held_out in (False, True)]
    windows = [{int(part.samples(np.array([n]), np.array([0]))[0, 0]) for n in range(len(part))} for part in parts]
    assert not windows[0] & windows[1]
    assert windows[0] | windows[1] == set(range(30))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"", "must hold text"),
        ("odd.bin", b"123", "token_dtype uint16"),
        ("garbage.npy", b"no array" * 100, "numpy.save"),
    ],
)
def test_a_file_that_holds_no_data_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=expected) as caught:
        open_samples(load_config([f"data.path={tmp_path / name}"]), validation=False)
    assert "\n" not in str(caught.value)


def test_a_negative_token_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.full(2000, -1, dtype=np.int32))
    config = load_config([f"data.path={tmp_path / 'tokens.npy'}", "data.sequence_length=8"])
    samples = open_samples(config, validation=False)
    with pytest.raises(ConfigError, match="a token is -1"):
        samples.samples(np.arange(2), np.zeros(2, dtype=np.int64))
