"""In the writer process: the arena that `stager.py` filled, as tensors again, without copying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from trainer.checkpoint.dcp.stager import Layout, views


@dataclass
class _Received:
    """What the writer process keeps between saves."""

    layout: Layout
    arena: Tensor
    tensors: dict[str, Tensor]


_received: _Received | None = None


class LocalMetadata(Metadata):
    """The metadata of a save, kept on rank 0: DCP would send it to every process, and none needs it there."""

    def __reduce__(self) -> Any:
        return Metadata, ({},)


class ArenaPlanner(DefaultSavePlanner):
    """Plans a save of what `ArenaStager` staged. Take a new one for each save: plans are cached in the process.

    DCP's own comparison of a plan with the cached one does not look at dtypes; here a plan is unchanged when its layout
    is the same object, so that the cache's known faults do not matter.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=True, enable_plan_caching=True)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        global _received
        arena, layout, name = state_dict["arena"], state_dict["layout"], state_dict["layout_name"]
        if layout is None:
            if _received is None or _received.layout.name != name:
                raise RuntimeError("the writer process does not know the layout of what it is to write")
            layout = _received.layout
        if _received is None or _received.layout is not layout or _received.arena.data_ptr() != arena.data_ptr():
            tensors = dict(zip(layout.slots, views(arena, layout), strict=True))
            _received = _Received(layout, arena, tensors)
        self.is_coordinator = is_coordinator
        self.plan = layout.plan
        self.state_dict = dict(_received.tensors)
        self.mappings = layout.plan.planner_data

    def create_local_plan(self) -> SavePlan:
        if SavePlanner._cached_save_plan.get(self._cached_plans_key) is self.plan:
            return SavePlan([], usable=False)
        self._pending_local_plan = self.plan
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, LocalMetadata(**vars(metadata))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.state_dict[write_item.index.fqn]
