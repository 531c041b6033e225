"""The arena that saves copy into."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import trainer

PEAK = """
import re
from pathlib import Path
from trainer.checkpoint.dcp.stager import shared_memory

def peak() -> int:
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = peak()
arena = shared_memory(256 << 20)
assert arena.is_shared() and arena.nbytes == 256 << 20 and int(arena.max()) == 0
print((peak() - before) / (256 << 10))
"""


def test_the_arena_takes_its_size_once_and_not_twice() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(trainer.__file__).resolve().parents[1])}
    done = subprocess.run([sys.executable, "-c", PEAK], env=environment, capture_output=True, text=True, check=True)
    assert 0.99 < float(done.stdout) < 1.1
