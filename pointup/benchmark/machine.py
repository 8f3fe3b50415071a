"""Describes the machine on which the benchmark runs."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

import pointup

LIBRARIES = ("torch", "numpy", "scipy", "fpsample", "accelerate", "datasets", "torch-geometric")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Hardware, load and versions, for the header of the report and the JSON."""
    described: dict[str, Any] = {
        "processor": processor(),
        "cores": len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load": round(psutil.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "pointup": pointup.__version__,
        **{name: version(name) for name in LIBRARIES},
        "device": str(device),
    }
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
        described["cuda"] = torch.version.cuda
    return described


def processor() -> str:
    """Name of the processor, from /proc/cpuinfo on Linux, elsewhere from `platform`."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine_lines(described: dict[str, Any]) -> list[str]:
    """The header of the report."""
    place = described.get("gpu", described["device"])
    return [
        f"{described['processor']}, {described['cores']} cores, {described['threads']} threads, "
        f"{described['memory_gb']:g} GB, load {described['load']:g}",
        f"measured on {place}; pointup {described['pointup']}, Python {described['python']}, "
        + ", ".join(f"{name} {described[name]}" for name in LIBRARIES),
    ]
