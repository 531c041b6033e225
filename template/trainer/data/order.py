"""The order in which a run takes its samples: a pure function of the seed and a position.

Sample number g of the run is `perm(seed, epoch)[g mod n]` with `epoch = g div n`, so the position in the data is one
integer and does not depend on ranks, workers or prefetching.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


def permute(numbers: np.ndarray, length: int, key: int) -> np.ndarray:
    """Map each of `numbers` (int64, 0 ≤ number < length) by a permutation of range(length) chosen by `key`.

    A Feistel network with cycle walking (Black and Rogaway 2002): no table, so a billion samples cost nothing.
    """
    half = max(1, (max(length - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    rounds = [np.uint64(word) for word in _words(key, 4)]
    out = numbers.astype(np.uint64)
    walking = np.ones(len(out), dtype=bool)
    while walking.any():
        value = out[walking]
        left, right = value >> np.uint64(half), value & mask
        for word in rounds:
            left, right = right, left ^ (_mix(right ^ word) & mask)
        out[walking] = (left << np.uint64(half)) | right
        walking = out >= length
    return out.astype(np.int64)


def _words(key: int, count: int) -> list[int]:
    digest = hashlib.blake2b(str(key).encode(), digest_size=8 * count).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(count)]


def _mix(value: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014), elementwise on uint64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: np.ndarray = value ^ (value >> np.uint64(31))
    return out


def derive_seed(*parts: int | str) -> int:
    """A seed (0 ≤ seed < 2⁶³) that is a function of `parts` alone, such as (seed, step, micro-batch)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class SampleOrder:
    """The samples of a run in order, of a dataset with `length` samples."""

    length: int
    seed: int

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sample numbers and epochs (int64, the shape of `positions`) at these positions of the run."""
        epochs = positions // self.length
        within = positions % self.length
        numbers = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            numbers[chosen] = permute(within[chosen], self.length, derive_seed("order", self.seed, int(epoch)))
        return numbers, epochs

    def global_batch(self, consumed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The global batch that follows `consumed` samples: sample numbers and epochs, each int64 [size]."""
        return self.at(np.arange(consumed, consumed + size, dtype=np.int64))


def batch_checksum(positions: np.ndarray, numbers: np.ndarray) -> tuple[int, int]:
    """What was run, in two numbers that can be added up over micro-batches and ranks, in any order.

    Args:
        positions: in the global batch, int64 [n].
        numbers: the samples there, int64 [n].
    """
    mixed = _mix(_mix(numbers.astype(np.uint64)) + positions.astype(np.uint64))
    return int((mixed >> np.uint64(32)).sum()), int((mixed & np.uint64(0xFFFFFFFF)).sum())


def batch_hash(high: float, low: float) -> str:
    """Name of a global batch from the sums of `batch_checksum`: equal for the same samples in the same places."""
    return f"{int(high) % 2**32:08x}{int(low) % 2**32:08x}"
