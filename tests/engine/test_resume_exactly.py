"""A run that was stopped and resumed on other numbers of ranks is the run that was never stopped, to the bit.

Real processes train the real model through the real loop. A spy notes what each micro-batch was: samples and masks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.language_model import LanguageModel
from trainer import parallel
from trainer.agreement import Agreement
from trainer.checkpoint.dcp.reader import load_tensors
from trainer.config.load import load_config
from trainer.config.settings import Config
from trainer.data.loader import loader
from trainer.data.order import SampleOrder
from trainer.data.plan import BatchPlan
from trainer.outcome import ConfigError, Reason
from trainer.parallel import World
from trainer.records import read_records
from trainer.run import Run, Start, _seeded
from trainer.task import Loss, Task, build_task
from trainer.train import train

Ranks = Callable[..., list[Any]]
BATCH, SEQUENCE, STEPS = 7, 8, 12


def _settings(folder: Path, **others: Any) -> list[str]:
    values = {
        "run.name": "run", "checkpoint.dir": folder / "checkpoints", "checkpoint.every_steps": 5,
        "checkpoint.keep_last": 10, "volume.allow_ephemeral": "true", "data.path": folder / "tokens.npy",
        "data.sequence_length": SEQUENCE, "data.global_batch": BATCH, "data.micro_batch": 2, "data.seed": 11,
        "data.validation_share": 0.1, "model.layers": 1, "model.width": 16, "model.heads": 2, "model.dropout": 0.2,
        "optim.lr": 0.01, "optim.warmup_steps": 3, "optim.ema_decay": 0.9, "train.steps": STEPS,
        "train.eval_every_steps": 4, "logging.tensorboard": "false",
    }  # fmt: skip
    return [f"{key}={value}" for key, value in {**values, **others}.items()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With thirty windows of tokens, so that epochs end during a run; a window's first token is its number."""
    tokens = np.arange(30 * SEQUENCE + 1) // SEQUENCE + np.tile(np.eye(1, SEQUENCE, 3, dtype=int)[0], 31)[:241] * 40
    np.save(tmp_path / "tokens.npy", tokens.astype(np.uint8))
    return tmp_path


