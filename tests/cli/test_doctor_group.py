from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from accelerate import Accelerator
from processes import Run, free_port

from pointup.cli.doctor import launch as doctor_launch
from pointup.cli.doctor import process_group
from pointup.cli.doctor.finding import Finding, warn


def test_a_launch_that_does_not_end_or_fails_is_reported_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "hanging.py").write_text("import time; time.sleep(600)")
    began = time.monotonic()
    (hung,) = doctor_launch.launch(2, use_cpu=True, module="hanging", seconds=1)
    assert hung.level == "fail" and "did not end within 1.0 s" in hung.text
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_a_launch_whose_processes_fail_is_reported_with_their_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "failing.py").write_text("raise ValueError('no network')")
    (failed,) = doctor_launch.launch(2, use_cpu=True, module="failing")
    assert failed.level == "fail" and "no network" in failed.text


@pytest.mark.slow
def test_a_single_process_launches_two_processes_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pointup", "doctor"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes over gloo" in done.stdout and "ok    all-reduce" in done.stdout


DOCTOR = """
import os, sys
from pointup.cli import main as cli
from pointup.cli.doctor import process_group
real_version = process_group.version
if os.environ["RANK"] == "1":
    process_group.{}
sys.exit(cli.main(["doctor"]))
"""
WITH_ANOTHER_TORCH = 'version = lambda name: "1.0" if name == "torch" else real_version(name)'
WITH_AN_EXIT = "compute_finding = lambda device: os._exit(0)"


@pytest.mark.slow
def test_a_launched_group_is_checked_as_a_whole_and_what_differs_is_named(
    tmp_path: Path, launch: Callable[..., Run]
) -> None:
    script = tmp_path / "differing.py"
    script.write_text(DOCTOR.format(WITH_ANOTHER_TORCH))
    done = launch(script=script, num_processes=2, timeout=600)
    assert done.returncode == 1
    assert done.stdout.count("environment") == 1
    assert "2 processes over gloo" in done.stdout and "ok    broadcast objects" in done.stdout
    named = f"process 1 on {platform.node()} differs from process 0 in packages: torch 1.0, there"
    assert f"fail  consistency        {named}" in done.stdout


@pytest.mark.slow
def test_a_process_that_ends_is_reported_by_the_others(
    tmp_path: Path, launch: Callable[..., Run]
) -> None:
    script = tmp_path / "going.py"
    script.write_text(DOCTOR.format(WITH_AN_EXIT))
    done = launch(script=script, num_processes=2, timeout=600)
    assert done.returncode == 1
    assert "fail  group              a process has ended" in done.stdout


@pytest.mark.slow
def test_a_missing_process_is_reported_in_bounded_time() -> None:
    code = (
        "import sys\n"
        "from pointup.cli import main as cli\n"
        "from pointup.cli.doctor import process_group\n"
        "process_group.MINUTES = 0.05\n"
        "sys.exit(cli.main(['doctor']))"
    )
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **place, **address},
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(f"fail  group              process 0 on {platform.node()} found")


def test_findings_travel_between_processes_as_plain_values() -> None:
    finding = warn("disk", "little", "free some")
    assert Finding(**json.loads(json.dumps(asdict(finding)))) == finding


def test_a_failed_launch_is_explained_by_its_processes_and_not_by_its_launcher() -> None:
    launcher = (
        "Traceback (most recent call last):\n"
        "    raise ChildFailedError(\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "  exitcode  : {} (pid: 7)\n"
    )
    aborted = launcher.format("-6") + "  traceback : Signal 6 (SIGABRT) received by PID 7\n"
    python = "Traceback ...:\n    raise ValueError(x)\n{}ValueError: no network\n"
    for output, reason in (
        (python.format("") + launcher.format(1), "ValueError: no network"),
        (python.format("[rank1]: ") + launcher.format(1), "ValueError: no network"),
        ("terminate called\n  what():  socket closed\n" + aborted, "socket closed"),
        (aborted, "Signal 6 (SIGABRT)"),
        (launcher.format(5), "exitcode  : 5"),
        ("", "no error line"),
    ):
        assert doctor_launch.reason_of_launch(output) == reason


def test_a_launched_process_leaves_its_group_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerator: Accelerator
) -> None:
    left = []
    monkeypatch.setattr(process_group, "join", lambda: accelerator)
    monkeypatch.setattr(process_group, "joint_findings", lambda *_: [warn("disk", "a", "b")])
    monkeypatch.setattr(accelerator, "end_training", lambda: left.append(True))
    assert process_group.main(tmp_path / "answer") == 0
    assert left and json.loads((tmp_path / "answer").read_text())[0]["subject"] == "disk"
