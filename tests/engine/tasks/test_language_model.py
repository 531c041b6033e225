"""The language model: shapes, causality, tied embeddings, its loss, and what it writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from click.testing import CliRunner

from tasks.language_model import LanguageModel
from tasks.language_model.sample import main as sample
from trainer.config.load import load_config
from trainer.task import build_task, checkpoint_bytes
from trainer.train import train

TINY = ["model.width=16", "model.layers=2", "model.heads=2", "data.sequence_length=8"]


def test_logits_depend_on_earlier_tokens_only() -> None:
    torch.manual_seed(0)
    model = LanguageModel(load_config(TINY)).build_model().eval()
    tokens = torch.randint(256, (3, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (3, 8, 256)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_positions_matter() -> None:
    torch.manual_seed(0)
    model = LanguageModel(load_config(TINY)).build_model().eval()
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 1, 2, 1, 2, 1, 2]]))
    assert not torch.allclose(logits[0, 1], logits[0, 7])


def test_the_output_layer_is_the_embedding() -> None:
    model = LanguageModel(load_config(TINY)).build_model()
    assert [name for name, _ in model.named_parameters() if "embedding" in name] == ["embedding.weight"]
    assert not {"cos", "sin"} & set(model.state_dict())  # computed, so not stored


def test_activation_checkpointing_changes_neither_names_nor_gradients() -> None:
    tokens = torch.randint(256, (2, 8))
    gradients = []
    for flag in ("false", "true"):
        torch.manual_seed(0)
        settings = [*TINY, "model.dropout=0.5", f"train.activation_checkpointing={flag}"]
        model = LanguageModel(load_config(settings)).build_model()
        torch.manual_seed(1)
        model(tokens).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_flops_are_six_per_parameter_and_the_attention() -> None:
    task = LanguageModel(load_config(TINY))
    model = task.build_model()
    parameters = sum(p.numel() for p in model.parameters())
    assert task.flops_per_unit(model) == 6 * parameters + 12 * 2 * 16 * 8
    assert (task.unit, task.units_per_sample) == ("tokens", 8)


def test_the_loss_is_a_sum_over_all_tokens_but_the_first() -> None:
    task = LanguageModel(load_config(TINY))
    model = task.build_model()
    tokens = torch.randint(256, (3, 9))
    loss = task.loss(model, tokens)
    assert loss.weight == 3 * 8
    mean = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss.sum / loss.weight, mean)


def test_the_size_of_a_checkpoint_is_known_without_making_the_model() -> None:
    huge = LanguageModel(load_config(["model.width=16384", "model.layers=96", "model.heads=128"]))
    assert checkpoint_bytes(huge) > 10**12


def trained(settings: Sequence[str]) -> None:
    config = load_config(settings)
    train(config, build_task(config))


def test_a_checkpoint_writes_text(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 400)
    settings = [
        *TINY, f"data.path={text}", f"checkpoint.dir={tmp_path}", "run.name=run", "volume.allow_ephemeral=true",
        "train.steps=60", "optim.lr=0.02", "optim.warmup_steps=4", "train.eval_every_steps=0",
        "logging.tensorboard=false",
    ]  # fmt: skip
    ranks(1, trained, settings)

    def written(*words: str) -> str:
        result = CliRunner().invoke(sample, [*words, *settings])
        assert result.exit_code == 0, result.output
        return result.output

    greedy = written("--prompt", "abc", "--tokens", "13", "--temperature", "0")
    assert greedy == "abcdefghabcdefgh\n"
    assert len(written("--tokens", "5", "--step", "60").encode()) >= len("def ") + 5
    for words, expected in [
        (["--step", "7", *settings], "step 7"),
        (["--prompt", "", *settings], "--prompt is empty"),
        ([*settings, "data.path=tokens.npy"], "sample works on bytes"),
        ([*settings, "model.width=32"], "another model"),
    ]:
        refused = CliRunner().invoke(sample, words)
        assert refused.exit_code == 78
        assert re.fullmatch(r"error: [^\n]+\n", refused.output) and expected in refused.output