@contextmanager
def _spied(notes: list[tuple[int, int, tuple[int, ...], str]], stop_after: int | None) -> Iterator[None]:
    """Note (step, micro-batch, samples, masks) of all that this rank runs; ask it to stop during a step."""
    masks = hashlib.blake2b(digest_size=8)
    dropout, batches = F.dropout, Run.batches

    def spy_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        out = dropout(x, p, training, inplace)
        masks.update((out == 0).numpy().tobytes())
        return out

    def spy_batches(run: Run) -> Iterator[Any]:
        nonlocal masks
        step = run.step + 1
        if step == stop_after and run.world.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
        for batch in batches(run):
            masks = hashlib.blake2b(digest_size=8)
            yield batch
            ran = run._batch
            if not ran.is_padding:
                notes.append((step, ran.index, tuple(ran.samples[:, 0].tolist()), masks.hexdigest()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", spy_dropout)
        patch.setattr(Run, "batches", spy_batches)
        yield


def session(
    settings: Sequence[str], stop_after: int | None = None, accepted: Sequence[str] = (), lag: int = 0
) -> tuple[Reason, int, list[Any], list[str]]:
    """On every rank: train until the end, or until a signal that arrives during step `stop_after`."""
    notes: list[Any] = []
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer").addHandler(handler)
    if lag:
        begin = Agreement.__init__

        def late(self: Agreement, *arguments: Any) -> None:
            begin(self, *arguments)
            self.lag = lag

        Agreement.__init__ = late  # type: ignore[assignment, method-assign]
    config = load_config(settings)
    with _spied(notes, stop_after):
        reason, step = train(config, build_task(config), Start(accepted=accepted))
    return reason, step, notes, warnings


def _by_step(notes: Iterable[tuple[int, int, tuple[int, ...], str]]) -> dict[int, list[tuple[int, Any, str]]]:
    steps: dict[int, list[Any]] = {}
    for step, *rest in notes:
        steps.setdefault(step, []).append(tuple(rest))
    return {step: sorted(ran) for step, ran in steps.items()}


def _assert_resumes_exactly(ranks: Ranks, folder: Path, sessions: Sequence[tuple[int, int, int | None]]) -> None:
    """Each of `sessions` is (ranks, data workers, the step that it is stopped at)."""
    whole = _settings(folder, **{"run.name": "whole"})
    [(reason, _, notes, _)] = ranks(1, session, whole)
    assert reason is Reason.FINISHED
    expected = _by_step(notes)
    assert sorted(expected) == list(range(1, STEPS + 1))
    ran: dict[int, Any] = {}
    for size, workers, stop in sessions:
        found = ranks(size, session, _settings(folder, **{"data.workers": workers, "data.prefetch": 3}), stop)
        assert {one[:2] for one in found} == {(Reason.RECLAIMED, stop) if stop else (Reason.FINISHED, STEPS)}
        of_session = _by_step(note for one in found for note in one[2])
        assert not ran.keys() & of_session.keys()
        ran |= of_session
    assert ran == expected  # the very samples and dropout masks, micro-batch by micro-batch

    lines, others = (read_records(load_config(of).run_dir, "metrics") for of in (whole, _settings(folder)))
    assert [one["step"] for one in others] == list(range(1, STEPS + 1))
    for name in ("lr", "samples", "batch_hash", "loss", "grad_norm"):
        assert [one[name] for one in others] == [one[name] for one in lines]
    held_out = [{one["step"]: one["val_loss"] for one in of if "val_loss" in one} for of in (lines, others)]
    assert list(held_out[0]) == [4, 8, 12]
    assert held_out[1] == {step: held_out[0][step] for step in held_out[1]}
    assert {4, 12} - {stop for _, _, stop in sessions} <= held_out[1].keys()
    (one, _), (other, _) = (load_tensors(load_config(of).run_dir) for of in (whole, _settings(folder)))
    shared = {name for name in one if not name.startswith("rng.")}
    assert shared == {name for name in other if not name.startswith("rng.")}
    assert [name for name in shared if not torch.equal(one[name], other[name])] == []


def test_any_sequence_of_world_sizes_runs_the_same_samples_masks_and_rates(ranks: Ranks, folder: Path) -> None:
    _assert_resumes_exactly(ranks, folder, [(2, 1, 3), (1, 3, None)])


@pytest.mark.slow
def test_eight_four_three_one_eight(ranks: Ranks, folder: Path) -> None:
    _assert_resumes_exactly(ranks, folder, [(8, 0, 2), (4, 3, 5), (3, 1, 7), (1, 0, 9), (8, 1, None)])


def refused(settings: Sequence[str], accepted: Sequence[str]) -> str:
    """What a resume with these settings is refused with."""
    try:
        session(settings, 1, accepted)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_decides_the_numbers_does_not_change_unless_accepted(ranks: Ranks, folder: Path) -> None:
    ranks(1, session, _settings(folder), 3)
    changes = {"model.width": 32, "optim.lr": 0.02, "data.seed": 12, "data.global_batch": 8}
    [message] = ranks(1, refused, _settings(folder, **changes), [])
    for change in ("model.width was 16 and is 32", "optim.lr was 0.01 and is 0.02", "data.seed was 11 and is 12"):
        assert change in message
    assert "--accept model.width,data.global_batch,data.seed,optim.lr" in message

    tokens = np.load(folder / "tokens.npy")
    np.save(folder / "other.npy", np.append(tokens, tokens))
    [message] = ranks(1, refused, _settings(folder, **{"data.path": folder / "other.npy"}), ["data.path"])
    assert "data.hash was" in message

    harmless = {"checkpoint.keep_last": 9, "logging.every_steps": 3, "data.workers": 1, "optim.fused": "true"}
    schedule = {"data.micro_batch": 3, "train.steps": STEPS + 2}
    [(reason, step, _, warnings)] = ranks(1, session, _settings(folder, **harmless, **schedule), 5)
    assert (reason, step) == (Reason.RECLAIMED, 5)
    assert sorted(text.partition(" although ")[2] for text in warnings if "although" in text) == [
        "data.micro_batch changed from 2 to 3",
        f"train.steps changed from {STEPS} to {STEPS + 2}",
    ]

    changed = _settings(folder, **schedule, **{"data.global_batch": 5, "optim.ema_decay": 0})
    [found] = ranks(1, session, changed, 7, ["data.global_batch", "optim.ema_decay"])
    assert found[:2] == (Reason.RECLAIMED, 7)
    lines = read_records(load_config(changed).run_dir, "metrics")
    assert [line["samples"] for line in lines] == [7, 14, 21, 28, 35, 40, 45]  # on where the samples end


def test_numbers_that_are_read_one_step_late_change_no_decision(ranks: Ranks, folder: Path) -> None:
    settings = _settings(folder, **{"checkpoint.every_steps": 1, "train.eval_every_steps": 2})
    for found in ranks(2, session, settings, 5, (), 1):
        assert found[:2] == (Reason.RECLAIMED, 6)
    for found in ranks(1, session, settings, None, (), 1):
        assert found[:2] == (Reason.FINISHED, STEPS)
    run_dir = load_config(settings).run_dir
    saved = [event["step"] for event in read_records(run_dir, "ledger") if event["event"] == "save_committed"]
    assert saved == list(range(1, STEPS + 1))
    text = (run_dir / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "val_loss" in line] == [2, 4, 8, 10, 12]  # 6 stopped in a hurry


# ---------------------------------------------------------------------------------------------------------------------
# The gradient, without processes: every rank's part of it, one after the other


class WeightedSamples:
    """The numbers of samples themselves; what each of them weighs is drawn from 0 to 1000, and is often nothing."""

    identity: Mapping[str, Any] = {}

    def __init__(self, length: int = 50) -> None:
        random = np.random.default_rng(0)
        self.weights = random.integers(0, 1001, length) * (random.random(length) < 0.6)
        self.inputs = random.normal(size=(length, 6))

    def __len__(self) -> int:
        return len(self.weights)

    def samples(self, numbers: np.ndarray, epochs: np.ndarray) -> dict[str, Tensor]:
        chosen = {"weights": self.weights[numbers], "inputs": self.inputs[numbers]}
        return {name: torch.from_numpy(values).float() for name, values in chosen.items()}


class Weighted(Task):
    """A sum of squares in which samples count differently."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.train = self.validation = WeightedSamples()

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(self.config.model.dropout), nn.Linear(5, 1))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        each = (model(batch["inputs"])[:, 0] - 1) ** 2
        return Loss((each * batch["weights"]).sum(), batch["weights"].sum(), {"each": each.detach().sum()})


def _gradient(task: Task, size: int) -> tuple[list[float], list[Tensor]]:
    """Means over the global batch (weight, loss and metrics, as they are recorded) and the gradient, on `size` ranks;
    no process group is needed before the sums are reduced."""
    torch.manual_seed(0)
    model, config = task.build_model(), task.config
    plan = BatchPlan(config.data.global_batch, config.data.micro_batch, size)
    sums: Any = 0.0
    for rank in range(size):
        run = Run.of_task(config, task)
        run.world = World(rank, size, size, torch.device("cpu"), *[None] * 2)  # type: ignore[arg-type]
        run.model, run.state = model, SimpleNamespace(step=3)  # type: ignore[assignment]
        run._loader = loader(task.train, config.data, plan, rank, consumed=3, steps=1, seed=0)
        run._begin_step()
        for batch in run.batches():
            run.backward(task.loss(model, batch))
        sums = sums + run._sums
    loss, weight, *metrics = sums.tolist()
    means = [value / weight for value in (loss, *metrics)]
    return [weight, *means], [p.grad / weight for p in model.parameters() if p.grad is not None]


def _task(folder: Path, kind: str, batch: int, micro: int, dropout: float) -> Task:
    settings = {"data.global_batch": batch, "data.micro_batch": micro, "model.dropout": dropout}
    config = load_config(_settings(folder, **settings))
    return LanguageModel(config) if kind == "tokens" else Weighted(config)


@pytest.mark.parametrize("kind", ["tokens", "weighted"])
@pytest.mark.parametrize(("batch", "micro"), [(1, 1), (7, 2), (12, 5), (32, 4), (64, 1), (33, 64)])
def test_the_gradient_is_that_of_one_rank_with_the_whole_batch(folder: Path, kind: str, batch: int, micro: int) -> None:
    task = _task(folder, kind, batch, micro, dropout=0.1)
    means, gradient = _gradient(task, 1)
    for size in (2, 3, 5, 8, 64):
        others, other = _gradient(task, size)
        assert others == pytest.approx(means, rel=1e-6)
        largest = max(part.abs().max().item() for part in gradient)
        for one, two in zip(gradient, other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("kind", ["tokens", "weighted"])
def test_the_gradient_is_that_of_the_sum_over_the_batch_divided_once_by_its_weight(folder: Path, kind: str) -> None:
    task = _task(folder, kind, BATCH, 2, dropout=0.0)
    means, gradient = _gradient(task, 3)
    torch.manual_seed(0)
    model = task.build_model()
    batch = task.train.samples(*SampleOrder(len(task.train), 0).global_batch(3, BATCH))
    loss = task.loss(model, batch)
    (loss.sum / loss.weight).backward()
    weight = float(loss.weight)
    expected = [weight, *(float(total) / weight for total in (loss.sum.detach(), *loss.metrics.values()))]
    assert means == pytest.approx(expected, rel=1e-6)
    for parameter, part in zip(model.parameters(), gradient, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(part, parameter.grad, rtol=1e-5, atol=1e-7)


def test_the_world_is_left_alone_by_the_seed_of_a_micro_batch() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with _seeded(1, torch.device("cpu")):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with _seeded(1, torch.device("cpu")):
        assert torch.equal(torch.rand(3), inside)
    assert parallel.compute_dtype(Config(), torch.device("cpu")) is torch.float32
