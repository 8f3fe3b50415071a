"""From the launcher's options to an Accelerator that honours them, or a clear error."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import warnings
from pathlib import Path

import numpy as np
import psutil
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType, DynamoBackend, LoggerType, ProjectConfiguration

from pointup.errors import ConfigError
from pointup.training.distributed.devices import device_module, prepare_devices
from pointup.training.distributed.preemption import ending_with_launcher
from pointup.training.distributed.process_group import join_group, world_size

# What is left out shards weights or drives the loop itself, which a fused reduction can't honour.
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
    """Make products of matrices the same on any number of threads, where MKL computes them.

    To be called before the first product, when MKL reads it.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def make_accelerator(
    output_dir: Path, log_with: tuple[str, ...] = (), collective_timeout_minutes: float = 20.0
) -> Accelerator:
    """The Accelerator that the launcher's configuration asks for.

    Raises ConfigError when fewer processes were started than asked for, or more than there are
    devices, for a kind of parallelism other than plain data parallelism, for accumulation steps of
    the launcher, for a dynamo backend, and for an unknown tracker.
    """
    check_number_of_processes()
    unknown = [name for name in log_with if name not in LoggerType.list()]
    if unknown:
        known = ", ".join(LoggerType.list())
        raise ConfigError(f"--log-with {unknown[0]}: no such tracker; choose of {known}")
    check_accumulation()
    prepare_devices()
    # Accelerate always passes it; nothing here depends on it.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    with ending_with_launcher():
        # With a timeout of its own: Accelerate drops one of 600 s, and gloo's is then 30 minutes.
        join_group(collective_timeout_minutes)
        accelerator = Accelerator(
            log_with=list(log_with) or None,
            project_config=ProjectConfiguration(str(output_dir), logging_dir=str(output_dir)),
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )
    if accelerator.distributed_type not in DATA_PARALLEL:
        raise ConfigError(
            f"distributed_type {accelerator.distributed_type.value} is not supported: pointup "
            "trains by plain data parallelism; choose MULTI_GPU, or NO for one process"
        )
    backend = accelerator.state.dynamo_plugin.backend
    if backend != DynamoBackend.NO:
        # It can't follow searches in trees; around them it made no step shorter.
        raise ConfigError(
            f"dynamo_backend {backend.value} is not supported: torch.compile gains nothing here; "
            "leave out dynamo_config, or answer no to it in `accelerate config`"
        )
    world = world_size()
    if accelerator.num_processes != world:
        raise ConfigError(
            f"{world} processes were launched but they form groups of {accelerator.num_processes}; "
            "use distributed_type MULTI_GPU (with use_cpu: true on CPUs), as in accelerate_configs/"
        )
    return accelerator


def check_closely() -> None:
    """Have the libraries check and tell what they can; to be called before `make_accelerator`."""
    os.environ["ACCELERATE_DEBUG_MODE"] = "true"
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    os.environ.setdefault("NCCL_DEBUG", "INFO")
    if torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()


def check_number_of_processes() -> None:
    """Refuse to run alone where `accelerate launch` was asked for several processes.

    On CPUs the launcher starts a single process for `--cpu --num_processes 2` and for
    distributed_type MULTI_CPU, and says nothing.
    """
    if "WORLD_SIZE" in os.environ:
        return
    parent = psutil.Process().parent()
    asked = processes_asked_for(parent.cmdline()) if parent else 1
    if asked > 1:
        raise ConfigError(
            f"accelerate launch was asked for {asked} processes but started 1; use "
            "distributed_type MULTI_GPU with use_cpu: true, as in accelerate_configs/cpu2.yaml"
        )


def check_accumulation() -> None:
    """Refuse accumulation steps that the launcher was given: Accelerate would divide by them."""
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps != "1":
        raise ConfigError(
            f"the launcher's gradient_accumulation_steps is {steps}; leave it out, and give "
            f"train.py --accumulation-steps {steps}"
        )


def processes_asked_for(command: list[str]) -> int:
    """Number of processes that an `accelerate launch` command line asks for; 1 for any other."""
    words = [Path(word).name for word in command]
    if "accelerate-launch" in words:
        arguments = command[words.index("accelerate-launch") + 1 :]
    elif "launch" in words and any(word.startswith("accelerate") for word in words):
        arguments = command[words.index("launch") + 1 :]
    else:
        return 1
    with contextlib.redirect_stderr(io.StringIO()):
        options, _ = launch_command_parser().parse_known_args(arguments)
    if options.num_processes is not None:
        return int(options.num_processes)
    config_file = options.config_file
    if config_file is None and not options.cpu and Path(default_config_file).is_file():
        config_file = default_config_file
    return int(load_config_from_file(config_file).num_processes or 1) if config_file else 1


def seed_micro_batch(seed: int, step: int, slot: int) -> None:
    """Seed dropout as a function of the place in training alone.

    The same micro-batch then draws the same numbers on whatever process it runs, and a continued
    run has no generator to restore.
    """
    state = np.random.SeedSequence([seed, step, slot]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has held: on the device, or of the machine where it can't tell."""
    module = device_module(device)
    if module is not None:
        return int(module.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
