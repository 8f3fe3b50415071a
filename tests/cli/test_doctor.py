from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from packaging.requirements import Requirement

from pointup.cli.doctor import accelerators as doctor_accelerators
from pointup.cli.doctor import launch as doctor_machine
from pointup.cli.doctor.accelerators import (
    Gpu,
    accelerator_findings,
    compute_finding,
    gpu_finding,
    parse_gpus,
    topology_finding,
    usable_finding,
)
from pointup.cli.doctor.finding import in_bytes, in_time, ok, warn
from pointup.cli.doctor.launch import (
    capacity_finding,
    disk_finding,
    is_met,
    open_files_finding,
    shared_memory_finding,
    shared_memory_needed,
)
from pointup.cli.doctor.process_group import merged

GPUS = """\
0, NVIDIA H100 80GB HBM3, 81559 MiB, 4 MiB, 31, 0, 0
1, NVIDIA H100 80GB HBM3, 81559 MiB, 60000 MiB, 33, 2, 0
2, NVIDIA H100 80GB HBM3, 81559 MiB, 4 MiB, 88, 0, 0
3, NVIDIA H100 80GB HBM3, 81559 MiB, 4 MiB, 35, 0, 7
4, NVIDIA GeForce RTX 4090, 24564 MiB, 12 MiB, 40, [N/A], [N/A]
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-47\t0
GPU1\tNV18\t X \tSYS\tPXB\t0-47\t0
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1
NIC0\tPXB\tPXB\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def test_a_failed_check_is_followed_by_its_fix() -> None:
    assert str(ok("disk", "much\n room")) == "ok    disk               much room"
    text, remedy = str(warn("disk", "little room", "free some")).split("\n")
    assert text.startswith("warn  disk") and remedy.strip() == "-> free some"


def test_cores_are_those_of_the_job_and_the_load_is_that_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(doctor_machine, "memory_limit", lambda *_: 10e9)
    for own, load, expected in (
        (2.0, 60.0, "ok    cores, memory      2 of 64 cores and 10 GB of "),
        (1.5, 60.0, "ok    cores, memory      1.5 of 64 cores and "),
        (64.0, 60.0, "ok    cores, memory      64 cores and "),
        (2.0, 130.0, "warn  cores, memory      2 of 64 cores and "),
    ):
        monkeypatch.setattr(doctor_machine, "cores_of_process", lambda own=own: own)
        monkeypatch.setattr(psutil, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        found = str(capacity_finding())
        assert found.startswith(expected) and f"load {load:.1f}" in found


def test_sizes_and_durations_have_suitable_units() -> None:
    sizes = [in_bytes(n) for n in (12, 64e6, 999.6e6, 1.5e12)]
    assert sizes == ["12 B", "64 MB", "1 GB", "1,500 GB"]
    assert [in_time(s) for s in (0.0031, 4.25, 90, 600, 7200, 3 * 86400)] == [
        "3.1 ms", "4.2 s", "90 s", "10 minutes", "2 hours", "3 days",
    ]  # fmt: skip


def test_gpus_are_read_from_the_drivers_lines() -> None:
    gpus = parse_gpus(GPUS)
    assert gpus[1] == Gpu(1, "NVIDIA H100 80GB HBM3", 81559 * 2**20, 60000 * 2**20, 33, 2, 0)
    assert gpus[4].corrected_errors is None and gpus[4].temperature == 40
    with pytest.raises(ValueError, match="No devices"):
        parse_gpus("No devices were found\n")


def test_a_gpu_that_is_hot_or_in_use_warns_and_one_with_memory_errors_fails() -> None:
    findings = list(map(gpu_finding, parse_gpus(GPUS)))
    assert [finding.level for finding in findings] == ["ok", "warn", "warn", "fail", "ok"]
    assert "85.5 GB of 85.5 GB free, 31 °C, memory errors: 0 corrected, 0 not" in findings[0].text
    assert "another program" in findings[1].remedy and "cooling" in findings[2].remedy
    assert "memory errors" not in findings[4].text


@pytest.mark.parametrize(
    ("num_gpus", "num_usable", "visible", "level"),
    [
        (8, 8, None, "ok"),
        (8, 2, "0,1", "ok"),
        (8, 7, None, "warn"),
        (8, 0, None, "fail"),
        (8, 0, "0", "fail"),
        (8, 0, "GPU-1a2b, MIG-3c4d", "fail"),
        (8, 1, "0, 1", "warn"),
        (8, 1, "3,-1,4", "ok"),
        (8, 0, "", "ok"),
        (8, 0, "-1", "ok"),
        (8, 0, "NoDevFiles", "ok"),
    ],
)
def test_gpus_that_torch_does_not_find_are_reported(
    num_gpus: int, num_usable: int, visible: str | None, level: str
) -> None:
    assert usable_finding(num_gpus, num_usable, visible).level == level


def test_links_between_gpus_are_read_from_the_drivers_matrix() -> None:
    finding = topology_finding(TOPOLOGY)
    assert finding.text == (
        "PCIe and the link between processors (SYS) between 2, NVLink of 18 lanes between 1 "
        "of 3 pairs of GPUs"
    )
    two = "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X\n"
    assert topology_finding(two).text == "NVLink of 12 lanes between all 2 GPUs"
    assert topology_finding("unknown").level == "warn"


def driver(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a fake nvidia-smi first on the path."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_gpus_and_their_links_are_read_from_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpus").write_text(GPUS)
    (tmp_path / "topology").write_text(TOPOLOGY)
    script = f'case "$1" in topo) cat {tmp_path}/topology;; *) cat {tmp_path}/gpus;; esac'
    driver(tmp_path, script, monkeypatch)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 5)
    subjects = [finding.subject for finding in accelerator_findings()]
    assert subjects == ["accelerators", *(f"GPU {i}" for i in range(5)), "links"]


def test_a_driver_that_does_not_answer_fails_where_torch_could_use_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, "echo NVIDIA-SMI has failed; exit 9", monkeypatch)
    for cuda, level in (("13.0", "fail"), (None, "warn")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        (finding,) = accelerator_findings()
        assert finding.level == level and "NVIDIA-SMI has failed" in finding.text


def test_a_device_that_computes_wrongly_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute_finding(torch.device("cpu")).level == "ok"
    monkeypatch.setattr(doctor_accelerators.torch, "ones", torch.zeros)
    assert compute_finding(torch.device("cpu")).level == "fail"


def test_what_is_required_is_compared_with_what_is_installed() -> None:
    wanted = {"numpy>=1": True, "numpy<1": False, "no-such-package": False}
    assert {text: is_met(Requirement(text)) for text in wanted} == wanted
    assert is_met(Requirement("no-such-package; extra == 'test'"))


def test_open_files_are_judged_by_the_limit_that_can_be_reached() -> None:
    cases = {(256, 1e6): "ok", (256, float("inf")): "ok", (256, 512): "warn", (64, 64): "fail"}
    assert {case: open_files_finding(*case).level for case in cases} == cases


def test_shared_memory_is_judged_by_what_the_loader_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = shared_memory_needed(num_workers=2, token_budget=20480, num_processes=8)
    assert needed == 20480 * 64 * 3 * 2 * 8
    assert shared_memory_needed(0, "auto", 8) == 0
    for share, level in ((0.9, "fail"), (1.5, "warn"), (3.0, "ok")):
        usage = shutil.disk_usage(tmp_path)._replace(free=int(share * needed))
        monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda _, usage=usage: usage)
        assert shared_memory_finding(needed, tmp_path).level == level
    assert shared_memory_finding(needed, tmp_path / "none").level == "ok"


def test_a_disk_is_judged_by_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, level in ((1e8, "fail"), (2e9, "warn"), (1e11, "ok")):
        usage = shutil.disk_usage(tmp_path)._replace(free=int(free))
        monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda _, usage=usage: usage)
        assert disk_finding("disk", tmp_path / "to" / "come").level == level
    monkeypatch.setattr(doctor_machine.os, "access", lambda *_: False)
    assert disk_finding("disk", tmp_path).level == "fail"


def test_equal_findings_are_merged_and_others_name_their_machines() -> None:
    here = [ok("disk", "much"), ok("cores", "4")]
    there = [warn("disk", "little", "free some"), ok("cores", "4")]
    found = merged([("a", here), ("a", []), ("b", there)])
    assert found == [
        ok("disk", "a: much"), ok("cores", "4"), warn("disk", "b: little", "free some"),
    ]  # fmt: skip
