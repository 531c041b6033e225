"""Windows of tokens by number, and the corpus that they are cut from."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.task import Config, ConfigError, home


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


def open_samples(config: Config, *, validation: bool) -> TokenSamples:
    """Training or validation samples of `data.path`. The corpus has to be there: see `prepare_corpus`.

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
    return TokenSamples(tokens, config, identity, validation=validation)


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
