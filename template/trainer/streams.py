"""Standard streams whose reader may go away: a dead `tee`, a closed terminal or a full disk must not stop training."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

_GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe, a terminal


class SafeStream:
    """A text stream that drops what cannot be written; in everything else it is the stream that it wraps."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        if error.errno in _GONE:  # for good: what is buffered would fail again at exit
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def make_streams_safe() -> None:
    """First thing in a process: no standard stream is missing, and none of them can raise an OSError when written to.

    A descriptor 0, 1 or 2 that is closed would be given to the next file that is opened, a checkpoint for example.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = Path(os.devnull).open("w")  # noqa: SIM115
        if not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))
