"""One rank's shard file: the bytes that torch.save would write, tensor after tensor, without its cost for each.

What torch.save writes around a tensor's numbers depends on its dtype and shape alone, so it is made once and kept. The
checksum is taken on the way, and the disk is kept busy from the first megabytes on, so that the fsync at the end finds
little left to do.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

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
class Envelope:
    """What stands before and after the numbers of a tensor."""

    before: bytes
    after: bytes


_envelopes: dict[tuple[torch.dtype, torch.Size], Envelope | None] = {}


def write_shard(
    path: Path, items: Sequence[WriteItem], resolve: Callable[[WriteItem], tuple[Tensor, memoryview]]
) -> tuple[list[int], FileSum]:
    """Write the tensors of `items`, one after the other, into a new file and fsync it.

    Args:
        resolve: gives each tensor (with a storage of its own size) and its numbers as bytes.

    Returns:
        Where in the file each item ends, in bytes, and the file's checksum.

    Raises:
        OSError
    """
    ends = []
    with without_crc(), ShardStream(path) as stream:
        for item in items:
            tensor, numbers = resolve(item)
            envelope = None if len(numbers) >= LARGE_BYTES else envelope_of(tensor.dtype, tensor.shape)
            if envelope is None:
                torch.save(tensor, cast(IO[bytes], stream))
            else:
                stream.write(envelope.before)
                stream.write(numbers)
                stream.write(envelope.after)
            ends.append(stream.position)
        return ends, stream.finish()


def places(name: str, items: Sequence[WriteItem], ends: Sequence[int]) -> list[WriteResult]:
    """Where each item lies in the file `name`, as DCP's metadata has it."""
    return [
        WriteResult(item.index, end - begin, _StorageInfo(name, begin, end - begin))
        for item, begin, end in zip(items, [0, *ends], ends, strict=False)
    ]


def envelope_of(dtype: torch.dtype, shape: torch.Size) -> Envelope | None:
    """The envelope of such tensors; None if what torch.save writes around the numbers depends on them after all."""
    key = (dtype, shape)
    if key not in _envelopes:
        zeros, ones = (_saved(value, dtype, shape) for value in (b"\0", b"\1"))
        size = shape.numel() * dtype.itemsize
        start = next((at for at, pair in enumerate(zip(zeros, ones, strict=False)) if pair[0] != pair[1]), len(zeros))
        split = Envelope(zeros[:start], zeros[start + size :])
        exact = all(
            split.before + value * size + split.after == whole for value, whole in ((b"\0", zeros), (b"\1", ones))
        )
        _envelopes[key] = split if exact else None
    return _envelopes[key]


def _saved(value: bytes, dtype: torch.dtype, shape: torch.Size) -> bytes:
    stream = io.BytesIO()
    size = shape.numel() * dtype.itemsize
    tensor = torch.frombuffer(bytearray(value * size), dtype=dtype) if size else torch.empty(0, dtype=dtype)
    torch.save(tensor.view(shape), stream)
    return stream.getvalue()


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
    """A file being written from its beginning to its end."""

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

    def tell(self) -> int:
        return self.position

    def writable(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
