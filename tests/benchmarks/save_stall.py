"""What a save costs: seconds that training stands still, seconds until it is durable, slower steps, memory.

    python tests/benchmarks/save_stall.py --ranks 2 --megabytes 478 --output stall.png

Every way of saving writes the same state (sharded parameters, AdamW's two moments and its counters) from the same
loop over gloo. `--load spare` is a step as on a GPU: 10 ms of Python, 40 ms in which a core is free, one small
reduction; `--load busy` keeps a core per rank busy for 50 ms. The stall is the call and the wait before the optimizer.
The floor is one memcpy of a rank's bytes, and one write with fsync of the same bytes, by all ranks at once.
Figures are those of the slowest rank: of the first save, and medians over the others.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from concurrent.futures import Future
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).resolve().parents[2] / "template"
sys.path.insert(0, str(TEMPLATE))

QUIET_STEPS = 10  # between two saves: what the steps meanwhile are compared with


# ---------------------------------------------------------------------------------------------------------------------
# What is saved


class State:
    """A flat state of `total_bytes` over all ranks, in about `tensors` tensors on each."""

    def __init__(self, total_bytes: float, tensors: int) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        self.step = self.samples = 0
        self.fingerprint: dict[str, Any] = {}
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parameters = max(1, tensors // 4)
        columns = 256
        rows = max(1, int(total_bytes / 12 / parameters / columns / dist.get_world_size()))  # of this rank
        self.tensors: dict[str, torch.Tensor] = {}
        self.local: list[torch.Tensor] = []
        for index in range(parameters):
            for kind in ("model", "optim.exp_avg", "optim.exp_avg_sq"):
                local = torch.ones(rows, columns)
                self.local.append(local)
                self.tensors[f"{kind}.{index}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            self.local.append(torch.tensor(1.0))
            self.tensors[f"optim.step.{index}"] = self.local[-1]
        self.bytes = sum(tensor.nbytes for tensor in self.local)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def target(self, saved: Any) -> dict[str, Any]:
        return self.state_dict()

    def loaded(self) -> None:
        pass


# ---------------------------------------------------------------------------------------------------------------------
# Ways of saving it


class Way(ABC):
    """One way of saving. `start` returns the futures of the copy and of the save; a synchronous one returns none."""

    label = ""

    def __init__(self, state: State, place: Path) -> None:
        import torch.distributed as dist

        self.state, self.place, self.directory = state, place, place
        self.group = dist.new_group(backend="gloo")
        self.ended = 0.0  # time.perf_counter() of the end of the save
        self.staging: Future[Any] | None = None
        self.future: Future[Any] | None = None

    @abstractmethod
    def start(self) -> tuple[Future[Any] | None, Future[Any] | None]: ...

    def save(self, step: int) -> None:
        self.step, self.directory = step, self.place / f"step_{step}"
        self.staging, self.future = self.start()
        if self.future is None:
            self.ended = time.perf_counter()
        else:
            self.future.add_done_callback(self._end)

    def _end(self, future: Future[Any]) -> None:
        self.ended = time.perf_counter()

    def before_optimizer(self) -> None:
        if self.staging is not None:
            self.staging.result()
            self.staging = None

    def done(self) -> bool:
        return self.future is None or self.future.done()

    def finish(self) -> None:
        """Raise what went wrong, and remove what was written."""
        import torch.distributed as dist

        if self.future is not None:
            self.future.result()
            self.future = None
        dist.barrier(self.group)
        if dist.get_rank() == 0 and self.directory != self.place:
            shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        for child in multiprocessing.active_children():
            child.kill()


class TorchSave(Way):
    label = "torch.save, gathered on rank 0"

    def start(self) -> tuple[None, None]:
        import torch
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor

        whole = {}
        for name, tensor in self.state.state_dict().items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if dist.get_rank() == 0:
                whole[name] = full
        if dist.get_rank() == 0:
            self.directory.mkdir(parents=True)
            with (self.directory / "checkpoint.pt").open("wb") as file:
                torch.save(whole, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier(self.group)
        return None, None


class DcpSave(Way):
    label = "dcp.save"

    def start(self) -> tuple[None, None]:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.state.state_dict(), checkpoint_id=self.directory, process_group=self.group)
        return None, None


class Thread(Way):
    label = "dcp.async_save, thread"

    def start(self) -> tuple[Future[Any] | None, Future[Any]]:
        return None, self.asynchronously("THREAD")

    def asynchronously(self, kind: str, **options: Any) -> Any:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        return async_save(
            self.state.state_dict(),
            checkpoint_id=self.directory,
            process_group=self.group,
            async_checkpointer_type=AsyncCheckpointerType[kind],
            **options,
        )


class Process(Thread):
    label = "dcp.async_save, process"

    def start(self) -> tuple[None, Future[Any]]:
        return None, self.asynchronously("PROCESS")


class Titan(Thread):
    label = "process, plan cache, kept buffers, as torchtitan"

    def __init__(self, state: State, place: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(state, place)
        self.stager = DefaultStager(StagingOptions(False, True, True, False))

    def start(self) -> tuple[Future[Any], Future[Any]]:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        planner = DefaultSavePlanner(enable_plan_caching=True)
        response = self.asynchronously("PROCESS", async_stager=self.stager, planner=planner)
        return response.staging_completion, response.upload_completion


class TorchCheckpointing(Way):
    """PyPI's successor of DCP, 0.1: without O_DIRECT, which fails on ext4, and so without any fsync."""

    label = "torch_checkpointing (no fsync)"

    def __init__(self, state: State, place: Path) -> None:
        package = importlib.import_module("torch_checkpointing")
        files = importlib.import_module("torch_checkpointing.storage.filesystem")
        super().__init__(state, place)
        storage = files.LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = package.CheckpointManager(package.CheckpointManager.Config(storage_config=storage))

    def start(self) -> tuple[Future[Any], Future[Any]]:
        future = self.manager.save(str(self.directory), {"state": self.state.state_dict()})
        return self.manager._staging_future, future

    def close(self) -> None:
        self.manager.close()


