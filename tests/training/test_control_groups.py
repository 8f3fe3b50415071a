"""The cores that a process may use, from its affinity and its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pointup.training.faults import available_memory
from pointup.training.faults.available_memory import cores_of_process, room_in_control_groups


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


@pytest.fixture(autouse=True)
def groups(tmp_path, monkeypatch):
    monkeypatch.setattr(available_memory, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(available_memory, "ROOT", tmp_path / "sys")


def write(folder: Path, membership: str, files: dict[str, str]) -> None:
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        path = folder / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def cores(folder: Path, membership: str, files: dict[str, str]) -> float:
    write(folder, membership, files)
    return cores_of_process()


def test_without_control_groups_the_cores_are_those_of_the_affinity(monkeypatch):
    assert cores_of_process() == 8
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores_of_process() == 64


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 8), ("150000 100000", 1.5), ("1600000 100000", 8)]
)
def test_a_quota_of_version_2_limits_the_cores(tmp_path, quota, expected):
    assert cores(tmp_path, "0::/jobs/7\n", {"jobs/7/cpu.max": quota}) == expected


def test_the_lowest_quota_of_all_groups_above_counts(tmp_path):
    files = {"jobs/cpu.max": "200000 100000", "jobs/7/cpu.max": "400000 100000"}
    assert cores(tmp_path, "0::/jobs/7\n", files) == 2


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("300000", 3)])
def test_a_quota_of_version_1_limits_the_cores(tmp_path, quota, expected):
    # In a container, the group is mounted at the top.
    membership = "9:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n0::/docker/a\n"
    files = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": "100000"}
    files = {f"cpu,cpuacct/{name}": text for name, text in files.items()}
    assert cores(tmp_path, membership, files) == expected


@pytest.mark.parametrize(
    "line, files",
    [
        ("0::/job", {"job/memory.max": "1000", "job/memory.current": "400"}),
        ("0::/job/step", {"job/memory.max": "1000", "job/memory.current": "400",
                          "job/step/memory.max": "max", "job/step/memory.current": "400"}),
        ("0::/outside/of/the/container", {"memory.max": "1000", "memory.current": "400"}),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": "1000",
                           "memory/job/memory.usage_in_bytes": "400"}),
    ],
)  # fmt: skip
def test_limits_of_memory_are_read(tmp_path, line, files):
    assert room_in_control_groups() == []
    statistics = "anon 1\ninactive_file 50\ntotal_inactive_file 50"
    beside = {str(Path(name).with_name("memory.stat")): statistics for name in files}
    write(tmp_path, f"3:cpuset:/\n{line}\n", files | beside)
    assert room_in_control_groups() == [650]
