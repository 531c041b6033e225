"""Two nodes, one, and two again: two launchers on one machine meet at a port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer
from trainer.config.load import load_config
from trainer.outcome import FINISHED, RECLAIMED
from trainer.records import read_records
from trainer.steps import read_counting

PROJECT = Path(trainer.__file__).resolve().parents[1]
STEPS = 60


class Nodes:
    """A run on any number of nodes with one rank each."""

    def __init__(self, folder: Path) -> None:
        self.settings = [
            f"checkpoint.dir={folder}", "run.name=run", "volume.allow_ephemeral=true", "checkpoint.every_steps=1000",
            f"data.path={folder / 'text.txt'}", "data.sequence_length=8", "data.global_batch=6", "data.micro_batch=2",
            "model.layers=1", "model.width=16", "model.heads=2", "model.dropout=0.1", "train.eval_every_steps=0",
            f"train.steps={STEPS}", "logging.tensorboard=false", "reclaim.notice=none", "reclaim.grace_s=60",
        ]  # fmt: skip
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []
        (folder / "text.txt").write_text("".join(f"{n} and {n * n}. " for n in range(3000)))

    @property
    def run_dir(self) -> Path:
        return load_config(self.settings, PROJECT).run_dir

    def start(self, count: int, *more: str) -> list[subprocess.Popen[bytes]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        nodes = []
        for rank in range(count):
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(rank), "NNODES": str(count)}
            log = (self.folder / f"log.{len(self.started)}").open("wb")
            command = [sys.executable, "-m", "trainer", "launch", "--gpus", "1", *self.settings, *more]
            nodes.append(
                subprocess.Popen(
                    command, cwd=PROJECT, env=os.environ | where, stdout=log, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
            self.started.append(nodes[-1])
        return nodes

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log.*")))

    def stop_after(self, step: int, nodes: list[subprocess.Popen[bytes]], node: int) -> list[int]:
        """SIGTERM to one node once `step` is in the metrics. Returns every node's exit code."""
        while not (lines := read_counting(self.run_dir)) or lines[-1].step < step:
            assert [one.poll() for one in nodes] == [None] * len(nodes), self.logs()
            time.sleep(0.05)
        nodes[node].send_signal(signal.SIGTERM)
        return [one.wait(timeout=120) for one in nodes]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_two_nodes_one_node_two_nodes(nodes: Nodes) -> None:
    assert nodes.stop_after(5, nodes.start(2), node=1) == [RECLAIMED, RECLAIMED], nodes.logs()
    assert nodes.stop_after(15, nodes.start(1), node=0) == [RECLAIMED], nodes.logs()
    assert [one.wait(timeout=180) for one in nodes.start(2)] == [FINISHED, FINISHED], nodes.logs()
    sizes = [
        event["world_size"] for event in read_records(nodes.run_dir, "ledger") if event["event"] == "attempt_started"
    ]
    assert sizes == [2, 1, 2]
    lines = read_counting(nodes.run_dir)
    assert [line.step for line in lines] == list(range(1, STEPS + 1))

    [whole] = nodes.start(1, "run.name=whole")
    assert whole.wait(timeout=180) == FINISHED, nodes.logs()
    expected = read_counting(nodes.run_dir.parent / "whole")
    for name in ("lr", "samples", "batch_hash"):
        assert [getattr(line, name) for line in lines] == [getattr(line, name) for line in expected]
    assert [line.loss for line in lines] == pytest.approx([line.loss for line in expected], rel=1e-6)
