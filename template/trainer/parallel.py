"""Process groups, the device mesh, and the model laid out over it: FSDP2, HSDP or DDP, over NCCL or gloo."""

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
from torch.nn.parallel import DistributedDataParallel

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
    """One dimension of all ranks, or for HSDP (nodes to replicate over, ranks of a node to shard over)."""
    if config.parallel.strategy != "hsdp":
        return init_device_mesh(world.device.type, (world.size,))
    fewest_and_most = torch.tensor([world.local_size, -world.local_size])
    dist.all_reduce(fewest_and_most, op=dist.ReduceOp.MIN, group=world.control)
    if int(fewest_and_most.sum()) or world.size % world.local_size:
        raise ConfigError(
            f"parallel.strategy is 'hsdp' and {world.size} ranks do not divide into nodes of {world.local_size}; "
            f"it must be fsdp or ddp where nodes differ"
        )
    shape = (world.size // world.local_size, world.local_size)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What forward and backward run in: fp32 on CPUs and bf16 on accelerators that have it, unless configured."""
    if config.train.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.train.dtype]
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def distribute(model: nn.Module, config: Config, world: World) -> nn.Module:
    """Lay `model` (on the CPU, equal on all ranks) out over the ranks; parameters stay fp32, gradients reduce in fp32.

    Returns:
        The module to call. Its parameters are those of `unwrap(it)`.
    """
    model.to(world.device)
    if config.train.compile:
        torch._inductor.config.fallback_random = True  # so that compiled and eager dropout masks agree
        for block in getattr(model, "blocks", [model]):
            block.compile()
    if config.parallel.strategy == "ddp":
        ids = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, find_unused_parameters=True, gradient_as_bucket_view=True)
    mesh = mesh_of(config, world)
    dtype = compute_dtype(config, world.device)
    # RoPE's tables stay fp32, as under DDP.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """The module with the plain parameter names, whatever the strategy."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextlib.contextmanager
def accumulating(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Around one micro-batch: gradients are reduced over the ranks in the last one only."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield
