"""Every kind of state survives another number of ranks and another strategy, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tasks.language_model.model import Transformer
from tasks.language_model.settings import ModelConfig
from trainer import parallel
from trainer.checkpoint.dcp.reader import refuse_differences
from trainer.config.settings import Config, OptimConfig, ParallelConfig, TrainConfig
from trainer.data.plan import BatchPlan
from trainer.optim import AveragedWeights, average_gradients, build_optimizer, set_learning_rate
from trainer.outcome import ConfigError
from trainer.state import TrainState, seed_all

Ranks = Callable[..., list[Any]]
BATCH = 6


class EveryKind(nn.Module):
    """Tied, frozen, frozen later, never used, one element; a buffer that forward changes, and one that is not saved."""

    forwards: Tensor
    constant: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.full((3,), 2.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        x = self.frozen(self.embedding(tokens)) * self.scale * self.constant[0]
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


@dataclass(frozen=True)
class Setting:
    """One session of training: what stands in for `config.yaml` here."""

    strategy: Literal["fsdp", "hsdp", "ddp"] = "fsdp"
    optimizer: str = "default"
    transformer: bool = False
    compile: bool = False
    activation_checkpointing: bool = False
    ema: bool = True


def _build(setting: Setting, world: parallel.World) -> tuple[TrainState, DeviceMesh]:
    config = Config(
        parallel=ParallelConfig(strategy=setting.strategy),
        train=TrainConfig(compile=setting.compile, activation_checkpointing=setting.activation_checkpointing),
    )
    seed_all(1)
    size = ModelConfig(layers=2, width=16, heads=2, vocabulary=11, dropout=0.2)
    model = Transformer(size, 5, setting.activation_checkpointing) if setting.transformer else EveryKind()
    mesh = parallel.distribute(model, config, world)
    seed_all(100 + world.rank)
    optimizer = build_optimizer(model, OptimConfig(fused=setting.optimizer == "fused"))
    if setting.optimizer in ("foreach", "tensor lr"):
        options = {"foreach": True} if setting.optimizer == "foreach" else {"lr": torch.tensor(0.1)}
        groups = [
            {"params": group["params"], "weight_decay": group["weight_decay"]} for group in optimizer.param_groups
        ]
        optimizer = torch.optim.AdamW(groups, **options)
    averages = AveragedWeights(model, 0.5) if setting.ema else None
    return TrainState(model, optimizer, averages, rank=world.rank, seed=1, fingerprint={}), mesh


def _train(state: TrainState, mesh: DeviceMesh, world: parallel.World, steps: int) -> list[float]:
    """Some steps on batches that are a function of the step; the second block is frozen after step 3."""
    losses = []
    for step in range(state.step + 1, state.step + steps + 1):
        if step > 3 and isinstance(state.model, EveryKind):
            state.model.blocks[1].requires_grad_(False)
        tokens = torch.randint(11, (BATCH, 6), generator=torch.Generator().manual_seed(step))
        total = torch.zeros((), dtype=torch.float64)
        mine = BatchPlan(BATCH, 2, world.size).of_rank(world.rank)
        for number, micro in enumerate(mine, start=1):
            chosen = tokens[list(micro.positions)]
            with parallel.accumulating(state.model, last=number == len(mine)), torch.random.fork_rng():
                torch.manual_seed(1000 * step + micro.index)
                logits = state.model(chosen[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), chosen[:, 1:].flatten(), reduction="sum")
                loss = torch.where(torch.tensor(micro.is_padding), 0.0, loss)
                loss.backward()
            total += loss.detach()
        average_gradients(state.model, torch.tensor(5.0 * BATCH), 1.0, mesh)
        set_learning_rate(state.optimizer, 0.05 / step)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        if state.averages is not None:
            state.averages.update()
        state.step, state.samples = step, step * BATCH
        dist.all_reduce(total)
        losses.append(total.item() / (5 * BATCH))
    return losses


def _load(state: TrainState, directory: Path, change: Mapping[str, Any] = {}) -> None:
    saved = {**FileSystemReader(directory).read_metadata().state_dict_metadata, **change}
    saved = {name: entry for name, entry in saved.items() if entry is not None}
    target = state.target(saved)
    refuse_differences(target, Metadata(saved), SimpleNamespace(directory=directory))  # type: ignore[arg-type]
    load(target, checkpoint_id=directory)
    state.loaded()


def _snapshot(state: TrainState) -> dict[str, Tensor]:
    """All that is equal on all ranks, whole, as copies."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in state.state_dict().items()
        if not name.startswith("rng.")
    }


