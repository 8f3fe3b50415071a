"""Creates and validates the Accelerator of a run, its devices and its launcher."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, DynamoBackend, LoggerType
from torch import nn

from pointup.errors import ConfigError
from pointup.training.distributed.preemption import end_at_once, watching_launcher
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
    """Make MKL's matrix products independent of the number of threads; before the first of them."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


@contextmanager
def checked_launch(
    log_with: Sequence[str], collective_timeout_minutes: float, debug: bool
) -> Iterator[None]:
    """The `with` block in which train.py makes its Accelerator: `joined_group` for trackers that
    are installed, with reproducible sums; with `debug`, with the checks of torch and NCCL."""
    fix_order_of_sums()
    if debug:
        enable_debug_checks()
    check_trackers(log_with)
    check_tasks()
    with joined_group(collective_timeout_minutes):
        yield


@contextmanager
def joined_group(collective_timeout_minutes: float) -> Iterator[None]:
    """The `with` block in which this process makes its Accelerator, as a member of its group.

    Products of 16 bits add up in float32. Raises ConfigError for a launch that is not supported.
    """
    check_number_of_processes()
    if os.environ.get("FORK_LAUNCHED") == "1" and "MIXED_PRECISION" in os.environ:
        # notebook_launcher sets a variable that Accelerate doesn't read.
        os.environ.setdefault("ACCELERATE_MIXED_PRECISION", os.environ["MIXED_PRECISION"])
    check_accumulation()
    check_plugins()
    prepare_devices()
    sum_in_float32()
    # Accelerate always passes this argument; nothing here depends on it.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    # Without it this process would wait for the store of a dead launcher for many minutes.
    with watching_launcher(
        partial(end_at_once, 1, "the launcher is gone, and training has not begun")
    ):
        # Accelerate ignores a timeout of 600 s, and gloo's default of 30 minutes would apply.
        join_group(collective_timeout_minutes)
        yield
    check_state(AcceleratorState())


def make_accelerator(output_dir: Path, collective_timeout_minutes: float = 20.0) -> Accelerator:
    """The Accelerator of a group that does not train; raises what `joined_group` raises.

    Tasks of mpirun or srun form no group: each is a call by itself, perhaps with its own `--shard`.
    """
    if not {"WORLD_SIZE", "MASTER_ADDR"} & os.environ.keys():
        # On a CPU Accelerate would wait for a group by these, at an address that nobody gave.
        for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
            os.environ.pop(name, None)
    with joined_group(collective_timeout_minutes):
        return Accelerator(project_dir=str(output_dir))


def check_state(state: AcceleratorState) -> None:
    """Raise ConfigError for a configuration of the launcher that training does not support."""
    if state.mixed_precision == "fp16" and state.device.type == "cpu":
        # Accelerate would train in fp32.
        raise ConfigError("mixed precision fp16 needs a GPU; use bf16 or no")
    if state.distributed_type not in DATA_PARALLEL:
        raise ConfigError(
            f"distributed_type {state.distributed_type.value} is not supported: pointup "
            "trains by plain data parallelism; choose MULTI_GPU, or NO for one process"
        )
    backend = state.dynamo_plugin.backend
    if backend != DynamoBackend.NO:
        # torch.compile can't trace tree searches; around them it made no step shorter.
        raise ConfigError(
            f"dynamo_backend {backend.value} is not supported: torch.compile makes no step faster "
            "here; leave out dynamo_config, or answer no to it in `accelerate config`"
        )
    world = world_size()
    if state.num_processes != world:
        raise ConfigError(
            f"{world} processes were launched but they form groups of {state.num_processes}; "
            "use distributed_type MULTI_GPU (with use_cpu: true on CPUs), as in accelerate_configs/"
        )


def enable_debug_checks() -> None:
    """Enable the debug checks of Accelerate, torch.distributed and NCCL; before the group forms."""
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
            f"accelerate launch was to start {request.num_processes} processes but started 1; on "
            "CPUs add `--config_file $(pointup config cpu2)`, which has distributed_type MULTI_GPU"
        )


