"""The copy of the state that a save writes: one kept arena of shared memory, filled in the background.

Every save copies this rank's tensors into the same arena, side by side, and hands the writer process the arena (one
file descriptor, whatever the number of tensors) instead of the tensors. Names, shapes and DCP's local plan form the
layout, which crosses over only when it has changed. The copy runs in a thread, overlapped with the next forward and
backward; the training loop waits for it before the optimizer changes anything.

The planner below is the other end: in the writer process it cuts the arena into tensors again, without copying.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
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

    token: str  # tells layouts apart, also those of two processes
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
        TypeError: a value is no tensor; names it. Anything else would have to be unpickled on load.
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
        self._known = False  # whether the writer process has the layout
        self._views: list[Tensor] = []
        self.copied: Future[dict[str, Any]] | None = None

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """Start copying the flat state dict under `STATE`, which may change once `copied` is done.

        The state is one value of a dict, since DCP goes about each value of what it is given in the training loop, at
        a tenth of a millisecond each. The result of `copied` is what the planner below takes.
        """
        ready = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self.copied = self._thread.submit(self._copy, state_dict[STATE], ready)
        return self.copied

    def synchronize_staging(self) -> None:
        if self.copied is not None:
            self.copied.result()

    def forget(self) -> None:
        """The writer process is a new one: tell it the layout again."""
        self._known = False

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._let_go()

    def _let_go(self) -> None:
        self._views, self._layout = [], None
        if self._pinned:
            unpin_memory(self._arena.data_ptr())
        self._arena, self._pinned = torch.empty(0, dtype=torch.uint8), False

    def _make_room(self, size: int) -> None:
        """An arena of `size` bytes at least, pinned for the GPU where there is one."""
        if self._arena.nbytes >= size:
            return
        self._let_go()
        self._arena = _shared(size)
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
            self._views = cut(self._arena, new)
            self._layout, self._signature, self._known = new, signature, False
        sources = [_local(tensor) for tensor in state.values()]
        if self._stream is None or ready is None:
            torch._foreach_copy_(self._views, sources)
        else:
            self._stream.wait_event(ready)
            with torch.cuda.stream(self._stream):
                torch._foreach_copy_(self._views, sources, non_blocking=self._pinned)
            self._stream.synchronize()
        layout, self._known = (None if self._known else self._layout), True
        return {"arena": self._arena, "layout": layout, "token": self._layout.token}


def _shared(size: int) -> Tensor:
    """`size` bytes of shared memory, its pages there already."""
    arena = torch.zeros(size, dtype=torch.uint8)
    arena.share_memory_()
    return arena


def _same_device() -> Callable[[], None] | None:
    """What gives the thread that copies this rank's GPU: each thread of a process begins with the first one."""
    return partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None


def cut(arena: Tensor, layout: Layout) -> list[Tensor]:
    """The tensors of `layout` as views of the arena, each with a storage that ends where it ends: none is copied."""
    if not layout.bytes:
        return [torch.empty(slot.shape, dtype=slot.dtype) for slot in layout.slots.values()]
    memory = (ctypes.c_char * layout.bytes).from_address(arena.data_ptr())
    return [
        torch.frombuffer(memory, dtype=slot.dtype, count=slot.shape.numel(), offset=slot.offset).view(slot.shape)
        if slot.shape.numel()
        else torch.empty(slot.shape, dtype=slot.dtype)
        for slot in layout.slots.values()
    ]


def _bytes_of(arena: Tensor, layout: Layout) -> dict[str, memoryview]:
    memory = memoryview((ctypes.c_char * arena.nbytes).from_address(arena.data_ptr())).cast("B")
    return {
        name: memory[slot.offset : slot.offset + slot.shape.numel() * slot.dtype.itemsize]
        for name, slot in layout.slots.items()
    }


@dataclass
class _Received:
    """What the writer process keeps between saves."""

    layout: Layout
    arena: Tensor
    tensors: dict[str, Tensor]
    numbers: dict[str, memoryview]  # of each tensor, as bytes


_received: _Received | None = None


class StayingMetadata(Metadata):
    """The metadata of a save, which stays where it is: DCP would send it to every process, and none needs it there."""

    def __reduce__(self) -> Any:
        return Metadata, ({},)


class ArenaPlanner(DefaultSavePlanner):
    """Plans a save of what `ArenaStager` staged. Take a new one for each save: plans are cached in the process.

    DCP's own comparison of a plan with the cached one does not look at dtypes; here a plan is unchanged when its layout
    is the very same, so that none of the cache's known traps is met. The private names of torch are used in this class
    alone; `tests/test_checkpoint_torch.py` says what to do when they move.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=True, enable_plan_caching=True)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        global _received
        arena, layout, token = state_dict["arena"], state_dict["layout"], state_dict["token"]
        if layout is None:
            if _received is None or _received.layout.token != token:
                raise RuntimeError("the writer process does not know the layout of what it is to write")
            layout = _received.layout
        if _received is None or _received.layout is not layout or _received.arena.data_ptr() != arena.data_ptr():
            tensors = dict(zip(layout.slots, cut(arena, layout), strict=True))
            _received = _Received(layout, arena, tensors, _bytes_of(arena, layout))
        self._save = _received
        self.is_coordinator = is_coordinator
        self.state_dict = dict(_received.tensors)
        self.mappings = layout.plan.planner_data

    def create_local_plan(self) -> SavePlan:
        self.plan = self._save.layout.plan
        if SavePlanner._cached_save_plan.get(self._cached_plans_key) is self.plan:
            return SavePlan([], usable=False)
        self._pending_local_plan = self.plan
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, StayingMetadata(**vars(metadata))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._save.tensors[write_item.index.fqn]

    def resolve(self, item: WriteItem) -> tuple[Tensor, memoryview]:
        """The tensor of `item`, and its numbers as bytes."""
        name = item.index.fqn
        return self._save.tensors[name], self._save.numbers[name]
