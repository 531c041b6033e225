"""What people watch: `metrics.jsonl` (one line per optimizer step), TensorBoard, and a progress line."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.config.settings import Config
from trainer.interval import format_duration
from trainer.records import Records
from trainer.task import Task

log = logging.getLogger(__name__)

# Dense bf16 peak in TFLOP/s from the vendors' data sheets, by a part of the device's name; the first match counts.
_PEAK_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L40": 181,
    "L4": 121, "A10G": 70, "A10": 125, "A6000": 155, "4090": 165, "3090": 71, "MI300X": 1307,
}  # fmt: skip


_NOT_CURVES = {"step", "samples", "batch_hash", "seconds", "attempt"}
_SHOWN_OTHERWISE = _NOT_CURVES | {"loss", "val_loss", "lr", "grad_norm", "units_per_s", "mfu"}


class Metrics:
    """Rank 0's record of training; a resumed run's TensorBoard curves drop the steps that were rewound."""

    def __init__(
        self, config: Config, attempt: int, task: Task, model: nn.Module, *, first_step: int, device: torch.device,
        ranks: int,
    ) -> None:  # fmt: skip
        self.config, self.attempt, self.unit = config, attempt, task.unit
        self.units = config.data.global_batch * task.units_per_sample  # of a step
        self.flops = self.units * task.flops_per_unit(model)
        self.peak = ranks * 1e12 * _peak_tflops(device)
        self.records = Records(config.run_dir, "metrics", attempt)
        self.board: Any = None
        self.warned = False
        with self._volume_may_fail():
            self._open_board(first_step)
        self.before = time.perf_counter()
        self.first_step = first_step
        self._newest: deque[float] = deque(maxlen=20)  # seconds of the newest steps, without the first

    def step(self, step: int, values: Mapping[str, Any], moment: float) -> None:
        """Record one optimizer step: `values` are loss, lr, grad_norm, samples, batch_hash and what the task counts.

        Args:
            moment: of its end, `time.perf_counter()` less what is no part of a step.
        """
        seconds, self.before = max(moment - self.before, 1e-9), moment
        line = {
            "step": step, **values, "seconds": round(seconds, 6), "units_per_s": round(self.units / seconds, 1),
            "attempt": self.attempt,
        }  # fmt: skip
        if self.peak and self.flops:
            line["mfu"] = round(self.flops / seconds / self.peak, 4)
        with self._volume_may_fail():
            self.records.write(line)
        with self._volume_may_fail():
            self._draw(step, line)
        steps = self.config.train.steps
        if step > self.first_step:
            self._newest.append(seconds)
        if step % self.config.logging.every_steps == 0 or step in (self.first_step, steps) or "val_loss" in values:
            self._print(step, line)

    def _draw(self, step: int, line: Mapping[str, Any]) -> None:
        try:
            for name in line.keys() - _NOT_CURVES if self.board is not None else ():
                self.board.add_scalar(name, line[name], step)
        except OSError:
            self.board = None  # it stays broken; `flush` opens another one
            raise

    def _print(self, step: int, line: Mapping[str, Any]) -> None:
        steps = self.config.train.steps
        parts = [f"step {step:>{len(str(steps))}}/{steps}", f"loss {line['loss']:.4f}"]
        if "val_loss" in line:
            parts.append(f"validation {line['val_loss']:.4f}")
        parts += [f"{name} {line[name]:.4f}" for name in line if name not in _SHOWN_OTHERWISE]
        parts += [f"lr {line['lr']:.2e}", f"grad {line['grad_norm']:.2f}", f"{line['units_per_s']:,.0f} {self.unit}/s"]
        if "mfu" in line:
            parts.append(f"MFU {line['mfu']:.0%}")
        if self._newest and step < steps:
            parts.append(f"{format_duration(round(statistics.median(self._newest) * (steps - step)))} left")
        print("   ".join(parts), flush=True)

    def flush(self, step: int) -> None:
        """Before the save of `step`: have the lines up to there where the checkpoint will be."""
        with self._volume_may_fail():
            self.records.upload()
        if self.board is None and not self.records.waiting:
            with self._volume_may_fail():
                self._open_board(step + 1)

    def close(self) -> None:
        with self._volume_may_fail():
            self.records.close()
        with self._volume_may_fail():
            if self.board is not None:
                self.board.close()

    def _open_board(self, first_step: int) -> None:
        if self.config.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.config.run_dir / "tensorboard"), purge_step=first_step)

    @contextmanager
    def _volume_may_fail(self) -> Iterator[None]:
        """A full disk is reported once; it stops neither training nor the lines that come later."""
        try:
            yield
        except OSError as error:
            if not self.warned:
                log.warning("the metrics in %s cannot be written (%s); training goes on", self.config.run_dir, error)
            self.warned = True


def _peak_tflops(device: torch.device) -> float:
    if device.type != "cuda":
        return 0
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), 0)
