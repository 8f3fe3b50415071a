"""Checks that each process has a device, and explains why torch finds no accelerator."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import torch

from pointup.errors import ConfigError
from pointup.training.distributed.launcher import is_cpu_requested


def prepare_devices() -> None:
    """Decide whether this process uses an accelerator, before the process group forms.

    Raises ConfigError for more processes than devices on this machine, as far as the environment
    tells, and for several processes that were launched for accelerators if torch sees none. A
    single process continues on the CPU and prints the reason. Call this before torch uses the
    accelerator.
    """
    use_cpu = is_cpu_requested()
    if use_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # The launcher does not set it for several.
        return
    if torch.accelerator.is_available():
        allocate_expandable()
        num_devices = torch.accelerator.device_count()
        check_number_of_devices(local_processes(num_devices), num_devices)
        return
    # Without this, each process launched on a machine without accelerators forms a world of 1.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    is_launched = num_processes > 1 and "ACCELERATE_MIXED_PRECISION" in os.environ
    if use_cpu is None and not is_launched:  # Without `accelerate launch` none was requested.
        return
    reason = f"torch sees no accelerator: {why_no_accelerator()}"
    if num_processes > 1 and use_cpu is not None:
        raise ConfigError(
            f"{reason}; {num_processes} processes would share the CPU: fix that, or set "
            "use_cpu: true to train on the CPU"
        )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{reason}; continuing on the CPU", file=sys.stderr, flush=True)


def local_processes(num_devices: int) -> int:
    """Number of processes of this run on this machine that use the devices that this process sees:
    the smallest that the environment allows.

    A launcher that does not tell the number, as `WORLD_SIZE` with `LOCAL_RANK`, tells that there
    are at least `LOCAL_RANK` + 1. A scheduler may show each process a device of its own; then one
    device is enough. Processes of torchrun and `accelerate launch` all see the same devices.
    """
    if num_devices == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", int(os.environ.get("LOCAL_RANK", 0)) + 1))


def check_number_of_devices(num_processes: int, num_devices: int) -> None:
    """Raise ConfigError if processes would share a device, which NCCL refuses only later."""
    if num_processes > num_devices:
        raise ConfigError(
            f"{num_processes} processes were launched on this machine, of whose accelerators torch "
            f"sees {num_devices}; give --num_processes {num_devices}, or check "
            "CUDA_VISIBLE_DEVICES and gpu_ids for hidden ones"
        )


def why_no_accelerator() -> str:
    """The reason why torch sees no accelerator on this machine, with a remedy where it is known."""
    build = torch.version.cuda or torch.version.hip
    if build is None:
        return f"torch {torch.__version__} is a CPU build; install the build for your GPU"
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if os.environ.get(name, "0").strip() in ("", "-1"):
            return f"{name} is {os.environ[name]!r}, which hides all GPUs; unset it"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        message = " ".join(str(error).split())
        return f"{message or type(error).__name__} (torch {torch.__version__}, built for {build})"
    return f"the driver reports no GPU; see nvidia-smi (torch {torch.__version__})"


def allocate_expandable() -> None:
    """Use CUDA's expandable segments, in which batches of changing sizes leave no gaps.

    Does nothing if the user has configured the allocator. ROCm and Windows have no such segments.
    """
    is_set = "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ
    if torch.version.cuda and sys.platform == "linux" and not is_set:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def sum_in_float32() -> None:
    """Make CUDA's matrix products of 16 bits add up in float32.

    By default cuBLAS may add partial sums of a split product in 16 bits.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def device_module(device: torch.device) -> ModuleType | None:
    """torch's module of an accelerator that reports its memory; None for the CPU and MPS."""
    if device.type == "cpu":
        return None
    module: ModuleType = torch.get_device_module(device)
    return module if hasattr(module, "mem_get_info") else None


def release_cached_memory() -> None:
    """Release the memory that the accelerator's allocator caches."""
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()
