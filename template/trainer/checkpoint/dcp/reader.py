"""From a verified checkpoint to tensors: strict about names, shapes and dtypes; nothing unverified is unpickled."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from trainer.checkpoint import commit as commits
from trainer.checkpoint import retention
from trainer.checkpoint.commit import Commit
from trainer.outcome import ConfigError, Damaged, UnavailableError

PER_RANK = "rng."  # names that not every rank asks for


class VerifiedReader(FileSystemReader):
    """Reads a checkpoint whose checksums have been compared already."""

    def __init__(self, commit: Commit, metadata: Metadata) -> None:
        super().__init__(commit.directory)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def read_metadata(commit: Commit) -> Metadata:
    """DCP's `.metadata`, unpickled only if the very bytes have the checksum that was committed.

    Raises:
        ConfigError: it lacks a tensor, or a part of one, that was saved.
        Damaged, UnavailableError
    """
    metadata = pickle.loads(commits.read_checked(commit, commit.metadata))
    if not isinstance(metadata, Metadata):
        raise Damaged(f"{commit.directory / commit.metadata}: not the metadata of a checkpoint")
    entries, places = metadata.state_dict_metadata, metadata.storage_data or {}
    missing = [name for name in commit.names if name not in entries]
    missing += [
        name
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
        and any(MetadataIndex(name, chunk.offsets) not in places for chunk in entry.chunks)
    ]
    if missing:
        raise ConfigError(
            f"{commit.directory} lacks {_shown(missing)}, and nothing is loaded in part: bring a good copy back there, "
            f"or remove it to go on from the one before"
        )
    return metadata


def load_into(target: dict[str, Any], commit: Commit, metadata: Metadata, group: Any) -> None:
    """Read the tensors of `target` in place, on all ranks of `group` together (None: this process alone).

    Raises:
        UnavailableError: the volume failed.
        RuntimeError: DCP failed otherwise.
    """
    try:
        with retention.reading(commit), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = VerifiedReader(commit, metadata)
            load(target, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # not an Exception: it derives from BaseException
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, OSError):
            raise UnavailableError(f"{commit.directory}: cannot be read ({cause}); nothing was changed") from cause
        raise RuntimeError(f"{commit.directory}: cannot be loaded: {cause!r}") from error


def refuse_differences(target: Mapping[str, Any], metadata: Metadata, commit: Commit) -> None:
    """Raise ConfigError, in one line, unless the checkpoint fits `target` exactly: names, shapes, dtypes."""
    saved = metadata.state_dict_metadata
    found = [f"{name} is missing from the checkpoint" for name in target if name not in saved]
    found += [f"{name} is in the checkpoint only" for name in saved if name not in target and name[:4] != PER_RANK]
    for name, tensor in target.items():
        if (entry := saved.get(name)) is None:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            found.append(f"{name} is not a tensor in the checkpoint")
        elif tuple(entry.size) != tuple(tensor.shape):
            found.append(f"{name} is {tuple(entry.size)} in the checkpoint and {tuple(tensor.shape)} here")
        elif entry.properties.dtype != tensor.dtype:
            found.append(f"{name} is {entry.properties.dtype} in the checkpoint and {tensor.dtype} here")
    if found:
        raise ConfigError(
            f"{commit.directory} does not fit the model: {_shown(found)}; "
            f"resume with the code and configuration that saved it"
        )


def _shown(found: Sequence[str]) -> str:
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def load_tensors(
    run_dir: Path, step: int | None = None, prefixes: Iterable[str] = ("",)
) -> tuple[dict[str, Tensor], int]:
    """Tensors of a checkpoint whose names begin with one of `prefixes`, whole and on the CPU, and its step.

    Needs no process group. Without `step` it is the newest checkpoint that verifies; nothing is renamed.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
        UnavailableError: the volume failed.
    """
    problems: list[str] = []
    for directory in commits.directories(run_dir):
        if step is not None and commits.step_of(directory.name) != step:
            continue
        try:
            commit = commits.read_commit(directory)
            with retention.reading(commit):
                commits.verify(commit)
                metadata = read_metadata(commit)
                target: dict[str, Any] = {
                    name: torch.empty(entry.size, dtype=entry.properties.dtype)
                    for name, entry in metadata.state_dict_metadata.items()
                    if isinstance(entry, TensorStorageMetadata) and name.startswith(tuple(prefixes))
                }
                load_into(target, commit, metadata, group=None)
            return target, commit.step
        except Damaged as damage:
            problems.append(str(damage))
    wanted = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
    raise ConfigError(f"{run_dir} holds no {wanted}" + (f": {'; '.join(problems)}" if problems else ""))