class Ours(Way):
    label = "ours"

    def __init__(self, state: State, place: Path) -> None:
        from trainer.checkpoint.save import Checkpoints
        from trainer.config.settings import CheckpointConfig, Config, RunConfig
        from trainer.ledger import Ledger

        super().__init__(state, place)
        run_dir = place / "run"
        run_dir.mkdir(parents=True, exist_ok=True)
        config = Config(
            checkpoint=CheckpointConfig(dir=str(place), keep_last=1, commit="rename"), run=RunConfig(name="run")
        )
        ledger = Ledger(run_dir, 1, append=True)
        self.checkpoints = Checkpoints(config, run_dir, 1, state, self.group, ledger)
        self.checkpoints.__enter__()

    def start(self) -> tuple[None, Future[Any]]:
        self.checkpoints.save(self.step, self.step)
        assert self.checkpoints._pending is not None
        return None, self.checkpoints._pending.future

    def before_optimizer(self) -> None:
        self.checkpoints.before_optimizer_step()

    def done(self) -> bool:
        return self.checkpoints._pending is None or self.checkpoints.status()["save_done"]

    def finish(self) -> None:
        self.checkpoints._wait()

    def close(self) -> None:
        self.checkpoints.__exit__(None, None, None)


WAYS: dict[str, type[Way]] = {
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "thread": Thread,
    "process": Process,
    "titan": Titan,
    "torch_checkpointing": TorchCheckpointing,
    "ours": Ours,
}


# ---------------------------------------------------------------------------------------------------------------------
# One rank


