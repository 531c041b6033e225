"""Is a run the same, to the bit, on any number of ranks, killed and resumed or not; and what does a restart cost.

    python tests/benchmarks/resume_exactness.py [--steps 200] [--restarts 5] [--cost] [--json FILE]

Trains the same run (dropout, clipping, AdamW, averaged weights, evaluations, a last micro-batch that is smaller than
the others) on 1, 2, 3, 4, 5 and 8 CPU ranks, sharded and replicated, and once more from 8 to 3 to 5 to 1 ranks with
SIGKILL and SIGTERM between; and compiled, on 1 and 3. Every loss, gradient norm, learning rate, validation loss and
every tensor of the last checkpoint is compared with those of one rank; the first step and tensor that differ are named.

--restarts times `restart.sh` on one rank until the first new step is in the metrics, next to a bare script that does
what cannot be avoided: start Python, import torch, set up FSDP2, read the bytes, make one step. --cost compares steps
with and without `train.reproducible`, in alternating runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

TEMPLATE = Path(__file__).resolve().parents[2] / "template"
sys.path.insert(0, str(TEMPLATE))

from trainer.checkpoint.dcp.reader import load_tensors  # noqa: E402
from trainer.records import read_records  # noqa: E402
from trainer.steps import read_counting  # noqa: E402

SAVED = 20
LAYOUTS = [(1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "fsdp"), (5, "fsdp"), (8, "fsdp"), (3, "ddp"), (4, "hsdp")]
CHAIN = [(8, signal.SIGKILL), (3, signal.SIGTERM), (5, signal.SIGKILL), (1, None)]
SETTINGS = [
    "model.layers=2", "model.width=64", "model.heads=4", "model.dropout=0.1", "data.sequence_length=64",
    "data.global_batch=30", "data.micro_batch=4", "optim.warmup_steps=10", "optim.ema_decay=0.99",
    "train.eval_every_steps=50", "logging.tensorboard=false",
    "logging.every_steps=1000", "checkpoint.keep_last=1000", "volume.allow_ephemeral=true", "reclaim.notice=none",
]  # fmt: skip

BARE = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from trainer.config.load import load_config
from tasks.language_model import build_task
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
dist.init_process_group("gloo")
config = load_config(sys.argv[2:])
model = build_task(config).build_model()
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
        for part in ("trainer", "tasks"):
            shutil.copytree(TEMPLATE / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(TEMPLATE / "restart.sh", folder)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a machine that trains keeps what it has compiled

    def launch(self, name: str, ranks: int, steps: int, every: int, *more: str) -> None:
        """Run to `steps`."""
        self._popen(ranks, f"run.name={name}", f"train.steps={steps}", f"checkpoint.every_steps={every}", *more).wait()
        last = read_counting(self.runs / name)[-1].step
        assert last == steps, f"{name} ended after step {last}"

    def chain(self, name: str, steps: int, every: int) -> None:
        """Run to `steps` on the numbers of ranks of `CHAIN`, stopped by its signals on the way."""
        for number, (ranks, ending) in enumerate(CHAIN, start=1):
            process = self._popen(ranks, f"run.name={name}", f"train.steps={steps}", f"checkpoint.every_steps={every}")
            until = steps * number // len(CHAIN) + every // 2
            while ending and process.poll() is None:
                lines = read_counting(self.runs / name) if (self.runs / name / "metrics.jsonl").exists() else []
                if lines and lines[-1].step >= until:
                    everyone = [psutil.Process(process.pid)]
                    everyone += everyone[0].children(recursive=True) if ending is signal.SIGKILL else []
                    for one in everyone:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            one.send_signal(ending)
                    break
                time.sleep(0.05)
            process.wait()

    def branch(self, source: str, target: str, step: int) -> None:
        """A new run that has checkpoint `step` of another, and nothing else."""
        name = f"step_{step:08d}"
        shutil.copytree(self.runs / source / name, self.runs / target / name)

    def restart_s(self, name: str, *more: str) -> dict[str, float]:
        """`restart.sh` until the first new step, in seconds, and its parts."""
        began = time.time()
        process = self._popen(1, f"run.name={name}", *more)
        while not (lines := read_counting(self.runs / name)):
            time.sleep(0.01)
        ended = time.time()
        process.terminate()
        process.wait()
        assert lines[0].step == SAVED + 1
        events = {event["event"]: event for event in read_records(self.runs / name, "ledger")}
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


def bits(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What has to be equal: the lines that count, without times, and the last checkpoint."""
    counting = {(step.attempt, step.step) for step in read_counting(run_dir)}
    lines = [
        {name: value for name, value in line.items() if name not in ("seconds", "units_per_s", "attempt")}
        for line in sorted(read_records(run_dir, "metrics"), key=lambda line: line["step"])
        if (line["attempt"], line["step"]) in counting
    ]
    tensors, _ = load_tensors(run_dir)
    return lines, {name: value for name, value in tensors.items() if not name.startswith("rng.")}


