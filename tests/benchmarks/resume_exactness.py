"""How far a resumed run is from one that was never interrupted, and what a restart costs.

    python tests/benchmarks/resume_exactness.py [--steps 200] [--restarts 5] [--json FILE]

Trains on 8 CPU ranks, saves step 20 and goes on for `--steps`; then resumes from that very checkpoint on 8, 4, 3 and
1 ranks and compares every step. Then times `restart.sh` on one rank until the first new step is in the metrics, next
to a bare script that does what cannot be avoided: start Python, import torch, set up FSDP2, read the bytes, one step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).resolve().parents[2] / "template"
sys.path.insert(0, str(TEMPLATE))

from trainer.ledger import read_ledger  # noqa: E402
from trainer.metrics import read_metrics  # noqa: E402

SAVED = 20
SETTINGS = [
    "model.layers=2", "model.width=64", "model.heads=4", "data.sequence_length=64", "data.global_batch=32",
    "data.micro_batch=4", "optim.warmup_steps=10", "train.eval_every_steps=0", "logging.tensorboard=false",
    "logging.every_steps=1000", "checkpoint.keep_last=1000", "volume.allow_ephemeral=true", "reclaim.notice=none",
]  # fmt: skip

BARE = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from trainer.config.load import load_config
from tasks.language_model.model import build_model
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
dist.init_process_group("gloo")
config = load_config(sys.argv[2:])
model = build_model(config)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for file in Path(sys.argv[1]).iterdir():
    file.read_bytes()
for _ in range(config.data.global_batch // config.data.micro_batch):
    model(torch.zeros(config.data.micro_batch, config.data.sequence_length, dtype=torch.int64)).sum().backward()
optimizer.step()
os._exit(0)
"""


class Project:
    """A copy of the trainer with a folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "checkpoints"
        shutil.copytree(TEMPLATE / "trainer", folder / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(TEMPLATE / "restart.sh", folder)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a machine that trains keeps what it has compiled

    def launch(self, name: str, ranks: int, steps: int, every: int) -> list[dict[str, Any]]:
        """Run to `steps`; the lines of the metrics."""
        self._popen(ranks, f"run.name={name}", f"train.steps={steps}", f"checkpoint.every_steps={every}").wait()
        lines = read_metrics(self.runs / name)
        assert lines[-1]["step"] == steps, f"{name} ended after step {lines[-1]['step']}"
        return lines

    def branch(self, source: str, target: str, step: int) -> None:
        """A new run that has checkpoint `step` of another, and nothing else."""
        name = f"step_{step:08d}"
        shutil.copytree(self.runs / source / name, self.runs / target / name)

    def restart_s(self, name: str, *more: str) -> dict[str, float]:
        """`restart.sh` until the first new step, in seconds, and its parts."""
        began = time.time()
        process = self._popen(1, f"run.name={name}", *more)
        while not (lines := read_metrics(self.runs / name)):
            time.sleep(0.01)
        ended = time.time()
        process.terminate()
        process.wait()
        assert lines[0]["step"] == SAVED + 1
        events = {event["event"]: event for event in read_ledger(self.runs / name)}
        started, load_s = events["attempt_started"]["time"], events["resumed"]["load_s"]
        return {
            "total_s": ended - began,
            "until_loading_s": started - load_s - began,
            "loading_s": load_s,
            "first_step_s": ended - started,
        }

    def bare_s(self, name: str, *more: str) -> float:
        """The bare script, in seconds."""
        began = time.time()
        source = self.runs / name / f"step_{SAVED:08d}"
        subprocess.run(
            [sys.executable, "-c", BARE, str(source), *SETTINGS, *more],
            cwd=self.folder, env=self.environment, check=True,
        )  # fmt: skip
        return time.time() - began

    def _popen(self, ranks: int, *more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["./restart.sh", "--gpus", str(ranks), *SETTINGS, *more],
            cwd=self.folder, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def difference(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the steps that both have."""
    by_step = {line["step"]: line for line in expected}
    pairs = [(by_step[line["step"]], line) for line in found]
    return {
        "steps": len(pairs),
        "loss": max(abs(two["loss"] - one["loss"]) / one["loss"] for one, two in pairs),
        "grad_norm": max(abs(two["grad_norm"] - one["grad_norm"]) / one["grad_norm"] for one, two in pairs),
        "same_samples": all(one["batch_hash"] == two["batch_hash"] for one, two in pairs),
        "same_rates": all(one["lr"] == two["lr"] for one, two in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="compared after the resume")
    parser.add_argument("--ranks", type=int, default=8, help="of the uninterrupted run")
    parser.add_argument("--resume", type=int, nargs="*", default=[8, 4, 3, 1])
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"resumes": {}, "restarts": []}
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder) / "project")
        last = SAVED + arguments.steps
        whole = project.launch("whole", arguments.ranks, last, SAVED)
        for ranks in arguments.resume:
            project.branch("whole", f"on_{ranks}", SAVED)
            found = difference(whole, project.launch(f"on_{ranks}", ranks, last, last))
            results["resumes"][ranks] = found
            print(f"{arguments.ranks} -> {ranks} ranks: {found}", flush=True)
        for number in range(arguments.restarts):
            project.branch("whole", f"restart_{number}", SAVED)
            one = project.restart_s(f"restart_{number}", f"train.steps={last}")
            one["bare_s"] = project.bare_s("whole")
            results["restarts"].append(one)
        if restarts := results["restarts"]:
            for name, pick in (("median", statistics.median), ("least", min)):
                figures = {part: round(pick([one[part] for one in restarts]), 2) for part in restarts[0]}
                results[f"restart_{name}"] = figures | {"ratio": round(figures["total_s"] / figures["bare_s"], 2)}
                print(f"restart.sh to the first new step, {name}: {results[f'restart_{name}']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
