"""The processes of `pointup upsample`, and the devices that they use."""

import os
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState

from pointup.cli.worker_group import LaunchedWorkerGroup, shared_device


@pytest.mark.parametrize(
    ("num_processes", "use_cpu", "expected"),
    [(5, "", torch.device("cuda", 1)), (2, "", None), (5, "true", None)],
)
def test_more_processes_than_devices_share_them_in_a_group_on_the_cpu(
    num_processes, use_cpu, expected, monkeypatch
):
    environment = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": str(num_processes)}
    for name, value in {**environment, "ACCELERATE_USE_CPU": use_cpu}.items():
        monkeypatch.setenv(name, value)
    with (
        mock.patch("torch.accelerator.is_available", lambda: True),
        mock.patch("torch.accelerator.device_count", lambda: 2),
        mock.patch("torch.accelerator.current_accelerator", lambda: torch.device("cuda")),
    ):
        assert shared_device() == expected
    assert os.environ["ACCELERATE_USE_CPU"] == ("true" if expected else use_cpu)


@pytest.mark.parametrize("number", [0, 3, 8, 21])
@pytest.mark.parametrize("num_processes", [1, 4, 8])
def test_processes_share_items_evenly_and_neighbours_stay_together(number, num_processes):
    shares = []
    for rank in range(num_processes):
        group = object.__new__(LaunchedWorkerGroup)
        group.num_processes = num_processes
        group._accelerator = SimpleNamespace(process_index=rank)
        shares.append(group.shard(range(number)))
    assert list(chain(*shares)) == list(range(number))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_tasks_of_mpirun_and_srun_are_calls_by_themselves(tmp_path, monkeypatch):
    tasks = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMI_SIZE": "2"}
    for name, value in {**tasks, "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(name, value)
    # A group of two would wait for the other process.
    monkeypatch.setattr("torch.distributed.init_process_group", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        assert LaunchedWorkerGroup(tmp_path).num_processes == 1
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
