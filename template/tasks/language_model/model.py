"""A small modern decoder-only transformer: RoPE, RMSNorm, SwiGLU, tied embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tasks.language_model.settings import ModelConfig


class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al. 2021)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, sequence, width]; cos, sin [sequence, width per head / 2]."""
        batch, sequence, width = x.shape
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).view(batch, sequence, 3, self.heads, -1).unbind(2))
        y = F.scaled_dot_product_attention(
            _rotate(q, cos, sin),
            _rotate(k, cos, sin),
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, sequence, width))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.feed_forward or 64 * -(-8 * config.width // (3 * 64))
        self.gate_up = nn.Linear(config.width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual path."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


class Transformer(nn.Module):
    """Logits [batch, sequence, vocabulary] for tokens [batch, sequence]; the output layer is the embedding itself."""

    def __init__(self, config: ModelConfig, sequence_length: int, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.cos: Tensor
        self.sin: Tensor
        half = config.width // config.heads // 2
        frequencies = config.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(sequence_length, dtype=torch.float32), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.initialise(config.layers)

    def initialise(self, layers: int) -> None:
        """Normal weights of deviation 0.02; those that end a residual path are narrower by √(2·layers) (GPT-2)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                deviation = 0.02 / (2 * layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(parameter, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)
