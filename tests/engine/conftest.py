"""`ranks` is that of the tests that every project has; here what the ranks spawn costs milliseconds too."""

from __future__ import annotations

import os
from pathlib import Path

import ranks as shared
from ranks import ranks

__all__ = ["ranks"]

shared.PRELOADED.append("tests.engine.spares")
_FOUND_AT = (Path(__file__).resolve().parents[2], Path(shared.__file__).resolve().parent)  # the server has no conftest
os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, _FOUND_AT), os.environ.get("PYTHONPATH", "")])
