"""AdamW and its learning rate, a pure function of the global step; clipping; averaged weights."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.config.settings import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (1 … `steps`): linear warm-up, then cosine to `min_lr_share` of it."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    share = config.min_lr_share + (1 - config.min_lr_share) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * share


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over all parameters, matrices with weight decay and vectors without.

    Frozen parameters are in it too: they are passed over while they have no gradient, and a parameter that is frozen
    or unfrozen later keeps its state.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=config.fused or None,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def average_gradients(model: nn.Module, weight: Tensor, largest: float, mesh: DeviceMesh) -> Tensor:
    """Make the gradients, sums over the global batch, means, with a norm over all ranks of at most `largest`.

    Args:
        weight: of the global batch, float64, a scalar on the device; 0 leaves them as they are.
        largest: 0 for no clipping.
        mesh: that the model is laid out over; its last dimension is the one that shards.

    Returns:
        The norm before clipping, fp32, a scalar on the device, equal on all ranks.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    if not local:
        return torch.zeros((), device=weight.device)
    torch._foreach_div_(local, torch.where(weight > 0, weight, 1.0).to(local[0].dtype))
    norms = torch.stack(torch._foreach_norm(local, 2, torch.float64))
    squares = norms.square().sum()
    dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
    norm = squares.sqrt().float()  # rounded once: no order of ranks shows
    if largest:
        scale = (largest / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local, scale.to(local[0].dtype))
    return norm


class AveragedWeights:
    """An exponential moving average of the parameters, laid out as they are."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(model.named_parameters())
        self.averages = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Average from here on: the parameters as they are."""
        for name, average in self.averages.items():
            average.copy_(self.parameters[name])

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(list(self.averages.values()), list(self.parameters.values()), 1 - self.decay)
