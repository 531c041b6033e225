"""When to save: every N steps, with N recomputed from what the run measures. Rank 0's alone; the others follow it."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from trainer.config.settings import CheckpointConfig
from trainer.interval import retuned

log = logging.getLogger(__name__)

FIRST_SAVE_S = 30.0  # of training, at most: it measures, and protects the time since the start
CHANGE = 0.1  # relative; smaller changes of N are noise
_WINDOW = 50


class Pace:
    """Decides after which steps a save is due."""

    def __init__(self, config: CheckpointConfig) -> None:
        self.every_steps = config.every_steps
        self._config, self._mtbi_s = config, config.mtbi_s
        self._last, self._first_pending = 0, config.retune
        self._started: float | None = None
        self._ticked: float | None = None
        self._warm = False
        self._saving = False
        self._quiet_s: deque[float] = deque(maxlen=_WINDOW)  # durations of steps without a pending save
        self._busy_s: deque[float] = deque(maxlen=_WINDOW)  # and with one
        self._save_s: deque[float] = deque(maxlen=3)
        self._stall_s: deque[float] = deque(maxlen=5)

    def resumed(self, step: int, mtbi_s: float | None) -> None:
        """Saves are due from `step` on; `mtbi_s`: measured between interruptions, None: that of the configuration."""
        self._last, self._mtbi_s = step, mtbi_s or self._mtbi_s

    def tick(self, step: int, now: float | None = None) -> bool:
        """Whether to save after `step`. Called for every step, in order; `now` in `time.monotonic()` seconds."""
        now = time.monotonic() if now is None else now
        if self._ticked is not None and self._warm:
            (self._busy_s if self._saving else self._quiet_s).append(now - self._ticked)
        self._warm = self._ticked is not None  # the first step is slower than any other
        self._ticked = now
        self._started = now if self._started is None else self._started
        if not self._config.retune:
            return step % self.every_steps == 0
        early = self._first_pending and now - self._started >= FIRST_SAVE_S
        if early or step - self._last >= self.every_steps:
            self._last, self._first_pending = step, False
            return True
        return False

    def began(self, step: int) -> None:
        """A save of `step` has begun, due or asked for."""
        self._last, self._saving, self._first_pending = max(self._last, step), True, False

    def ended(self, save_s: float | None, stall_s: float) -> Mapping[str, Any] | None:
        """The save has ended, durable after `save_s` (None: it failed), the loop held up for `stall_s`.

        Returns:
            The fields of `retuned` where the interval changed.
        """
        self._saving = False
        if save_s is None:
            return None
        self._save_s.append(save_s)
        self._stall_s.append(stall_s)
        if not self._config.retune or not self._quiet_s:
            return None
        step_s = statistics.median(self._quiet_s)
        slowdown = max(1.0, statistics.median(self._busy_s) / step_s) if self._busy_s else 1.0
        new = retuned(
            mtbi_s=self._mtbi_s,
            step_time_s=step_s,
            save_time_s=max(self._save_s),
            save_stall_s=statistics.median(self._stall_s),
            slowdown=slowdown,
            badput_target=self._config.badput_target,
        )
        if abs(new.every_steps - self.every_steps) <= CHANGE * self.every_steps:
            return None
        if new.warning:
            log.warning("%s", new.warning)
        before, self.every_steps = self.every_steps, new.every_steps
        return {
            "every_steps": new.every_steps,
            "before": before,
            "floor_steps": new.floor_steps,
            "optimum_steps": new.optimum_steps,
            "ceiling_steps": new.ceiling_steps,
            "step_time_s": step_s,
            "save_time_s": max(self._save_s),
            "save_stall_s": statistics.median(self._stall_s),
            "slowdown": slowdown,
            "mtbi_s": self._mtbi_s,
        }
