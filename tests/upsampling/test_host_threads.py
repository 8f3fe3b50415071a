"""Number of CPU threads beside an accelerator."""

from __future__ import annotations

import os

import pytest
import torch

from pointup.upsampling import executor as running
from pointup.upsampling.executor import host_threads

GPU = torch.device("cuda", 0)


def test_beside_a_gpu_threads_follow_the_machine_and_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    # A launcher for GPUs leaves torch one thread.
    assert host_threads(GPU, 1) == running._MAX_HOST_THREADS
    for processes, expected in ((8, 8), (16, 4), (64, 1), (100, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert host_threads(GPU, 1) == min(expected, running._MAX_HOST_THREADS)
    assert host_threads(torch.device("cpu"), 3) == 3
