"""The processes among which `pointup upsample` divides the cores of a machine by itself."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from processes import run_and_watch
from survey_files import write_random_las

from pointup.cli import local_group
from pointup.cli.main import main
from pointup.errors import ConfigError
from pointup.training.distributed.preemption import LAUNCHER_VARIABLES

MILLION = 30_000_000
"""Bytes of a million points without compression."""


def without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests leave its variables in the environment."""
    for name in ("WORLD_SIZE", "ACCELERATE_USE_CPU", *LAUNCHER_VARIABLES):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("cores", "memory", "sizes", "expected"),
    [
        (16, 64e9, {"a.las": 20 * MILLION}, 8),
        (16, 64e9, {"a.las": MILLION}, 4),
        (16, 64e9, {"a.laz": MILLION // 5, "b.laz": MILLION // 5}, 8),
        (16, 64e9, {"a.las": MILLION // 3}, 1),
        (16, 64e9, {f"{number}.ply": MILLION // 3 for number in range(9)}, 1),
        (16, 64e9, {"a.npy": 3 * MILLION}, 8),
        (16, 2.5e9, {"a.las": 20 * MILLION}, 2),
        (4, 64e9, {"a.las": 20 * MILLION}, 1),
        (5, 64e9, {"a.las": 20 * MILLION}, 2),
    ],
)
def test_large_surveys_get_a_process_for_every_two_cores(
    cores, memory, sizes, expected, tmp_path, monkeypatch
):
    without_launcher(monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(local_group, "cores_of_process", lambda: 99.5)
    monkeypatch.setattr(local_group, "memory_limit", lambda device, num_processes: memory)
    for name, size in sizes.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    sources = [tmp_path / name for name in sizes]
    assert local_group.num_local_processes(sources, None) == expected
    assert local_group.num_local_processes(sources, 3) == 3
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "1"}):
        assert local_group.num_local_processes(sources, None) == 1
        with pytest.raises(ConfigError, match=r"^--processes 3: is for CPUs"):
            local_group.num_local_processes(sources, 3)
    with mock.patch("torch.accelerator.is_available", lambda: True):
        assert local_group.num_local_processes(sources, None) == 1


def test_several_processes_write_the_bytes_of_one(tmp_path, monkeypatch):
    without_launcher(monkeypatch)
    write_random_las(tmp_path / "in.las")
    words = ["upsample", str(tmp_path / "in.las"), "--model", "lidar", "--ratio", "2", "-o"]
    assert main([*words, str(tmp_path / "one.las")]) == 0
    several = [*words, tmp_path / "several.las", "--processes", "3"]
    ended = run_and_watch([sys.executable, "-m", "pointup", *several], 100)
    # With the server that forks them, and its tracker of resources.
    assert len(ended.pids) >= 5
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("points in") == 1
    assert (tmp_path / "several.las").read_bytes() == (tmp_path / "one.las").read_bytes()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"in.las", "one.las", "several.las"}


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_and_the_environment_is_put_back():
    script = """
import os, time
from pointup.cli.local_group import local_group
before = dict(os.environ)
with local_group(os.getpid, 2):
    assert os.environ["WORLD_SIZE"] == "2"
    time.sleep(1)
assert dict(os.environ) == before
with local_group(os.abort, 2):
    time.sleep(60)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("pointup: error: another process of this call died, perhaps")


SLOW_PAGE = """
import sys, time
from pointup.cli.main import main
from pointup.cli.upsample import written_files

def write_view(jobs, path, has_heights):
    time.sleep(8)
    path.touch()

written_files.write_view = write_view
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_errors_of_files_do_not_end_a_process_that_draws(tmp_path, monkeypatch):
    without_launcher(monkeypatch)
    (tmp_path / "in").mkdir()
    write_random_las(tmp_path / "in" / "good.las")
    for name in ("damaged.las", "empty.las"):
        (tmp_path / "in" / name).write_bytes(b"no survey")
    page, output = tmp_path / "page.html", f"{tmp_path / 'out'}/"
    words = ["upsample", tmp_path / "in", "-o", output, "--view", page, "--processes", "2"]
    ended = subprocess.run(
        [sys.executable, "-c", SLOW_PAGE, *words], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 1 and page.exists()
    assert ended.stderr.count("pointup: error") == 2 and "died" not in ended.stderr
