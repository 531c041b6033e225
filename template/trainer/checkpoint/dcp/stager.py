"""The copy of the state that a save writes: one kept arena of shared memory, filled in the background.

Every save copies this rank's tensors into the same arena, side by side, and hands the writer process the arena (one
file descriptor, whatever the number of tensors) instead of the tensors. Names, shapes and DCP's local plan form the
layout, which is sent only when it has changed. The copy runs in a thread, overlapped with the next forward and
backward; the training loop waits for it before the optimizer changes anything. `planner.py` is the receiving end.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

log = logging.getLogger(__name__)

STATE = "state"
ALIGNMENT = 64  # bytes; of each tensor in the arena


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in the arena."""

    offset: int  # bytes
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class Layout:
    """The structure of one rank's state: everything of it but the numbers."""

    name: str  # tells layouts apart, also those of two processes
    slots: Mapping[str, Slot]
    plan: SavePlan
    bytes: int


_numbers = itertools.count()


def layout_of(state: Mapping[str, Tensor]) -> Layout:
    """Lay the tensors of a flat state dict (DTensors: their local part) out in an arena, in their order."""
    slots, end = {}, 0
    for name, tensor in state.items():
        local = _local(tensor)
        slots[name] = Slot(end, local.dtype, local.shape)
        end += -(-local.nbytes // ALIGNMENT) * ALIGNMENT
    plan = create_default_local_save_plan(dict(state), is_coordinator=True)
    names = {name: (name,) for name in state}  # how DCP says that the keys are flat
    plan = SavePlan(plan.items, planner_data=names)
    return Layout(f"{os.getpid()}-{next(_numbers)}", slots, plan, end)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _signature(state: Mapping[str, Tensor]) -> list[Any]:
    """Changes whenever the layout has to: names, types, shapes, placements.

    Raises:
        TypeError: a value is not a tensor; names it. Anything else would have to be unpickled on load.
    """
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; a checkpoint holds tensors only, make it one")
    return [
        (name, tensor.dtype, tensor.shape, tensor.to_local().shape, tensor.placements)
        if isinstance(tensor, DTensor)
        else (name, tensor.dtype, tensor.shape)
        for name, tensor in state.items()
    ]


class ArenaStager(AsyncStager):
    """Copies flat state dicts of tensors into one arena of shared memory; one save at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="staging", initializer=_same_device())
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._arena, self._pinned = torch.empty(0, dtype=torch.uint8), False
        self._layout: Layout | None = None
        self._signature: list[Any] = []
        self._sent = False  # whether the writer process has the layout
        self._views: list[Tensor] = []
        self.copied: Future[dict[str, Any]] | None = None

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """Start copying the flat state dict under `STATE`, which may change once `copied` is done.

        The state is one value of a dict, since DCP goes through the values of what it is given in the training loop,
        at a tenth of a millisecond each. The result of `copied` is what `ArenaPlanner` takes.
        """
        ready = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self.copied = self._thread.submit(self._copy, state_dict[STATE], ready)
        return self.copied

    def synchronize_staging(self) -> None:
        if self.copied is not None:
            self.copied.result()

    def forget(self) -> None:
        """The writer process is a new one: send it the layout again."""
        self._sent = False

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._free()

    def _free(self) -> None:
        self._views, self._layout = [], None
        if self._pinned:
            unpin_memory(self._arena.data_ptr())
        self._arena, self._pinned = torch.empty(0, dtype=torch.uint8), False

    def _make_room(self, size: int) -> None:
        """An arena of `size` bytes at least, pinned for the GPU where there is one."""
        if self._arena.nbytes >= size:
            return
        self._free()
        self._arena = shared_memory(size)
        if torch.cuda.is_available():
            try:
                pin_memory(self._arena.data_ptr(), self._arena.nbytes)
                self._pinned = True
            except RuntimeError as error:
                log.warning("the copy for saves is not pinned (%s): it takes longer", error)

    @torch.no_grad()
    def _copy(self, state: dict[str, Tensor], ready: torch.cuda.Event | None) -> dict[str, Any]:
        signature = _signature(state)
        if self._layout is None or signature != self._signature:
            new = layout_of(state)
            self._make_room(new.bytes)
            self._views = views(self._arena, new)
            self._layout, self._signature, self._sent = new, signature, False
        sources = [_local(tensor) for tensor in state.values()]
        if self._stream is None or ready is None:
            torch._foreach_copy_(self._views, sources)
        else:
            self._stream.wait_event(ready)
            with torch.cuda.stream(self._stream):
                torch._foreach_copy_(self._views, sources, non_blocking=self._pinned)
            self._stream.synchronize()
        layout, self._sent = (None if self._sent else self._layout), True
        return {"arena": self._arena, "layout": layout, "layout_name": self._layout.name}


def shared_memory(size: int) -> Tensor:
    """`size` bytes of shared memory, its pages mapped already; made where they stay, so it never takes twice the size.

    Raises:
        RuntimeError: there is not enough of it.
    """
    arena = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
    arena[:: mmap.PAGESIZE] = 0
    return arena


def _same_device() -> Callable[[], None] | None:
    """What gives the thread that copies this rank's GPU: each thread of a process begins with the first one."""
    return partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None


def views(arena: Tensor, layout: Layout) -> list[Tensor]:
    """The tensors of `layout` as views of the arena, each with a storage that ends where it ends: none is copied.

    DCP would clone a tensor whose storage is larger than itself.
    """
    if not layout.bytes:
        return [torch.empty(slot.shape, dtype=slot.dtype) for slot in layout.slots.values()]
    memory = (ctypes.c_char * layout.bytes).from_address(arena.data_ptr())
    return [
        torch.frombuffer(memory, dtype=slot.dtype, count=slot.shape.numel(), offset=slot.offset).view(slot.shape)
        if slot.shape.numel()
        else torch.empty(slot.shape, dtype=slot.dtype)
        for slot in layout.slots.values()
    ]
