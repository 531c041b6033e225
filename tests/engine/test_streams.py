"""Standard streams that are closed, full, or whose reader is gone: the work goes on, and so does the exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trainer

PROJECT = Path(trainer.__file__).resolve().parents[1]
CODE = """
import sys
from trainer.streams import make_streams_safe
make_streams_safe()
for number in range(20000):
    print("a line of some length", number, flush=number % 100 == 0)
    print("and one for the other", number, file=sys.stderr)
opened = open(sys.argv[1], "w")
assert opened.fileno() > 2, "a file must not take the place of a stream"
opened.write("done")
opened.close()
sys.exit(75)
"""


@pytest.mark.parametrize("streams", [">&- 2>&- <&-", "2>&-", ">/dev/full 2>&1", "2>&1 | head -n 1", "2>&1 | true"])
def test_nobody_has_to_read_what_is_said(tmp_path: Path, streams: str) -> None:
    command = f'"$0" -c "$1" done {streams}; exit ${{PIPESTATUS[0]}}'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable, CODE],
        cwd=tmp_path, env={"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 75, ended.stderr
    assert (tmp_path / "done").read_text() == "done"
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr
