"""The model: shapes, causality, tied embeddings."""

from __future__ import annotations

import torch

from tasks.language_model.model import build_model, flops_per_token
from trainer.config.load import load_config

TINY = ["model.width=16", "model.layers=2", "model.heads=2", "data.sequence_length=8"]


def test_logits_depend_on_earlier_tokens_only() -> None:
    torch.manual_seed(0)
    model = build_model(load_config(TINY)).eval()
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
    model = build_model(load_config(TINY)).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 1, 2, 1, 2, 1, 2]]))
    assert not torch.allclose(logits[0, 1], logits[0, 7])


def test_the_output_layer_is_the_embedding() -> None:
    model = build_model(load_config(TINY))
    assert [name for name, _ in model.named_parameters() if "embedding" in name] == ["embedding.weight"]
    assert not {"cos", "sin"} & set(model.state_dict())  # computed, so not stored


def test_activation_checkpointing_changes_neither_names_nor_gradients() -> None:
    tokens = torch.randint(256, (2, 8))
    gradients = []
    for flag in ("false", "true"):
        torch.manual_seed(0)
        model = build_model(load_config([*TINY, "model.dropout=0.5", f"train.activation_checkpointing={flag}"]))
        torch.manual_seed(1)
        model(tokens).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_flops_are_six_per_parameter_and_the_attention() -> None:
    config = load_config(TINY)
    model = build_model(config)
    parameters = sum(p.numel() for p in model.parameters())
    assert flops_per_token(model, config) == 6 * parameters + 12 * 2 * 16 * 8
