"""Rendered deploy files, and a light stand-in for the trainer behind them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from copier import run_copy

Deployed = Callable[..., Path]  # answers -> a rendered project

ALL_TARGETS = ["nexgpu", "vm", "slurm", "kubernetes", "skypilot", "dstack"]

ONSTART = """\
#!/usr/bin/env bash
cd -- "$(dirname -- "$0")/.." || exit 78
if [ "${1:-}" = --help ]; then touch set-up && exec sleep "${SETUP_S:-0}"; fi
exec python3 -u fake_trainer.py "$@"
"""

TRAINER = '''\
"""Counts steps and ends as the launcher promises: 0 finished, 75 stopped with its state saved, exit=N anything else.

Words: steps=N of the whole run, stop_after=N steps of the first start, exit=N at once.
"""

import os
import signal
import sys
import time
from pathlib import Path

words = dict(word.split("=", 1) for word in sys.argv[1:])
name = os.environ.get("SLURM_PROCID", "0")
state = Path(f"state-{name}")
step = int(state.read_text()) if state.exists() else 0
last = int(words.get("steps", 60))
pause = int(words.get("stop_after", 0)) if step == 0 else 0
signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
seen = []
for each in signals:
    signal.signal(each, lambda number, frame: seen.append(signal.Signals(number).name))
with open(f"events-{name}", "a", buffering=1) as events:
    print("started", step, *sys.argv[1:], file=events)
    if "exit" in words:
        sys.exit(int(words["exit"]))
    while step < last and not seen and not (pause and step >= pause):
        time.sleep(0.1)
        step += 1
    state.write_text(str(step))
    print("stopped", step, *seen, file=events)
for each in signals:
    signal.signal(each, signal.SIG_IGN)  # Python puts the default back at its end: one more would kill it
sys.exit(0 if step >= last else 75)
'''


def renderer(product: Path, folder: Path) -> Deployed:
    """A function that renders `product` for every target (or the answers' own), each set of answers once."""

    def render(**answers: Any) -> Path:
        data = {"project_name": "demo", "deploy_targets": ALL_TARGETS, **answers}
        target = rendered.setdefault(json.dumps(data, sort_keys=True), folder / str(len(rendered)) / "demo")
        if not target.exists():
            run_copy(str(product), target, data=data, defaults=True, quiet=True)
        return target

    rendered: dict[str, Path] = {}
    return render


def fake_project(folder: Path, rendered: Path) -> Path:
    """A project with the deploy files of `rendered` whose startup/onstart.sh starts the stand-in.

    Each task writes `events-RANK` ("started STEP WORDS…", "stopped STEP SIGNALS…") and keeps its step in `state-RANK`.
    """
    shutil.copytree(rendered / "deploy", folder / "deploy")
    (folder / "startup").mkdir()
    (folder / "startup/onstart.sh").write_text(ONSTART)
    (folder / "fake_trainer.py").write_text(TRAINER)
    return folder
