"""The checks of the GPU kernels by `pointup doctor`, without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from test_doctor import driver

from pointup.cli.doctor import accelerators as doctor_kernels
from pointup.cli.doctor import launch as doctor_launch
from pointup.cli.doctor.accelerators import (
    kernel_finding,
    pairs_bound,
    pairs_finding,
    pairs_per_cycle,
    speed_findings,
)
from pointup.cli.doctor.finding import ok, warn
from pointup.errors import PointupError
from pointup.geometry.kernels import trial

CPU = torch.device("cpu")


def found_with(problem: object) -> tuple[str, str, str]:
    with mock.patch.object(trial, "problem", side_effect=[problem]):
        finding = kernel_finding(CPU)
    return finding.level, finding.text, finding.remedy


def test_a_trial_that_fails_is_reported_with_its_remedy() -> None:
    problem = trial.Problem("kernel knn fails (RuntimeError: no compiler)", "install gcc")
    level, text, remedy = found_with(problem)
    assert (level, remedy) == ("warn", "install gcc") and "no compiler" in text
    level, text, remedy = found_with(PointupError("kernel knn has left cuda:0 unusable"))
    assert level == "fail" and "unusable" in text and "POINTUP_KERNELS=0" in remedy
    assert found_with(None)[0] == "ok"


def test_kernels_that_are_switched_off_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTUP_KERNELS", "0")
    finding = kernel_finding(CPU)
    assert finding.level == "warn" and finding.remedy == "unset POINTUP_KERNELS"


def test_speed_is_measured_only_where_the_kernels_are_right() -> None:
    device = torch.device("cuda:0")
    for found, number in ((ok("kernels", ""), 3), (warn("kernels", "", "install gcc"), 2)):
        with (
            mock.patch.object(doctor_launch, "compute_finding", return_value=ok("compute", "")),
            mock.patch.object(doctor_launch, "kernel_finding", return_value=found),
            mock.patch.object(doctor_launch, "speed_findings", return_value=[ok("nearest", "")]),
        ):
            assert len(list(doctor_launch.device_findings(device))) == number
    assert len(list(doctor_launch.device_findings(CPU))) == 1


def test_searches_and_thinning_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_kernels, "POINTS_PER_CLOUD", 60)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(doctor_kernels, "pairs_bound", lambda device: None)
    findings = list(speed_findings(CPU))
    assert [finding.subject for finding in findings] == [
        "nearest cpu",
        "neighbours cpu",
        "thinning cpu",
    ]
    assert "pairs/s" in findings[0].text and " of 480 in" in findings[1].text


def test_the_bound_of_an_a100_is_its_units_of_float32() -> None:
    of_a100, of_others = pairs_per_cycle(8, 0), pairs_per_cycle(8, 6)
    assert of_a100 == pytest.approx(64 / 6) and of_others == pytest.approx(128 / 8.5)
    pairs = 2 * 8 * 25_000**2
    assert pairs / (108 * 1.41e9 * of_a100) == pytest.approx(6.2e-3, abs=5e-5)


def test_pairs_per_second_are_compared_with_the_hardware_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, "echo NVIDIA H100 80GB HBM3, 1980 MHz; echo Another, [N/A]", monkeypatch)
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    bound = pairs_bound(CPU)
    assert bound == pytest.approx(132 * 128 * 1.98e9 / 8.7)
    gpu.major = 7
    assert pairs_bound(CPU) is None
    gpu.major, gpu.name = 9, "Another"
    assert pairs_bound(CPU) is None
    driver(tmp_path, "exit 9", monkeypatch)
    assert pairs_bound(CPU) is None
    assert pairs_finding(CPU, 1e-3, 2e12, bound).level == "ok"
    assert "52% of the hardware bound" in pairs_finding(CPU, 1e-3, 2e12, bound).text
    assert pairs_finding(CPU, 1e-3, 1e11, bound).level == "warn"
    assert "not known" in pairs_finding(CPU, 1e-3, 1e11, None).text
