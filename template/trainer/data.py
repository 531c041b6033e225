"""Samples by number, and the order in which a run takes them.

The order is a pure function: sample number g of the run is `perm(seed, epoch)[g mod n]` with `epoch = g div n`, so the
position in the data is one integer and does not depend on ranks, workers or prefetching. `build_dataset` is the place
to put your own data: anything with a length, an `identity` and `samples(numbers, epochs)` will do.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.batch import BatchPlan, MicroBatch
from trainer.config import Config, home
from trainer.outcome import ConfigError
from trainer.reclaim import worker_ignore_signals

# ---------------------------------------------------------------------------------------------------------------------
# The order of samples


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


def witness(positions: np.ndarray, numbers: np.ndarray) -> tuple[int, int]:
    """What was run, in two numbers that can be added up over micro-batches and ranks, in any order.

    Args:
        positions: in the global batch, int64 [n].
        numbers: the samples there, int64 [n].
    """
    mixed = _mix(_mix(numbers.astype(np.uint64)) + positions.astype(np.uint64))
    return int((mixed >> np.uint64(32)).sum()), int((mixed & np.uint64(0xFFFFFFFF)).sum())


def batch_hash(high: float, low: float) -> str:
    """Name of a global batch from the sums of `witness`: equal for the same samples in the same places."""
    return f"{int(high) % 2**32:08x}{int(low) % 2**32:08x}"


# ---------------------------------------------------------------------------------------------------------------------
# Where samples come from


class Samples(Protocol):
    """What the trainer needs of a dataset."""

    identity: dict[str, Any]  # goes into the fingerprint: a resume on other data is refused

    def __len__(self) -> int: ...

    def samples(self, numbers: np.ndarray, epochs: np.ndarray) -> torch.Tensor:
        """Tokens, int64 [len(numbers), sequence_length + 1]. Randomness may depend on (seed, epoch, number) only."""
        ...


class TokenSamples:
    """Windows of `sequence_length` + 1 tokens of one long array; one window in `stride` is held out for validation."""

    def __init__(self, tokens: np.ndarray, config: Config, identity: dict[str, Any], *, validation: bool) -> None:
        self.tokens, self.identity, self.validation = tokens, identity, validation
        self.window = config.data.sequence_length
        self.vocabulary = config.model.vocabulary
        self.stride = max(2, round(1 / config.data.validation_share))
        windows = (len(tokens) - 1) // self.window
        held_out = -(-windows // self.stride)
        self.length = held_out if validation else windows - held_out
        if self.length < 1:
            raise ConfigError(
                f"{config.data.path or 'the corpus'}: holds {len(tokens)} tokens; it must hold more than "
                f"{2 * self.window + 1} for data.sequence_length {self.window}"
            )

    def __len__(self) -> int:
        return self.length

    def samples(self, numbers: np.ndarray, epochs: np.ndarray) -> torch.Tensor:
        windows = numbers * self.stride if self.validation else numbers + numbers // (self.stride - 1) + 1
        starts = (windows * self.window)[:, None] + np.arange(self.window + 1)
        tokens = self.tokens[starts].astype(np.int64)
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < self.vocabulary:
                raise ConfigError(
                    f"a token is {token}; it must be from 0 to below model.vocabulary ({self.vocabulary})"
                )
        return torch.from_numpy(tokens)


def build_dataset(config: Config) -> tuple[Samples, Samples]:
    """Training and validation samples of `data.path`. The corpus has to be there: see `prepare_corpus`.

    Raises:
        ConfigError: no such file, too short, or of another format.
    """
    path, identity = _source(config)
    if path.suffix == ".npy":
        right = "one row of whole numbers, as numpy.save writes it"
        tokens = _mapped(path, right, lambda: np.load(path, mmap_mode="r", allow_pickle=False))
    else:
        is_tokens = config.data.path.endswith(".bin")
        dtype = config.data.token_dtype if is_tokens else "uint8"
        right = f"whole numbers of data.token_dtype {dtype}" if is_tokens else "text"
        tokens = _mapped(path, right, lambda: np.memmap(path, dtype=dtype, mode="r"))
    if path.suffix == ".npy" and (tokens.ndim != 1 or tokens.dtype.kind not in "iu"):
        raise ConfigError(f"{path}: holds {tokens.dtype} {tokens.shape}; it must be one row of whole numbers")
    made = [TokenSamples(tokens, config, identity, validation=held_out) for held_out in (False, True)]
    return made[0], made[1]


def _mapped(path: Path, right: str, read: Callable[[], np.ndarray]) -> np.ndarray:
    """What `read` maps of the file. Raises ConfigError: numpy cannot, it must hold what `right` says."""
    try:
        return read()
    except (ValueError, EOFError):
        raise ConfigError(f"{path}: cannot be mapped ({path.stat().st_size} bytes); it must hold {right}") from None


def prepare_corpus(config: Config) -> None:
    """Write the corpus once, beside the runs on the volume; later starts, on any Python, use that file.

    Needed where the samples are many small files: the standard library's source (the demo) or a folder of text.
    Call it on one rank and let the others wait.
    """
    target = _corpus_path(config)
    if target is None or target.exists():
        return
    files = _text_files(config)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            for file in files:
                out.write(file.read_bytes())
                out.write(b"\n")
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _corpus_path(config: Config) -> Path | None:
    """The prepared file, or None where `data.path` is a file that can be mapped as it is."""
    if not config.data.path:
        return config.checkpoint_root / "corpus" / "stdlib.txt"
    source = config.project / home(config.data.path)
    if source.is_dir():
        name = hashlib.blake2b(str(source.absolute()).encode(), digest_size=6).hexdigest()
        return config.checkpoint_root / "corpus" / f"{source.name}-{name}.txt"
    return None


def _text_files(config: Config) -> list[Path]:
    if not config.data.path:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(file.parts)]
    else:
        root = config.project / home(config.data.path)
        files = [file for file in root.rglob("*") if file.is_file() and not file.name.startswith(".")]
    if not files:
        raise ConfigError(f"{root}: holds no text; data.path must be a text file, a folder of them or a token file")
    return sorted(files)


def _source(config: Config) -> tuple[Path, dict[str, Any]]:
    path = _corpus_path(config) or config.project / home(config.data.path)
    if not path.is_file():
        where = f"data.path is {config.data.path!r}" if config.data.path else f"the corpus {path} is not there"
        raise ConfigError(f"{where}; it must be a text file, a folder of them, or a token file (.bin, .npy)")
    return path, {"data.bytes": path.stat().st_size, "data.hash": _hash(path)}


def _hash(path: Path, blocks: int = 64, block_bytes: int = 1 << 20) -> str:
    """A hash of the size and of evenly spread blocks: the same cost for a gigabyte and a terabyte."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    step = max(block_bytes, size // blocks)
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(block_bytes))
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# The loader of one rank


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank on its way to the model."""

    index: int  # its number in the global batch
    tokens: torch.Tensor  # int64 [micro_batch, sequence_length + 1]
    real: int  # the first `real` samples count, the rest is padding
    witness: tuple[int, int]  # of the samples that count


@dataclass(frozen=True)
class _Request:
    micro_batch: MicroBatch
    numbers: np.ndarray
    epochs: np.ndarray


class _Requests(Sampler[_Request]):
    """The micro-batches of one rank, step after step, from `consumed` samples on."""

    def __init__(self, order: SampleOrder, plan: BatchPlan, rank: int, consumed: int, steps: int) -> None:
        self.order, self.plan, self.consumed, self.steps = order, plan, consumed, steps
        self.mine = plan.of_rank(rank)

    def __iter__(self) -> Iterator[_Request]:
        for step in range(self.steps):
            start = self.consumed + step * self.plan.global_batch
            for micro_batch in self.mine:
                positions = start + np.asarray(micro_batch.positions, dtype=np.int64)
                yield _Request(micro_batch, *self.order.at(positions))


class _MicroBatches(Dataset[Batch]):
    def __init__(self, samples: Samples) -> None:
        self.source = samples

    def __getitem__(self, request: _Request) -> Batch:
        mine = request.micro_batch
        tokens = self.source.samples(request.numbers, request.epochs)
        ran = witness(np.asarray(mine.positions[: mine.real], dtype=np.int64), request.numbers[: mine.real])
        return Batch(mine.index, tokens, mine.real, ran)


def _as_is(batch: Any) -> Any:
    return batch


def loader(
    samples: Samples, config: Config, plan: BatchPlan, rank: int, *, consumed: int, steps: int, seed: int, workers: int
) -> Iterator[Sequence[Batch]]:
    """Yield, for each of `steps` optimizer steps after `consumed` samples, the micro-batches that `rank` runs.

    Its workers' seeds come from a generator of its own: a loader takes nothing from the streams of the user's code.
    """
    requests = _Requests(SampleOrder(len(samples), seed), plan, rank, consumed, steps)
    batches = iter(
        DataLoader(
            _MicroBatches(samples),
            batch_size=None,
            sampler=requests,
            collate_fn=_as_is,
            num_workers=workers,
            prefetch_factor=config.data.prefetch if workers else None,
            worker_init_fn=worker_ignore_signals,
            generator=torch.Generator().manual_seed(derive_seed("loader", seed, rank, consumed)),
            multiprocessing_context="fork" if workers else None,  # else the token file would be pickled
        )
    )
    for _ in range(steps):
        yield [next(batches) for _ in range(plan.micro_batches_per_rank)]
