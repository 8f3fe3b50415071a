import os
import shutil
from unittest import mock

import psutil
import pytest
import torch

from pointup.cli.doctor import findings as machine
from pointup.cli.doctor.findings import graded, ok, warn
from pointup.errors import PointupError
from pointup.geometry.kernels import trial

CPU = torch.device("cpu")


def test_a_failed_check_is_followed_by_its_fix():
    assert str(ok("disk", "much\n room")) == "ok    disk               much room"
    text, remedy = str(warn("disk", "little room", "free some")).split("\n")
    assert text.startswith("warn  disk") and remedy.strip() == "-> free some"
    levels = [graded("disk", "", "free some", value, 1, 2).level for value in (0, 1, 2)]
    assert levels == ["fail", "warn", "ok"]


def test_cores_are_those_of_the_job_and_the_load_is_that_of_the_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine, "memory_limit", lambda *_: 10e9)
    for own, load, expected in (
        (2.0, 60.0, "ok    cores, memory      2 of 64 cores and 10 GB of "),
        (1.5, 60.0, "ok    cores, memory      1.5 of 64 cores and "),
        (64.0, 60.0, "ok    cores, memory      64 cores and "),
        (2.0, 130.0, "warn  cores, memory      2 of 64 cores and "),
    ):
        monkeypatch.setattr(machine, "cores_of_process", lambda own=own: own)
        monkeypatch.setattr(psutil, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        found = str(machine.capacity_finding())
        assert found.startswith(expected) and f"load {load:.1f}" in found


@pytest.mark.parametrize(
    ("number", "has_driver", "visible", "level"),
    [
        (8, True, None, "ok"),
        (0, False, None, "ok"),
        (0, True, None, "fail"),
        (0, True, "0", "fail"),
        (0, True, "", "ok"),
        (0, True, "-1", "ok"),
    ],
)
def test_a_driver_whose_gpus_torch_does_not_find_fails(
    number, has_driver, visible, level, monkeypatch
):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
    monkeypatch.setattr(shutil, "which", lambda name: name if has_driver else None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    finding = machine.accelerators_finding()
    assert finding.level == level and bool(finding.remedy) == (level == "fail")


def test_a_device_that_computes_wrongly_fails(monkeypatch):
    assert [finding.level for finding in machine.device_findings(CPU)] == ["ok"]
    monkeypatch.setattr(torch, "ones", torch.zeros)
    assert machine.compute_finding(CPU).level == "fail"


def test_a_gpu_whose_memory_is_in_use_warns(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    for free, level in ((79e9, "ok"), (20e9, "warn")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80e9))
        assert machine.memory_finding(CPU).level == level


def test_a_trial_of_kernels_that_fails_is_reported_with_its_remedy(monkeypatch):
    problem = trial.Problem("kernel knn fails (RuntimeError: no compiler)", "install gcc")
    unusable = PointupError("kernel knn has left cuda:0 unusable")
    with mock.patch.object(trial, "problem", side_effect=[problem, unusable, None]):
        failing, fatal, right = (machine.kernel_finding(CPU) for _ in range(3))
    assert (failing.level, failing.remedy) == ("warn", "install gcc")
    assert "no compiler" in failing.text
    assert fatal.level == "fail" and "POINTUP_KERNELS=0" in fatal.remedy
    assert right.level == "ok"
    monkeypatch.setenv("POINTUP_KERNELS", "0")
    assert machine.kernel_finding(CPU).remedy == "unset POINTUP_KERNELS"


def test_shared_memory_is_judged_by_what_the_loader_needs(tmp_path, monkeypatch):
    needed = machine.shared_memory_needed(num_workers=2, token_budget=20480, num_processes=8)
    assert needed == 20480 * 64 * 3 * 2 * 8
    assert machine.shared_memory_needed(0, "auto", 8) == 0
    for share, level in ((0.9, "fail"), (1.5, "warn"), (3.0, "ok")):
        usage = shutil.disk_usage(tmp_path)._replace(free=int(share * needed))
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        assert machine.shared_memory_finding(needed, tmp_path).level == level
    assert machine.shared_memory_finding(needed, tmp_path / "none").level == "ok"


def test_a_disk_is_judged_by_its_room(tmp_path, monkeypatch):
    for free, level in ((1e8, "fail"), (2e9, "warn"), (1e11, "ok")):
        usage = shutil.disk_usage(tmp_path)._replace(free=int(free))
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        assert machine.disk_finding("disk", tmp_path / "to" / "come").level == level
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert machine.disk_finding("disk", tmp_path).level == "fail"
