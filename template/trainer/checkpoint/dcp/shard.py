"""One rank's shard file: the bytes that torch.save would write, tensor after tensor, the checksum taken on the way.

What torch.save writes around the raw bytes of a tensor depends on its dtype and shape alone, so it is made once and
kept: a shard of 500 tensors below `LARGE_BYTES` is then written in half the CPU seconds, one of 10,000 in an eighth.
The disk is kept busy from the first megabytes on, so that the fsync at the end finds little left to do.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from trainer.checkpoint.commit import ALGORITHM, FileSum

LARGE_BYTES = 1 << 20  # from here on the cost of a torch.save does not matter
WRITEBACK_BYTES = 16 << 20


@dataclass(frozen=True)
class ShardReport:
    """What one rank wrote, on its way to rank 0 in place of DCP's write results."""

    name: str
    file: FileSum
    parts: list[WriteResult]  # where in the file each tensor lies


def write_shard(path: Path, items: Sequence[WriteItem], resolve: Callable[[WriteItem], Tensor]) -> ShardReport:
    """Write the tensors of `items`, one after the other, into a new file and fsync it.

    Args:
        resolve: gives the tensor of an item, with a storage of its own size: torch.save writes whole storages.

    Raises:
        OSError
    """
    parts = []
    with without_crc(), ShardStream(path) as stream:
        for item in items:
            begin, tensor = stream.position, resolve(item)
            envelope = envelope_of(tensor.dtype, tensor.shape) if tensor.nbytes < LARGE_BYTES else None
            if envelope is None:
                torch.save(tensor, cast(IO[bytes], stream))
            else:
                stream.write(envelope[0])
                stream.write(tensor.reshape(-1).view(torch.uint8).numpy())
                stream.write(envelope[1])
            length = stream.position - begin
            parts.append(WriteResult(item.index, length, _StorageInfo(path.name, begin, length)))
        return ShardReport(path.name, stream.finish(), parts)


@functools.cache
def envelope_of(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes] | None:
    """What torch.save writes before and after the raw bytes of such tensors; None if it depends on those after all."""
    size, saved = shape.numel() * dtype.itemsize, []
    for value in (0, 1):
        stream = io.BytesIO()
        torch.save(torch.full((size,), value, dtype=torch.uint8).view(dtype).view(shape), stream)
        saved.append(stream.getvalue())
    zeros, ones = saved
    start = next((at for at, pair in enumerate(zip(zeros, ones, strict=False)) if pair[0] != pair[1]), len(zeros))
    before, after = zeros[:start], zeros[start + size :]
    exact = all(before + bytes([value]) * size + after == saved[value] for value in (0, 1))
    return (before, after) if exact else None


@contextlib.contextmanager
def without_crc() -> Iterator[None]:
    """torch.save leaves its own CRC-32 out inside: every byte has a better checksum in COMMIT.json."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class ShardStream(io.IOBase):
    """A file being written from its beginning to its end. torch.save flushes after each tensor, which does nothing."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=1 << 20)
        self._digest = xxhash.xxh3_128()
        self._sent = self.position = 0

    def write(self, content: Any) -> int:
        self._digest.update(content)
        count = self._file.write(content)
        self.position += count
        if self.position - self._sent >= WRITEBACK_BYTES:
            self._start_writeback()
        return count

    def _start_writeback(self) -> None:
        """Have the kernel begin to write; pages that are not written yet stay in memory."""
        self._file.flush()
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(self._file.fileno(), self._sent, self.position - self._sent, os.POSIX_FADV_DONTNEED)
        self._sent = self.position

    def finish(self) -> FileSum:
        """Make the file durable. Returns its size and checksum."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileSum(self.position, ALGORITHM, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()
        super().close()
