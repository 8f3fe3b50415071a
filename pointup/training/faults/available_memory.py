"""Measures the memory that a process may use, and the peak memory of a piece of work."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from pointup.errors import ConfigError
from pointup.processes import num_cores
from pointup.training.distributed.accelerator import device_module

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def control_groups(controller: str) -> Iterator[Path]:
    """The folders of the control groups (v1 or v2) of this process that may limit `controller`,
    such as "memory"; some may not exist. Other systems than Linux have none."""
    if not MEMBERSHIP.exists():
        return
    for line in MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one tree for all controllers, version 1 one for each, or for several.
        if controllers and controller not in controllers.split(","):
            continue
        top = ROOT / controllers
        group = top / path.lstrip("/")
        # In a container, the container's group is mounted at the top, whatever the path says.
        for folder in [group, *group.parents]:
            if folder.is_relative_to(top):
                yield folder


def cores_of_process() -> float:
    """The cores that this process may use: those of its affinity, which batch systems set, or the
    lowest quota of its control groups, which may be a part of a core."""
    return min([float(num_cores()), *map(_quota, control_groups("cpu"))])


def _quota(folder: Path) -> float:
    """Cores that a control group allows; infinity without a limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except OSError:
        return float("inf")
    # Version 2 writes "max" where there is no limit, version 1 -1.
    return float("inf") if quota in ("max", "-1") else int(quota) / int(period)


SECONDS_BETWEEN_SAMPLES = 0.004
CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of limit and usage, and key of the reclaimable usage, in control groups v2 and v1."""


def memory_limit(device: torch.device, num_local_processes: int) -> int:
    """Upper limit in bytes for `PeakMemory`: the memory of this process plus its share of what is
    free on the device, or on the machine and in the control groups (containers, batch systems) of
    this process. Raises ConfigError for a device that doesn't report its memory.
    """
    module = device_module(device)
    if module is not None:
        free, _ = module.mem_get_info(device)
        return int(free + module.memory_reserved(device))
    if device.type != "cpu":
        raise ConfigError(
            f"--token-budget auto can't measure the memory of {device.type} devices; give a number"
        )
    left = min([psutil.virtual_memory().available, *room_in_control_groups()])
    return int(psutil.Process().memory_info().rss + left / num_local_processes)


def room_in_control_groups() -> list[int]:
    """Free bytes of each control group (v1 or v2) that limits this process."""
    free = []
    for folder in control_groups("memory"):
        for limit, usage, reclaimable in CGROUP_FILES:
            try:
                texts = [(folder / name).read_text() for name in (limit, usage, "memory.stat")]
            except OSError:
                continue
            if texts[0].strip() != "max":
                statistics = dict(line.split() for line in texts[2].splitlines())
                free.append(int(texts[0]) - int(texts[1]) + int(statistics.get(reclaimable, 0)))
    return free


class PeakMemory:
    """Peak memory of its `with` block, as `bytes`: what the device's allocator reserved, gaps
    included; on the CPU the resident set of this process, sampled every few milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module, self.bytes = device, device_module(device), 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.sample, name="memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self.module is not None:
            self.module.empty_cache()
            self.module.reset_peak_memory_stats(self.device)
        else:
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.module is not None:
            self.module.synchronize(self.device)
            self.bytes = self.module.max_memory_reserved(self.device)
        else:
            self.ended.set()
            self.thread.join()

    def sample(self) -> None:
        process = psutil.Process()
        while True:
            self.bytes = max(self.bytes, process.memory_info().rss)
            if self.ended.wait(SECONDS_BETWEEN_SAMPLES):
                return


def num_local_processes(num_processes: int) -> int:
    """Processes of this run on this machine, from the launcher's environment; else all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
