"""How often does the order of summing fp32 numbers in float64 show, once the sum is rounded to fp32?

    python tests/benchmarks/float64_sums.py [--sums 1e9] [--terms 16] [--seed 0]

This is the claim behind `train.reproducible`: gradients of micro-batches and ranks are summed in float64 and rounded
once. A float64 has 53 bits and an fp32 number 24, so a sum of n numbers is exact, whatever the order, while the largest
and the last bit of the smallest are no more than 2^(53 - log2 n) apart. Each kind of numbers below is summed twice, in
order and in another order and grouping, and the roundings are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

BATCH = 1 << 16  # sums at a time


def like_gradients(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Normal numbers of one scale for each sum."""
    return random.normal(size=shape) * np.exp2(random.integers(-30, 10, (shape[0], 1)))


def wide(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Exponents over 24 bits: the smallest terms are a ten-millionth of the largest."""
    return random.uniform(-1, 1, shape) * np.exp2(random.integers(-24, 1, shape))


def very_wide(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Exponents over 60 bits: more than a float64 holds."""
    return random.uniform(-1, 1, shape) * np.exp2(random.integers(-60, 1, shape))


def cancelling(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Half of the terms are the others with the opposite sign, nearly: what is left is a millionth of them."""
    half = random.normal(size=(shape[0], shape[1] // 2))
    other = -half * (1 + np.exp2(-20) * random.normal(size=half.shape))
    return np.concatenate((half, other), axis=1)


def at_midpoints(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Sums that lie halfway between two fp32 numbers, but for terms of 2^-40 of them."""
    base = random.uniform(1, 2, (shape[0], 1)).astype(np.float32).astype(np.float64)
    half_a_bit = np.full_like(base, 2.0**-24)
    small = random.uniform(-1, 1, (shape[0], shape[1] - 2)) * 2.0**-40
    return np.concatenate((base, half_a_bit, small), axis=1)


KINDS: tuple[Callable[[np.random.Generator, tuple[int, int]], np.ndarray], ...] = (
    like_gradients, wide, very_wide, cancelling, at_midpoints,
)  # fmt: skip


def differences(numbers: np.ndarray, random: np.random.Generator) -> int:
    """How many of the sums (rows of fp32 numbers) round to another fp32 number in another order and grouping."""
    terms = numbers.astype(np.float32).astype(np.float64)
    shuffled = terms[:, random.permutation(terms.shape[1])]
    in_order = np.add.accumulate(terms, axis=1)[:, -1]
    cut = int(random.integers(1, terms.shape[1]))  # two ranks, each with a sum of its own
    parts = [np.add.accumulate(part, axis=1)[:, -1] for part in (shuffled[:, :cut], shuffled[:, cut:])]
    return int((in_order.astype(np.float32) != (parts[0] + parts[1]).astype(np.float32)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sums", type=float, default=1e9, help="over all kinds")
    parser.add_argument("--terms", type=int, default=16, help="of each sum, such as micro-batches times ranks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    rounds = max(1, int(arguments.sums / len(KINDS) / BATCH))
    for kind in KINDS:
        began = time.monotonic()
        found = sum(differences(kind(random, (BATCH, arguments.terms)), random) for _ in range(rounds))
        count = rounds * BATCH
        print(
            f"{kind.__name__:<15} {count:>13,} sums of {arguments.terms}: {found:>6} differ "
            f"({found / count:.1e}) in {time.monotonic() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
