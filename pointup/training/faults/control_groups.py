"""Finds the control groups that limit this process: containers, batch jobs, services."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def control_groups(
    controller: str, membership: Path = MEMBERSHIP, root: Path = ROOT
) -> Iterator[Path]:
    """The folders of the control groups (v1 or v2) of this process that may limit `controller`,
    such as "memory"; some may not exist. Other systems than Linux have none."""
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        # Version 2 has one tree for all controllers, version 1 one for each, or for several.
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controllers
        group = top / path.lstrip("/")
        # In a container, the container's group is mounted at the top, whatever the path says.
        for folder in [group, *group.parents]:
            if folder.is_relative_to(top):
                yield folder


def cores_of_process(membership: Path = MEMBERSHIP, root: Path = ROOT) -> float:
    """The cores that this process may use: those of its affinity, which batch systems set, or the
    lowest quota of its control groups, which may be a part of a core."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    for folder in control_groups("cpu", membership, root):
        cores = min(cores, _quota(folder))
    return cores


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