def session(setting: Setting, source: Path | None, target: Path | None, steps: int) -> SimpleNamespace:
    """On every rank: load `source`, train, save into `target`."""
    with parallel.join() as world:
        state, mesh = _build(setting, world)
        if source is not None:
            _load(state, source)
        loaded = _snapshot(state)
        draws = (torch.rand(2).tolist(), np.random.rand(2).tolist(), [random.random(), random.gauss(0, 1)])
        losses = _train(state, mesh, world, steps)
        trained = _snapshot(state)
        if target is not None:
            save(state.state_dict(), checkpoint_id=target)
        after = (torch.rand(2).tolist(), np.random.rand(2).tolist(), [random.random(), random.gauss(0, 1)])
        model = state.model
        tied = not isinstance(model, EveryKind) or model.head.weight is model.embedding.weight
        return SimpleNamespace(loaded=loaded, trained=trained, losses=losses, tied=tied, draws=draws, after=after)


def _assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def _assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one.keys() - {"model.forwards"}:  # a count of forward passes, which depends on the world size
        torch.testing.assert_close(one[name], other[name], rtol=2e-5, atol=1e-6, msg=name)


def test_every_kind_of_state_survives_other_ranks_and_strategies(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(1, session, Setting("ddp"), None, None, 8)[0]
    at, before = None, None
    layouts = [(3, Setting("fsdp")), (2, Setting("ddp")), (1, Setting("fsdp")), (2, Setting("hsdp"))]
    for number, (size, setting) in enumerate(layouts, start=1):
        found = ranks(size, session, setting, at, tmp_path / str(number), 2)
        assert all(one.tied for one in found)
        for one in found[1:]:
            _assert_equal(found[0].trained, one.trained)
        if before is not None:
            _assert_equal(before, found[0].loaded)
        assert found[0].losses == whole.losses[2 * number - 2 : 2 * number]
        at, before = tmp_path / str(number), found[0].trained
    assert before is not None
    forwards = {"model.forwards"}  # a count of forward passes, which depends on the world size
    _assert_equal(*({name: of[name] for name in of.keys() - forwards} for of in (before, whole.trained)))
    names = set(before)
    assert "optim.blocks.1.0.weight.exp_avg" in names  # frozen later: its state stays
    assert not [name for name in names if name.startswith(("optim.unused", "optim.frozen"))]
    assert {"model.forwards", "model.head.weight", "ema.embedding.weight"} <= names
    assert "model.constant" not in names


def test_the_same_world_size_goes_on_to_the_last_bit(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(2, session, Setting(), None, None, 6)[0]
    ranks(2, session, Setting(), None, tmp_path / "a", 4)
    again = ranks(2, session, Setting(), tmp_path / "a", None, 2)[0]
    assert again.losses == whole.losses[4:]
    _assert_equal(again.trained, whole.trained)


@pytest.mark.parametrize(("first", "then"), [("default", "fused"), ("fused", "tensor lr"), ("foreach", "default")])
def test_variants_of_adamw_take_over_from_each_other(ranks: Ranks, tmp_path: Path, first: str, then: str) -> None:
    found = ranks(2, session, Setting(optimizer=first), None, tmp_path / "a", 3)[0]
    other = ranks(1, session, Setting("ddp", optimizer=then), tmp_path / "a", tmp_path / "b", 2)[0]
    _assert_equal(found.trained, other.loaded)
    assert other.trained["optim.scale.step"] == 5


def test_random_streams_stay_with_their_ranks_and_new_ranks_get_new_ones(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(3, session, Setting(), None, tmp_path / "a", 1)
    fewer = ranks(2, session, Setting(), tmp_path / "a", tmp_path / "b", 1)
    more = ranks(3, session, Setting(), tmp_path / "b", None, 0)
    again = ranks(3, session, Setting(), tmp_path / "b", None, 0)
    for rank in range(2):
        assert fewer[rank].draws == saved[rank].after
        assert more[rank].draws == fewer[rank].after
    streams = [one.draws for one in more] + [saved[2].after, saved[2].draws]
    assert len({repr(stream) for stream in streams}) == len(streams)
    assert [one.draws for one in again] == [one.draws for one in more]


# ---------------------------------------------------------------------------------------------------------------------
# What does not fit is refused. One process is enough


def refusals(directory: Path) -> list[str]:
    messages = []
    with parallel.join() as world:
        state, mesh = _build(Setting("ddp"), world)
        _train(state, mesh, world, 1)
        save(state.state_dict(), checkpoint_id=directory)
        entry = FileSystemReader(directory).read_metadata().state_dict_metadata["model.scale"]
        assert isinstance(entry, TensorStorageMetadata)
        double = replace(entry, properties=replace(entry.properties, dtype=torch.float64))
        longer = replace(entry, size=torch.Size([2]))
        changes: list[dict[str, Any]] = [
            {"model.scale": None}, {"model.gone": entry}, {"optim.gone.weight.exp_avg": entry},
            {"model.scale": double}, {"model.scale": longer}, {"rng.rank7.torch": entry},
        ]  # fmt: skip
        for change in changes:
            try:
                _load(_build(Setting("ddp"), world)[0], directory, change)
                messages.append("loaded")
            except ConfigError as error:
                messages.append(str(error).partition(" does not fit the model: ")[2].partition("; resume with")[0])
    return messages


def test_names_shapes_and_types_that_do_not_fit_are_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    missing, extra, optimizer, kind, shape, other_rank = ranks(1, refusals, tmp_path / "a")[0]
    assert missing == "model.scale is missing from the checkpoint"
    assert extra == "model.gone is in the checkpoint only"
    assert optimizer == "optim.gone.weight.exp_avg is in the checkpoint only"
    assert kind == "model.scale is torch.float64 in the checkpoint and torch.float32 here"
    assert shape == "model.scale is (2,) in the checkpoint and (1,) here"
    assert other_rank == "loaded"


def test_averages_can_be_started_and_dropped(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, session, Setting("ddp", ema=False), None, tmp_path / "without", 1)
    started = ranks(2, session, Setting(), tmp_path / "without", tmp_path / "with", 0)[0].loaded
    assert torch.equal(started["ema.scale"], started["model.scale"])
    dropped = ranks(1, session, Setting("ddp", ema=False), tmp_path / "with", None, 0)[0].loaded
    assert not [name for name in dropped if name.startswith("ema.")]


def test_activation_checkpointing_may_be_switched(ranks: Ranks, tmp_path: Path) -> None:
    on, off = (Setting(transformer=True, activation_checkpointing=switch) for switch in (True, False))
    whole = ranks(2, session, off, None, None, 4)[0]
    ranks(2, session, on, None, tmp_path / "a", 2)
    again = ranks(2, session, off, tmp_path / "a", None, 2)[0]
    assert again.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    _assert_close(again.trained, whole.trained)


@pytest.mark.slow
def test_compilation_may_be_switched(ranks: Ranks, tmp_path: Path) -> None:
    on, off = (Setting(transformer=True, compile=switch) for switch in (True, False))
    whole = ranks(2, session, off, None, None, 4)[0]
    ranks(2, session, on, None, tmp_path / "a", 2)
    again = ranks(1, session, off, tmp_path / "a", tmp_path / "b", 1)[0]
    last = ranks(2, session, on, tmp_path / "b", None, 1)[0]
    assert [*again.losses, *last.losses] == pytest.approx(whole.losses[2:], rel=1e-5)
