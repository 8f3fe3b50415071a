"""Describes the machine on which the benchmark runs."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import pointup
from pointup.errors import ConfigError
from pointup.training.distributed.accelerator import why_no_accelerator
from pointup.training.faults.available_memory import cores_of_process

LIBRARIES = ("torch", "numpy", "scipy", "fpsample", "accelerate", "datasets", "torch-geometric")
LOAD_DIFFERS = 1.0
"""Difference of the loads of two measurements that is worth a note."""


def device_named(name: str) -> torch.device:
    """The device of `--device`. Raises ConfigError if torch knows or sees none of this name."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    number = torch.accelerator.device_count() if accelerator else 0
    seen = ["cpu", *(f"{accelerator.type}:{i}" for i in range(number) if accelerator)]
    device = None
    with suppress(RuntimeError):  # A name that torch doesn't know.
        device = torch.device(name)
    if device and (device.type == "cpu" or f"{device.type}:{device.index or 0}" in seen):
        return device
    reason = "" if accelerator else f" ({why_no_accelerator()})"
    raise ConfigError(f"--device {name}: give one that torch sees: {', '.join(seen)}{reason}")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Hardware, load and versions, for the header of the report and the JSON."""
    described: dict[str, Any] = {
        "processor": processor(),
        "cores": cores_of_process(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load": round(psutil.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "pointup": pointup.__version__,
        "device": str(device),
    }
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            described[name] = version(name)
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


def machine_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """A line for each entry of `describe_machine` in which two measurements differ."""
    lines = []
    for name in dict.fromkeys([*before, *after]):
        was, now = before.get(name), after.get(name)
        if was != now and not (name == "load" and abs((was or 0) - (now or 0)) < LOAD_DIFFERS):
            lines.append(f"{name}: {was} -> {now}")
    return lines


def machine_lines(described: dict[str, Any]) -> list[str]:
    place = described.get("gpu", described["device"])
    return [
        f"{described['processor']}, {described['cores']:g} cores, {described['threads']} threads, "
        f"{described['memory_gb']:g} GB, load {described['load']:g}",
        f"measured on {place}; pointup {described['pointup']}, Python {described['python']}, "
        + ", ".join(f"{name} {described[name]}" for name in LIBRARIES if name in described),
    ]
