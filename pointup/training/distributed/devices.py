"""The devices that a run asks for and gets: as many as processes, or why there is none."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import torch

from pointup.errors import ConfigError


def prepare_devices() -> None:
    """Settle whether this process is to have an accelerator, before any group of them forms.

    Raises ConfigError for more processes than devices on this machine, and for several processes
    that were launched for accelerators where torch sees none. One process goes on, on the CPU,
    and says why. To be called before torch uses the accelerator.
    """
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower()
    if asked in ("true", "1", "yes"):
        return
    if torch.accelerator.is_available():
        allocate_expandable()
        check_number_of_devices(local_processes(), torch.accelerator.device_count())
        return
    # Without this, processes launched on a machine without accelerator each form a world of 1.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if not asked:  # Without a launcher nobody asked for an accelerator.
        return
    reason = f"torch sees no accelerator: {why_no_accelerator()}"
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if num_processes > 1:
        raise ConfigError(
            f"{reason}; {num_processes} processes would share the CPU: mend that, or give "
            "use_cpu: true to train so"
        )
    print(f"{reason}; going on with the CPU", file=sys.stderr, flush=True)


def local_processes() -> int:
    """Processes of this run on this machine, as the launcher tells."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))


def check_number_of_devices(num_processes: int, num_devices: int) -> None:
    """Raises ConfigError where processes would have to share a device, which NCCL refuses late."""
    if num_processes > num_devices:
        raise ConfigError(
            f"{num_processes} processes were launched on this machine, of whose accelerators torch "
            f"sees {num_devices}; give --num_processes {num_devices}, or see CUDA_VISIBLE_DEVICES "
            "and gpu_ids for those that are hidden"
        )


def why_no_accelerator() -> str:
    """Why torch sees no accelerator on this machine, and what helps."""
    build = torch.version.cuda or torch.version.hip
    if build is None:
        return f"torch {torch.__version__} is a build for CPUs; install the one for your GPU"
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if os.environ.get(name, "0").strip() in ("", "-1"):
            return f"{name} is {os.environ[name]!r}, which hides all GPUs; unset it"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        said = " ".join(str(error).split())
        return f"{said or type(error).__name__} (torch {torch.__version__}, built for {build})"
    return f"the driver tells of no GPU; see nvidia-smi (torch {torch.__version__})"


def allocate_expandable() -> None:
    """Have CUDA's allocator grow its segments: batches of ever other sizes leave no gaps in them.

    Unless the user has set the allocator up. ROCm and Windows have no such segments.
    """
    is_set = "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ
    if torch.version.cuda and sys.platform == "linux" and not is_set:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def device_module(device: torch.device) -> ModuleType | None:
    """torch's module of an accelerator, where it tells of memory; None for the CPU and MPS."""
    if device.type == "cpu":
        return None
    module: ModuleType = torch.get_device_module(device)
    return module if hasattr(module, "mem_get_info") else None


def release_cached_memory() -> None:
    """Give back what the allocator of the accelerator holds for later."""
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()
