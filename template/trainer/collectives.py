"""Work that may fail on one rank alone, and whose outcome all ranks have to share: else the others would wait forever.

An error of the volume becomes UnavailableError, what was raised on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from trainer.outcome import ConfigError, Damaged, UnavailableError

T = TypeVar("T")


def run_on_rank0(group: dist.ProcessGroup, work: Callable[[], T]) -> T:
    """What `work` returns or raises on rank 0, on all ranks of `group`."""
    box: list[Any] = [_attempt(work)] if dist.get_rank(group) == 0 else [None]
    dist.broadcast_object_list(box, src=0, group=group)
    value, error = box[0]
    if error is not None:
        raise error
    return cast(T, value)


def run_on_all(group: dist.ProcessGroup, work: Callable[[], T]) -> T:
    """What `work` returns on this rank; an error of the first rank that has one is raised on all."""
    value, error = _attempt(work)
    if first := next((other for other in gather(group, error) if other is not None), None):
        raise first
    return cast(T, value)


def gather(group: dist.ProcessGroup, value: T) -> list[T]:
    """The `value` of every rank."""
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except (ConfigError, UnavailableError) as error:
        return None, error
    except Damaged as damage:
        return None, UnavailableError(f"{damage}; it was intact a moment ago: start again")
    except OSError as error:
        return None, UnavailableError(f"the volume failed ({error}); nothing was changed")