def check_tasks() -> None:
    """Raise ConfigError for tasks of srun or mpirun, which set nothing that torch reads."""
    for name, variable in (("srun", "SLURM_STEP_NUM_TASKS"), ("mpirun", "OMPI_COMM_WORLD_SIZE")):
        tasks = os.environ.get(variable, "1")
        if tasks != "1" and "WORLD_SIZE" not in os.environ:
            raise ConfigError(
                f"{name} started {tasks} tasks, each of which would train by itself: start one "
                "`accelerate launch` a machine (docs/guides/clusters.md), or set RANK, WORLD_SIZE, "
                "LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
            )


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is unknown, or not installed: Accelerate drops it."""
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
    # The launcher passes the option on to DeepSpeed only; from others it takes it without a word.
    request = launch_request()
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") or str(
        request.accumulation_steps if request else 1
    )
    if steps != "1":
        raise ConfigError(
            f"the launcher's gradient_accumulation_steps is {steps}; leave it out, and give "
            f"train.py --accumulation-steps {steps}"
        )


def check_plugins() -> None:
    """Raise ConfigError for settings of the launcher that Accelerate would fail on, or ignore."""
    is_fp8 = os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower() == "fp8"
    name = "mixed_precision fp8" if is_fp8 else ""
    for plugin in ("MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "").lower() == "true":
            name = plugin.lower()
    if name:
        raise ConfigError(
            f"{name} of the launcher's configuration is not supported: pointup trains by plain "
            "data parallelism in no, bf16 or fp16; leave it out"
        )


FUSED = frozenset({"cuda", "xpu", "mps"})
"""Device types with a fused AdamW, one launch for all weights; on others torch decides."""


def make_optimizer(
    parameters: Iterable[nn.Parameter], device: torch.device, weight_decay: float = 0.01
) -> torch.optim.AdamW:
    """AdamW for parameters that are, or will be, on `device`."""
    fused = True if device.type in FUSED else None
    return torch.optim.AdamW(parameters, weight_decay=weight_decay, fused=fused)


def seed_micro_batch(seed: int, step: int, slot: int) -> None:
    """Seed dropout as a function of seed, step and slot alone, whatever the process."""
    state = np.random.SeedSequence([seed, step, slot]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process on the device, or its resident set if the device has no count."""
    module = device_module(device)
    if module is not None:
        return int(module.max_memory_allocated(device))
    import resource  # Windows, where commands other than training run, has none.

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def prepare_devices() -> None:
    """Decide whether this process uses an accelerator, before the process group forms.

    Raises ConfigError for more processes than devices on this machine, as far as the environment
    tells, and for several processes that were launched for accelerators if torch sees none. A
    single process continues on the CPU and prints the reason.
    """
    use_cpu = is_cpu_requested()
    if use_cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # The launcher does not set it for several.
        return
    if torch.accelerator.is_available():
        is_set = "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ
        if torch.version.cuda and sys.platform == "linux" and not is_set:
            # Batches of changing sizes then leave no gaps. ROCm and Windows have no such segments.
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        num_devices = torch.accelerator.device_count()
        if (number := local_processes(num_devices)) > num_devices:
            # NCCL refuses this only later.
            raise ConfigError(
                f"{number} processes were launched on this machine, of whose accelerators torch "
                f"sees {num_devices}; give --num_processes {num_devices}, or check "
                "CUDA_VISIBLE_DEVICES and gpu_ids for hidden ones"
            )
        if number == 1 and "LOCAL_RANK" in os.environ:
            # A task that sees one device of its own: Accelerate's barriers take it by this number.
            os.environ["LOCAL_RANK"] = "0"
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
    """Least number of processes of this run on this machine that use the devices that this process
    sees, from the environment. A scheduler may show each process a device of its own; processes of
    torchrun and `accelerate launch` all see the same devices."""
    if num_devices == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", int(os.environ.get("LOCAL_RANK", 0)) + 1))


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


def sum_in_float32() -> None:
    """Make CUDA's matrix products of 16 bits add up in float32; cuBLAS may add parts in 16 bits."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def device_module(device: torch.device) -> ModuleType | None:
    """torch's module of an accelerator that reports its memory; None for the CPU and MPS."""
    if device.type == "cpu":
        return None
    module: ModuleType = torch.get_device_module(device)
    return module if hasattr(module, "mem_get_info") else None


def now(device: torch.device) -> float:
    """Seconds of a clock, after all work of the device has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def release_cached_memory() -> None:
    """Release the memory that the accelerator's allocator caches."""
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


class LaunchRequest(NamedTuple):
    """What an `accelerate launch` command requests: processes, device, accumulation."""

    num_processes: int
    use_cpu: bool
    accumulation_steps: int = 1


def is_cpu_requested() -> bool | None:
    """Whether the launcher was to use the CPU; None if `accelerate launch` did not say.

    It sets ACCELERATE_USE_CPU for a single process only: several read the launcher's command.
    """
    text = os.environ.get("ACCELERATE_USE_CPU", "").lower()
    if text:
        return text in ("true", "1", "yes")
    request = launch_request()
    return request.use_cpu if request else None


def launch_request() -> LaunchRequest | None:
    """The request of the `accelerate launch` that started this process, directly or by a script;
    None for another launcher or none, or one whose command or configuration is unreadable."""
    try:
        for process in psutil.Process().parents():
            arguments = launch_arguments(process.cmdline())
            if arguments is not None:
                return read_request(arguments, Path(process.cwd()))
    except (psutil.Error, FileNotFoundError):
        pass  # The process of another user, which a system may hide, or a file removed since.
    return None


def launch_arguments(command: list[str]) -> list[str] | None:
    """The arguments of an `accelerate launch` command line; None for any other."""
    words = [Path(word).name for word in command]
    names = ["accelerate-launch", "accelerate-launch.exe", "accelerate.commands.launch"]
    if any(word.startswith("accelerate") for word in words):
        names.append("launch")
    place = next((words.index(name) for name in names if name in words), None)
    return None if place is None else command[place + 1 :]


def read_request(arguments: list[str], folder: Path) -> LaunchRequest:
    """The request of these arguments, given in `folder`, and of their configuration file."""
    with contextlib.redirect_stderr(io.StringIO()):
        options, _ = launch_command_parser().parse_known_args(arguments)
    config_file = options.config_file
    if config_file is None and not options.cpu and Path(default_config_file).is_file():
        config_file = default_config_file
    num_processes, use_cpu = options.num_processes, options.cpu
    if config_file is not None:
        config = load_config_from_file(str(folder / config_file))
        use_cpu = use_cpu or config.use_cpu
        if num_processes is None:
            num_processes = config.num_processes
    steps = options.gradient_accumulation_steps or 1
    return LaunchRequest(int(num_processes or 1), bool(use_cpu), int(steps))