def first_difference(one: Path, other: Path) -> str:
    """In words; empty where every number and tensor is the same."""
    (lines, tensors), (other_lines, other_tensors) = bits(one), bits(other)
    if len(lines) != len(other_lines) or tensors.keys() != other_tensors.keys():
        return f"{len(other_lines)} steps, {len(other_tensors)} tensors"
    for line, found in zip(lines, other_lines, strict=True):
        for name, value in line.items():
            if found.get(name) != value:
                return f"step {line['step']}: {name} {value!r} and {found.get(name)!r}"
    apart = [name for name, tensor in tensors.items() if not torch.equal(tensor, other_tensors[name])]
    return f"tensor {apart[0]} and {len(apart) - 1} more" if apart else ""


def step_costs(project: Project, ranks: int) -> dict[str, float]:
    """Median seconds of a step with and without reproducible sums, alternating runs."""
    seconds: dict[str, list[float]] = {"true": [], "false": []}
    for number in range(3):
        for value, found in seconds.items():
            name = f"cost_{ranks}_{number}_{value}"
            project.launch(name, ranks, 60, 1000, f"train.reproducible={value}", "train.eval_every_steps=0")
            found += [step.seconds for step in read_counting(project.runs / name)[5:]]
    return {value: statistics.median(found) for value, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=5)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"differences": {}, "restarts": []}
    with tempfile.TemporaryDirectory() as folder:
        project, last = Project(Path(folder) / "project"), arguments.steps
        for ranks, strategy in LAYOUTS if last else ():
            name = f"{strategy}_{ranks}"
            project.launch(name, ranks, last, SAVED, f"parallel.strategy={strategy}")
        if last:
            project.chain("chain", last, SAVED)
            for ranks in (1, 3):
                project.launch(f"compiled_{ranks}", ranks, last, SAVED, "train.compile=true")
        names = [*(f"{strategy}_{ranks}" for ranks, strategy in LAYOUTS[1:]), "chain", "compiled_3"]
        for name in names if last else ():
            reference = "compiled_1" if name == "compiled_3" else "fsdp_1"
            found = first_difference(project.runs / reference, project.runs / name)
            results["differences"][name] = found
            print(f"{name}, {last} steps: {found or 'equal to the last bit'}", flush=True)
        if arguments.restarts:
            project.launch("whole", 1, SAVED, SAVED)
        for number in range(arguments.restarts):
            project.branch("whole", f"restart_{number}", SAVED)
            one = project.restart_s(f"restart_{number}", f"train.steps={SAVED + 200}")
            one["bare_s"] = project.bare_s("whole")
            results["restarts"].append(one)
        if restarts := results["restarts"]:
            for name, pick in (("median", statistics.median), ("least", min)):
                figures = {part: round(pick([one[part] for one in restarts]), 2) for part in restarts[0]}
                results[f"restart_{name}"] = figures | {"ratio": round(figures["total_s"] / figures["bare_s"], 2)}
                print(f"restart.sh to the first new step, {name}: {results[f'restart_{name}']}")
        for ranks in (1, 2, 4) if arguments.cost else ():
            results[f"cost_{ranks}"] = cost = step_costs(project, ranks)
            print(f"{ranks} ranks, reproducible step: x {cost['true'] / cost['false']:.3f} of {cost['false']:.4f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