def be_a_rank(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = State(arguments.megabytes * 1e6, arguments.tensors)
    if arguments.way == "floor":
        result = floor(state, Path(arguments.place), arguments.saves)
    else:
        base = memory()
        way = WAYS[arguments.way](state, Path(arguments.place))
        result = Loop(way, arguments.load).measure(arguments.saves, base)
        way.close()
    if dist.get_rank() == 0:
        result |= {"megabytes_a_rank": state.bytes / 1e6, "tensors": len(state.tensors)}
        print("@" + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


class Loop:
    """A training loop that does nothing but take the time of steps, and saves in `way`."""

    def __init__(self, way: Way, load: str) -> None:
        import torch
        import torch.distributed as dist

        self.way, self.load, self.step = way, load, 0
        self.group = dist.new_group(backend="gloo")
        self.numbers = torch.zeros(2)

    def train_step(self) -> tuple[float, float, bool]:
        """Returns the seconds of the step, those of them that it waited, and whether no rank has a save in flight."""
        import torch.distributed as dist

        self.step += 1
        begin = time.perf_counter()
        end = time.thread_time() + (0.05 if self.load == "busy" else 0.01)
        while time.thread_time() < end:
            pass
        if self.load == "spare":
            time.sleep(0.04)
        arrived = time.perf_counter()
        self.way.before_optimizer()
        waited_s = time.perf_counter() - arrived
        self.way.state.local[0].add_(1.0)
        self.numbers[0] = float(self.way.done())
        dist.all_reduce(self.numbers, group=self.group)
        return time.perf_counter() - begin, waited_s, round(self.numbers[0].item()) == dist.get_world_size()

    def until_quiet(self) -> None:
        for _ in range(3):
            while not self.train_step()[2]:
                pass
            self.way.finish()

    def measure(self, saves: int, base: int) -> dict[str, float]:
        """Seconds and megabytes of `saves` saves; `base`: bytes in use before anything of saving was there."""
        import torch
        import torch.distributed as dist

        self.until_quiet()  # what a way does before its first save
        gc.freeze()  # as training loops do: a full collection looks through all of torch
        rows = []
        for _ in range(saves):
            quiet_s = [self.train_step()[0] for _ in range(QUIET_STEPS)]
            dist.barrier(self.group)
            begin = time.perf_counter()
            self.way.save(self.step)
            stall_s = time.perf_counter() - begin
            peak, busy_s, ended = memory(), [], self.way.future is None
            while not ended:
                took_s, waited_s, ended = self.train_step()
                stall_s += waited_s
                busy_s.append(took_s - waited_s)
                peak = max(peak, memory())
            slowdown = statistics.mean(busy_s[:-1]) / statistics.mean(quiet_s) if len(busy_s) > 1 else 1.0
            rows.append([stall_s, self.way.ended - begin, slowdown, (peak - base) / 1e6])
            self.way.finish()
        worst = torch.tensor(rows, dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.group)
        first, steady = worst[0].tolist(), worst[1:]
        middle = steady.median(dim=0).values.tolist()
        return {
            "stall_first_s": first[0],
            "stall_s": middle[0],
            "stall_min_s": steady[:, 0].min().item(),
            "stall_max_s": steady[:, 0].max().item(),
            "durable_first_s": first[1],
            "durable_s": middle[1],
            "slowdown": middle[2],
            "memory_first_mb": first[3],
            "memory_growth_mb": (steady[-1, 3] - steady[0, 3]).item(),
            "memory_mb": steady[:, 3].max().item(),
        }


def memory() -> int:
    """Bytes of this rank and the processes it has started: private memory of all, shared memory once."""
    children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    shared = _status(os.getpid(), "RssShmem")
    return shared + sum(_status(pid, "RssAnon") for pid in [os.getpid(), *children])


def _status(pid: int, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0


def floor(state: State, place: Path, saves: int) -> dict[str, float]:
    """One memcpy of the rank's bytes into warm memory; one write with fsync of as many bytes."""
    import torch
    import torch.distributed as dist

    warm = [torch.zeros_like(tensor) for tensor in state.local]
    content = memoryview(bytearray(b"\1") * state.bytes)
    rows = []
    for number in range(saves):
        path = place / f"raw_{dist.get_rank()}_{number}"
        dist.barrier()
        begin = time.perf_counter()
        torch._foreach_copy_(warm, state.local)
        copied = time.perf_counter()
        dist.barrier()
        writing = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            left = content
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        rows.append([copied - begin, time.perf_counter() - writing])
        path.unlink()
    worst = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    memcpy_s, write_s = worst.median(dim=0).values.tolist()
    return {"memcpy_s": memcpy_s, "write_fsync_s": write_s}


# ---------------------------------------------------------------------------------------------------------------------
# All of them


def run(arguments: argparse.Namespace, way: str, ranks: int, load: str, tensors: int) -> dict[str, Any]:
    """Start `ranks` processes that measure one way; what they found, or why not."""
    with tempfile.TemporaryDirectory(prefix="save_stall_", dir=arguments.directory) as place:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, __file__, "--way", way, "--place", place, "--load", load, "--tensors", str(tensors)]
        command += ["--megabytes", str(arguments.megabytes), "--saves", str(arguments.saves)]
        common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        log = Path(place) / "log"
        with log.open("w") as output:
            processes = [
                subprocess.Popen(
                    command,
                    env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE if rank == 0 else output,
                    stderr=output,
                    text=True,
                )
                for rank in range(ranks)
            ]
            try:
                answer = processes[0].communicate(timeout=arguments.timeout_s)[0]
            except subprocess.TimeoutExpired:
                answer = ""
            for process in processes:
                if not answer:
                    process.kill()
                process.wait()
        for line in answer.splitlines():
            if line.startswith("@"):
                return dict(json.loads(line[1:]))
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        return {"failed": lines[-1][:200] if lines else "it took too long"}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, one table for each combination of ranks, load and tensors."""
    lines: list[str] = []
    seen = None
    for row in rows:
        key = (row["ranks"], row["load"], row["tensors_asked"])
        if key != seen:
            seen = key
            lines += ["", f"{key[0]} ranks, {key[1]} cores, about {key[2]} tensors a rank", ""]
            lines += ["| | stall first | stall (min-max) | durable first | durable | slowdown | memory, growth |"]
            lines += ["|---|---|---|---|---|---|---|"]
        if row["way"] == "floor" and "memcpy_s" in row:
            size = f"{row['megabytes_a_rank']:.0f} MB a rank"
            lines.append(
                f"| floor, {size} | | memcpy {row['memcpy_s']:.4f} | | write+fsync {row['write_fsync_s']:.3f} | | |"
            )
        elif "failed" in row:
            lines.append(f"| {WAYS[row['way']].label} | does not run: {row['failed']} | | | | | |")
        else:
            stall = f"**{row['stall_s']:.4f}** ({row['stall_min_s']:.4f}-{row['stall_max_s']:.4f})"
            memory = f"{row['memory_mb']:.0f} MB, {row['memory_growth_mb']:+.0f}"
            lines.append(
                f"| {WAYS[row['way']].label} | {row['stall_first_s']:.4f} | {stall} | {row['durable_first_s']:.3f} "
                f"| {row['durable_s']:.3f} | x{row['slowdown']:.2f} | {memory} |"
            )
    return "\n".join(lines).strip()


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Stall and time until durable of each way, with the floors; the first combination of the rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first = rows[0]
    same = [row for row in rows if all(row[key] == first[key] for key in ("ranks", "load", "tensors_asked"))]
    ways = [row for row in same if "stall_s" in row]
    floors = next((row for row in same if "memcpy_s" in row), None)
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.5 * len(ways) + 1.8), sharey=True)
    for axis, key, title, bound in (
        (axes[0], "stall_s", "training stands still", "memcpy_s"),
        (axes[1], "durable_s", "until durable", "write_fsync_s"),
    ):
        colors = ["#c44e52" if row["way"] == "ours" else "#8c9bb0" for row in ways]
        bars = axis.barh([WAYS[row["way"]].label for row in ways], [row[key] for row in ways], color=colors)
        axis.bar_label(bars, [f"{row[key]:.3f} s" for row in ways], padding=3, fontsize=8)
        axis.set_xlabel("seconds per save, median")
        axis.set_title(title)
        axis.margins(x=0.25)
        axis.invert_yaxis() if axis is axes[0] else None
        if floors:
            axis.axvline(floors[bound], color="black", linestyle="--", linewidth=1)
    figure.suptitle(f"{first['ranks']} ranks, {ways[0]['megabytes_a_rank']:.0f} MB a rank; dashed: the floor")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ways", default=",".join(["floor", *WAYS]))
    parser.add_argument("--ranks", default="2", help="numbers of ranks, such as 2,4")
    parser.add_argument("--load", default="spare", help="spare, busy or both: spare,busy")
    parser.add_argument("--tensors", default="400", help="about how many a rank, such as 400,1000,10000")
    parser.add_argument("--megabytes", type=float, default=478, help="of state, over all ranks")
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("--directory", help="where to write; default: a temporary directory")
    parser.add_argument("--output", type=Path, help="the picture")
    parser.add_argument("--json", type=Path, help="the figures")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        arguments.tensors = int(arguments.tensors)
        be_a_rank(arguments)
        return 0
    rows = []
    for ranks in map(int, arguments.ranks.split(",")):
        for load in arguments.load.split(","):
            for tensors in map(int, arguments.tensors.split(",")):
                for way in arguments.ways.split(","):
                    if way == "torch_checkpointing" and importlib.util.find_spec(way) is None:
                        continue
                    row = {"way": way, "ranks": ranks, "load": load, "tensors_asked": tensors}
                    rows.append(row | run(arguments, way, ranks, load, tensors))
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.output:
        plot(rows, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
