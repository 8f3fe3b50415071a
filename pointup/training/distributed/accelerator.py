"""Creates and validates the Accelerator of a run."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, DynamoBackend, LoggerType, ProjectConfiguration

from pointup.errors import ConfigError
from pointup.training.distributed.devices import device_module, prepare_devices, sum_in_float32
from pointup.training.distributed.launcher import launch_request
from pointup.training.distributed.preemption import ending_with_launcher
from pointup.training.distributed.process_group import join_group, world_size

# Other types shard the weights or drive the training loop; `StepReduction` supports neither.
DATA_PARALLEL = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_MLU,
    DistributedType.MULTI_MUSA,
)


def fix_order_of_sums() -> None:
    """Make matrix products independent of the number of threads, if MKL computes them.

    Call this before the first matrix product, at which MKL reads the setting.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def make_accelerator(
    output_dir: Path, log_with: tuple[str, ...] = (), collective_timeout_minutes: float = 20.0
) -> Accelerator:
    """The Accelerator for the launcher's configuration; products of 16 bits add up in float32.

    Raises ConfigError if fewer processes were started than requested, if there are more processes
    than devices, for parallelism other than plain data parallelism, for accumulation steps set in
    the launcher, for fp16 on a CPU, for a dynamo backend, and for a tracker that is unknown or not
    installed.
    """
    check_number_of_processes()
    check_trackers(log_with)
    check_accumulation()
    prepare_devices()
    sum_in_float32()
    # Accelerate always passes this argument; nothing here depends on it.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    with ending_with_launcher():
        # Accelerate ignores a timeout of 600 s, and gloo's default of 30 minutes would apply.
        join_group(collective_timeout_minutes)
        accelerator = Accelerator(
            log_with=list(log_with) or None,
            project_config=ProjectConfiguration(str(output_dir), logging_dir=str(output_dir)),
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        # Accelerate would train in fp32.
        raise ConfigError("mixed precision fp16 needs a GPU; use bf16 or no")
    if accelerator.distributed_type not in DATA_PARALLEL:
        raise ConfigError(
            f"distributed_type {accelerator.distributed_type.value} is not supported: pointup "
            "trains by plain data parallelism; choose MULTI_GPU, or NO for one process"
        )
    backend = accelerator.state.dynamo_plugin.backend
    if backend != DynamoBackend.NO:
        # torch.compile can't trace tree searches; around them it made no step shorter.
        raise ConfigError(
            f"dynamo_backend {backend.value} is not supported: torch.compile makes no step faster "
            "here; leave out dynamo_config, or answer no to it in `accelerate config`"
        )
    world = world_size()
    if accelerator.num_processes != world:
        raise ConfigError(
            f"{world} processes were launched but they form groups of {accelerator.num_processes}; "
            "use distributed_type MULTI_GPU (with use_cpu: true on CPUs), as in accelerate_configs/"
        )
    return accelerator


def enable_debug_checks() -> None:
    """Enable the debug checks of Accelerate, torch.distributed and NCCL (`--debug`).

    Call this before `make_accelerator`.
    """
    os.environ["ACCELERATE_DEBUG_MODE"] = "true"
    # DETAIL ends processes on CPUs with a segmentation fault, in torch 2.13.
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    if torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()


def check_number_of_processes() -> None:
    """Raise ConfigError if `accelerate launch` started one process instead of several.

    On CPUs the launcher silently starts a single process for `--cpu --num_processes 2` and for
    distributed_type MULTI_CPU.
    """
    if "WORLD_SIZE" in os.environ:
        return
    request = launch_request()
    if request and request.num_processes > 1:
        raise ConfigError(
            f"accelerate launch was to start {request.num_processes} processes but started 1; use "
            "distributed_type MULTI_GPU with use_cpu: true, as in accelerate_configs/cpu2.yaml"
        )


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is unknown or whose package is not installed.

    Accelerate drops the latter.
    """
    installed = {LoggerType.ALL.value, *(tracker.value for tracker in get_available_trackers())}
    for name in names:
        if name not in LoggerType.list():
            known = ", ".join(LoggerType.list())
            raise ConfigError(f"--log-with {name}: no such tracker; choose from {known}")
        if name not in installed:
            raise ConfigError(
                f"--log-with {name}: the package is not installed; install it or leave it out"
            )


def check_accumulation() -> None:
    """Raise ConfigError if the launcher sets accumulation steps, by which Accelerate divides."""
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps != "1":
        raise ConfigError(
            f"the launcher's gradient_accumulation_steps is {steps}; leave it out, and give "
            f"train.py --accumulation-steps {steps}"
        )


def seed_micro_batch(seed: int, step: int, slot: int) -> None:
    """Seed dropout as a function of seed, step and slot alone.

    So a micro-batch draws the same numbers on every process, and a continued run has no generator
    state to restore.
    """
    state = np.random.SeedSequence([seed, step, slot]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process on the device, or its resident set if the device has no count."""
    module = device_module(device)
    if module is not None:
        return int(module.max_memory_allocated(device))
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # Windows has none.

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
