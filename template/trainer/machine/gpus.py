"""The accelerators and cores of this node, and how many ranks follow from them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.config.settings import GpuConfig
from trainer.outcome import ConfigError, UnavailableError
from trainer.wording import counted


def count_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Accelerators that the ranks of this node will see: NVIDIA's by its driver's library, AMD's by the kernel."""
    for found, variables in (
        (_nvidia(), ("CUDA_VISIBLE_DEVICES",)),
        (_amd(), ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    ):
        for variable in variables:
            if found and variable in environment:
                found = min(found, _listed(environment[variable]))
        if found:
            return found
    return 0


def _listed(devices: str) -> int:
    """Devices in a `CUDA_VISIBLE_DEVICES`: the list ends at the first -1 or empty entry."""
    return len(list(itertools.takewhile(lambda device: device.strip() not in ("", "-1"), devices.split(","))))


def _nvidia() -> int:
    number = ctypes.c_uint(0)
    with contextlib.suppress(OSError):  # no driver
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            library.nvmlDeviceGetCount_v2(ctypes.byref(number))
            library.nvmlShutdown()
    return number.value


def _amd() -> int:
    found = 0
    for properties in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        with contextlib.suppress(OSError):
            minor = re.search(r"^drm_render_minor (\d+)$", properties.read_text(), re.M)
            found += bool(minor and int(minor[1]) > 0 and Path(f"/dev/dri/renderD{minor[1]}").exists())
    return found


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group where there is one."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


@dataclass(frozen=True)
class Ranks:
    """How many ranks this node runs, on what, and why."""

    count: int
    gpu: bool
    why: str


def decide_ranks(given: int | None, gpus: int, cores: int, settings: GpuConfig, provider: str) -> Ranks:
    """The number of ranks of this node.

    Args:
        given: `--gpus`; it decides and skips the policy.
        gpus: accelerators that are visible.
        cores: usable ones, for CPU ranks.

    Raises:
        ConfigError: more GPUs asked for than there are, or the policy is `fail`.
        UnavailableError: another start may find the GPUs (policy `hold`, or fewer than `gpu.min_count`).
    """
    if given is not None:
        if gpus and given > gpus:
            raise ConfigError(f"--gpus is {given} and this machine has {gpus}; it must be at most {gpus}")
        without = "" if gpus else "; no GPU was found, so CPU ranks with gloo"
        return Ranks(given, gpus > 0, f"--gpus {given}{without}")
    count, changed = gpus, gpus != settings.count
    found = f"{counted(gpus, 'GPU')} found" if gpus else "no GPU was found"
    if gpus == 0 and provider == "local":
        count, changed = min(settings.count, cores), False
        found += f"; provider local runs min(gpu.count {settings.count}, {cores} usable cores) CPU ranks"
    policy = settings.on_count_change
    refusal: type[Exception] = ConfigError if policy == "fail" else UnavailableError
    if count < settings.min_count:
        raise refusal(f"{found}, fewer than gpu.min_count {settings.min_count}; --gpus N would decide otherwise")
    if changed and policy != "rescale":
        raise refusal(
            f"{found} and gpu.count is {settings.count}, with gpu.on_count_change {policy}; "
            f"gpu.on_count_change=rescale goes on with {count}"
        )
    if changed:
        found += f" and gpu.count is {settings.count}: rescaled, the global batch stays"
    return Ranks(count, gpus > 0, found)
