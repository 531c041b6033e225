"""Process groups, the device mesh, and the model laid out over it: FSDP2 that shards, replicates or both, over NCCL or
gloo."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.config.settings import Config
from trainer.outcome import ConfigError


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks."""

    rank: int
    size: int
    local_size: int
    device: torch.device
    control: dist.ProcessGroup  # gloo, for decisions and small numbers on the CPU
    checkpoints: dist.ProcessGroup  # gloo, for all that checkpoints do: their collectives mix with no others

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@contextlib.contextmanager
def join() -> Iterator[World]:
    """Join the ranks that torchrun started, or be the only one; leave them at the end."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    long = datetime.timedelta(minutes=30)
    try:
        yield World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            device=device,
            control=dist.new_group(backend="gloo"),
            checkpoints=dist.new_group(backend="gloo", timeout=long),
        )
    finally:
        # Not on an error: peers may be in a collective, and waiting for them would hide the error.
        if not _failing():
            dist.destroy_process_group()


def _failing() -> bool:
    import sys

    return sys.exc_info()[0] is not None


def mesh_of(config: Config, world: World) -> DeviceMesh:
    """The layout of `parallel.strategy`: all ranks to shard over (fsdp), or (ranks to replicate over, ranks to shard
    over): nodes and the ranks of a node for hsdp, all ranks and one for ddp.

    Raises:
        ConfigError: hsdp, and the nodes have different numbers of ranks.
    """
    strategy = config.parallel.strategy
    if strategy == "fsdp":
        return init_device_mesh(world.device.type, (world.size,))
    sharded = world.local_size if strategy == "hsdp" else 1
    fewest_and_most = torch.tensor([sharded, -sharded])
    dist.all_reduce(fewest_and_most, op=dist.ReduceOp.MIN, group=world.control)
    if int(fewest_and_most.sum()) or world.size % sharded:
        raise ConfigError(
            f"parallel.strategy is 'hsdp' and {world.size} ranks do not divide into nodes of {sharded}; "
            f"it must be fsdp or ddp where nodes differ"
        )
    return init_device_mesh(world.device.type, (world.size // sharded, sharded), mesh_dim_names=("replicate", "shard"))


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What forward and backward run in: fp32 on CPUs and bf16 on accelerators that have it, unless configured."""
    if config.train.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.train.dtype]
    return (
        torch.bfloat16
        if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        else torch.float32
    )


def is_reproducible(config: Config, device: torch.device) -> bool:
    """Whether a run is to be the same on any number of ranks, to the bit (`train.reproducible`)."""
    return config.train.reproducible == "true" or (config.train.reproducible == "auto" and device.type == "cpu")


def distribute(model: nn.Module, config: Config, world: World) -> DeviceMesh:
    """Lay `model` (on the CPU, equal on all ranks) out over the ranks, in place; parameters stay fp32.

    Gradients are plain sums over micro-batches and ranks, with the number of ranks nowhere in them. Reproducible ones
    are summed in float64 and rounded once: float64 holds such a sum of fp32 numbers exactly but for pathological
    ranges, so no order of summing shows.
    """
    reproducible = is_reproducible(config, world.device)
    if reproducible and world.device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    model.to(world.device)
    blocks = getattr(model, "blocks", None) or []
    if config.train.compile:
        torch._inductor.config.fallback_random = True  # so that compiled and eager dropout masks agree
        for block in blocks or [model]:
            block.compile()
    mesh = mesh_of(config, world)
    # Inputs are not cast: tables such as RoPE's stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(config, world.device),
        reduce_dtype=torch.float64 if reproducible else torch.float32,
        cast_forward_inputs=False,
    )
    for part in [*blocks, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no multiplied sum
    return mesh


@contextlib.contextmanager
def accumulating(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around one micro-batch: gradients are reduced over the ranks in the last one only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield
