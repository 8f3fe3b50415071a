"""Messages about devices: too few, none, and the reason; out-of-memory errors of any origin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from pointup.benchmark.training_step import OneProcessGroup, TrainingWork
from pointup.errors import ConfigError
from pointup.training.config import TrainConfig
from pointup.training.datasets import TrainingBatches
from pointup.training.distributed import accelerator
from pointup.training.distributed.accelerator import (
    LaunchRequest,
    make_accelerator,
    prepare_devices,
    why_no_accelerator,
)
from pointup.training.evaluation import Evaluation
from pointup.training.faults import available_memory, token_budget
from pointup.training.faults.out_of_memory import attempt, is_out_of_memory

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def launched_for_gpus(monkeypatch) -> None:
    """The environment of a process that `accelerate launch` with use_cpu: false starts."""
    for name in (
        "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: out of memory\nCUDA kernel errors might be reported at some other call",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "HIP out of memory. Tried to allocate 2.00 GiB",
        "MPS backend out of memory (MPS allocated: 1 GB)",
        "XPU out of memory. Tried to allocate 1 GiB",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    ],
)
def test_out_of_memory_errors_of_any_origin_are_recognised(message):
    def work(batch: Any) -> torch.Tensor:
        raise RuntimeError(message)

    assert attempt(work, SimpleNamespace()) is None  # type: ignore[arg-type]


def test_other_errors_are_not_out_of_memory():
    for message in (
        "shape mismatch",
        "CUDA error: device-side assert triggered",
        "out of resource: shared memory, Required: 300000, Hardware limit: 232448",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED",
    ):
        assert not is_out_of_memory(RuntimeError(message)), message


@contextmanager
def torch_sees(number: int) -> Iterator[None]:
    with (
        mock.patch("torch.accelerator.is_available", lambda: True),
        mock.patch("torch.accelerator.device_count", lambda: number),
    ):
        yield


@pytest.mark.parametrize(
    ("num_devices", "environment"),
    [
        (8, {"WORLD_SIZE": "16", "LOCAL_RANK": "3"}),
        (8, {"WORLD_SIZE": "16", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "8"}),
        # Each process sees the device that a scheduler gave it.
        (1, {"WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}),
    ],
)
def test_processes_that_a_scheduler_starts_are_not_refused(num_devices, environment, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with torch_sees(num_devices):
        prepare_devices()
    # Accelerate's barriers take it for the number of the device.
    assert int(os.environ["LOCAL_RANK"]) < num_devices


def test_a_process_whose_number_is_beyond_the_devices_is_refused(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setenv("LOCAL_RANK", "9")
    with (
        torch_sees(8),
        pytest.raises(ConfigError, match=r"10 processes .* sees 8"),
    ):
        prepare_devices()


@pytest.mark.parametrize("place", ["training", "benchmark"])
def test_products_of_16_bits_add_up_in_float32(place, tmp_path):
    products = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    before = {name: getattr(products, name) for name in names}
    try:
        for name in names:
            setattr(products, name, True)
        if place == "training":
            make_accelerator(tmp_path)
        else:
            TrainingWork(OneProcessGroup(torch.device("cpu")))
        assert not any(getattr(products, name) for name in names)
    finally:
        for name, value in before.items():
            setattr(products, name, value)


@pytest.mark.parametrize(
    ("has_gpu", "name", "value", "message"),
    [
        (True, "LOCAL_WORLD_SIZE", "2", "2 processes were launched on this machine, .* sees 1;"),
        (True, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "accumulation_steps is 4; leave"),
        (False, "WORLD_SIZE", "8", "torch sees no accelerator: .* 8 processes would share the CPU"),
    ],
)
def test_what_a_launcher_asks_in_vain_is_refused_before_a_group_forms(
    has_gpu, name, value, message, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setenv(name, value)
    with (
        mock.patch("torch.accelerator.is_available", lambda: has_gpu),
        mock.patch("torch.accelerator.device_count", lambda: int(has_gpu)),
        mock.patch.object(accelerator, "join_group") as join_group,
        mock.patch.object(accelerator, "Accelerator"),
        pytest.raises(ConfigError, match=message),
    ):
        make_accelerator(tmp_path)
    assert not join_group.called


def test_without_a_gpu_one_process_continues_with_the_reason_and_several_end(monkeypatch, capsys):
    def prepare(use_cpu: str | None, request: LaunchRequest | None = None) -> str:
        if use_cpu is None:
            monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
        else:
            monkeypatch.setenv("ACCELERATE_USE_CPU", use_cpu)
        with (
            mock.patch("torch.accelerator.is_available", lambda: False),
            mock.patch.object(accelerator, "why_no_accelerator", lambda: "the driver is asleep"),
            mock.patch.object(accelerator, "launch_request", lambda: request),
        ):
            prepare_devices()
        assert os.environ["ACCELERATE_USE_CPU"].lower() == "true"
        return capsys.readouterr().err

    said = "torch sees no accelerator: the driver is asleep; continuing on the CPU\n"
    assert prepare("False") == said
    assert prepare("True") == prepare(None) == ""
    monkeypatch.setenv("WORLD_SIZE", "8")
    # `accelerate launch` does not set ACCELERATE_USE_CPU for several processes.
    assert prepare("True") == prepare(None, LaunchRequest(8, use_cpu=True)) == ""
    for variable, request in (("False", None), (None, LaunchRequest(8, use_cpu=False))):
        with pytest.raises(ConfigError, match=r"the driver is asleep; 8 .* use_cpu: true"):
            prepare(variable, request)
    # The command of the launcher is unreadable: one process of each machine says what happens.
    assert prepare(None) == said
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert prepare(None) == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")  # As torchrun.
    assert prepare(None) == ""


@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_several_processes_launched_for_the_cpu_use_no_gpu(num_gpus, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    with (
        torch_sees(num_gpus),
        mock.patch.object(accelerator, "launch_request", lambda: LaunchRequest(2, use_cpu=True)),
    ):
        prepare_devices()
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


def test_the_reason_for_no_gpu_names_the_build_the_variable_or_the_driver(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    assert "is a CPU build" in why_no_accelerator()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_no_accelerator().startswith("CUDA_VISIBLE_DEVICES is '', which hides all GPUs")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def fails() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")

    with mock.patch("torch.cuda.init", fails):
        assert "Found no NVIDIA driver on your system. Please check" in why_no_accelerator()


def test_the_allocator_uses_expandable_segments_unless_it_is_configured(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    prepare_devices()
    assert "PYTORCH_ALLOC_CONF" not in accelerator.os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    # Set by the test first, so that it is unset after it.
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    prepare_devices()
    assert accelerator.os.environ.pop("PYTORCH_ALLOC_CONF") == "expandable_segments:True"


def test_the_memory_of_a_device_is_what_its_allocator_holds_with_gaps_between_tensors():
    allocator = mock.Mock(
        mem_get_info=lambda device: (700, 1000),
        memory_allocated=lambda device: 100,
        memory_reserved=lambda device: 250,
        max_memory_allocated=lambda device: 300,
        max_memory_reserved=lambda device: 400,
    )
    with mock.patch.object(available_memory, "device_module", lambda device: allocator):
        assert available_memory.memory_limit(GPU, 1) == 950
        with available_memory.PeakMemory(GPU) as peak:
            pass
    assert peak.bytes == 400


def test_a_budget_found_leaves_15_percent_of_the_memory_free():
    group: Any = mock.Mock(num_processes=1, is_main_process=False, gather=lambda tokens: tokens)
    probe: Any = SimpleNamespace(peak_bytes=lambda tokens: 10 * tokens)
    nothing = nullcontext(SimpleNamespace(bytes=0))
    group.device = torch.device("cpu")
    with (
        mock.patch.object(token_budget, "memory_limit", lambda *_: 1_000_000),
        mock.patch.object(token_budget, "PeakMemory", lambda device: nothing),
    ):
        found, _ = token_budget._fits_everywhere(probe, group, 1000, 10**6)
    assert 76_500 <= found <= 85_000


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")], ids=str)
def test_training_and_evaluation_load_for_the_device_of_the_run(device):
    config = TrainConfig(num_workers=0)
    dataset: Any = mock.MagicMock(full_sizes=np.array([5, 6]), names=["one", "other"])
    dataset.__len__.return_value = 2
    group: Any = SimpleNamespace(device=device, num_processes=1, process_index=0)
    with mock.patch("torch.cuda.is_available", lambda: True):
        data: Any = mock.MagicMock(train=dataset, validation=dataset, sources=())
        batches = TrainingBatches(config, data, mock.MagicMock(), group)
        batches.begin_epoch_if_due()
        training: Any = batches.loader
        evaluation: Any = Evaluation(data, group, config).batches
    assert training.pin_memory == evaluation.pin_memory == (device == GPU)
