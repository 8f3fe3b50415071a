from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Run, free_port
from packaging.requirements import Requirement

from pointup.apps import doctor_accelerators, doctor_launch, doctor_machine
from pointup.apps.cli import main
from pointup.apps.doctor_accelerators import (
    Gpu,
    accelerator_findings,
    compute_finding,
    gpu_finding,
    parse_gpus,
    topology_finding,
    usable_finding,
)
from pointup.apps.doctor_data import data_findings
from pointup.apps.doctor_finding import Finding, in_bytes, in_time, ok, warn
from pointup.apps.doctor_group import merged
from pointup.apps.doctor_machine import (
    disk_finding,
    is_met,
    open_files_finding,
    shared_memory_finding,
    shared_memory_needed,
)
from pointup.apps.doctor_run import run_findings
from pointup.data.pairs import Pair, write_pairs
from pointup.model import Upsampler
from pointup.training.checkpoint import save_checkpoint, save_model

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


def level_of(findings: list[Finding], subject: str) -> str:
    (level,) = [finding.level for finding in findings if finding.subject == subject]
    return level


def test_a_remedy_stands_below_what_it_mends() -> None:
    assert str(ok("disk", "much\n room")) == "ok    disk               much room"
    text, remedy = str(warn("disk", "little room", "free some")).split("\n")
    assert text.startswith("warn  disk") and remedy.strip() == "-> free some"


def test_sizes_and_durations_are_told_in_units_that_suit() -> None:
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


def test_a_gpu_that_is_hot_or_in_use_is_told_and_one_with_memory_errors_fails() -> None:
    findings = list(map(gpu_finding, parse_gpus(GPUS)))
    assert [finding.level for finding in findings] == ["ok", "warn", "warn", "fail", "ok"]
    assert "85.5 GB of 85.5 GB free, 31 °C, memory errors: 0 corrected, 0 not" in findings[0].text
    assert "another program" in findings[1].remedy and "cooling" in findings[2].remedy
    assert "memory errors" not in findings[4].text


@pytest.mark.parametrize(
    ("num_gpus", "num_usable", "visible", "level"),
    [(8, 8, None, "ok"), (8, 2, "0,1", "ok"), (8, 7, None, "warn"), (8, 0, None, "fail")],
)
def test_gpus_that_torch_does_not_find_are_told(
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
    """Put an nvidia-smi of our own first in the path."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_machine_is_asked_for_its_gpus_and_their_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpus").write_text(GPUS)
    (tmp_path / "topology").write_text(TOPOLOGY)
    asked = f'case "$1" in topo) cat {tmp_path}/topology;; *) cat {tmp_path}/gpus;; esac'
    driver(tmp_path, asked, monkeypatch)
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


def test_what_machines_found_alike_is_told_once_and_the_rest_with_their_names() -> None:
    here = [ok("disk", "much"), ok("cores", "4")]
    there = [warn("disk", "little", "free some"), ok("cores", "4")]
    found = merged([("a", here), ("a", []), ("b", there)])
    assert found == [
        ok("disk", "a: much"), ok("cores", "4"), warn("disk", "b: little", "free some"),
    ]  # fmt: skip


def cloud(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, number]).random((number, 3)).astype(np.float32)


def test_a_good_dataset_is_ok_and_a_pair_beyond_the_budget_is_named(pair_directory: Path) -> None:
    findings = list(data_findings(str(pair_directory), 12, 20480))
    assert [finding.level for finding in findings] == ["ok", "ok"]
    assert "40 pairs" in findings[0].text
    small = [f for f in data_findings(str(pair_directory), 12, 50) if f.level == "warn"]
    assert len(small) == 2 and small[0].text.startswith("train_") and "--crop" in small[0].remedy
    assert len(list(data_findings(str(pair_directory), 12, "auto"))) == 2


def test_bad_samples_are_named_and_a_dataset_without_good_ones_fails(tmp_path: Path) -> None:
    hurt = cloud(20)
    hurt[3] = np.nan
    bad, good = Pair("hurt", hurt, cloud(40)), Pair("good", cloud(20), cloud(40))
    write_pairs([bad, good], [bad], tmp_path / "pairs", {})
    train, validation = data_findings(str(tmp_path / "pairs"), 12, "auto")
    assert train.level == "warn" and "1 bad: hurt: source has 1 points" in train.text
    assert validation.level == "fail" and "pointup inspect" in validation.remedy
    (missing,) = data_findings(str(tmp_path / "none"), 12, "auto")
    assert missing.level == "fail" and "none" in missing.text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that ended well, with checkpoints of steps 1, 2 and 3."""
    model = Upsampler()
    optimizer = torch.optim.AdamW(model.parameters())
    directory = tmp_path / "run"
    for step in (1, 2, 3):
        save_checkpoint(directory / "checkpoints", model, optimizer, None, {"step": step}, keep=3)
    save_model(model, directory / "model")
    (directory / "config.json").write_text(json.dumps({"num_workers": 2, "token_budget": 4096}))
    lines = [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "lock").touch()
    return directory


def test_a_run_that_ended_well_is_ok(run: Path) -> None:
    findings = list(run_findings(run))
    assert {finding.level for finding in findings} == {"ok"}
    texts = "\n".join(finding.text for finding in findings)
    assert "step_3 is whole" in texts and "LATEST" in texts and "step 3, " in texts


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_changed_byte_in_the_latest_checkpoint_fails_and_a_whole_one_is_offered(
    run: Path, name: str
) -> None:
    damage(run / "checkpoints" / "step_3" / name)
    damage(run / "checkpoints" / "step_1" / name)
    first, second, third = (f for f in run_findings(run) if f.subject == "checkpoint")
    assert (first.level, second.level, third.level) == ("warn", "ok", "fail")
    assert f"damaged {name}" in third.text and "write step_2 into" in third.remedy


def test_a_checkpoint_that_is_cut_short_gone_or_not_named_fails(run: Path) -> None:
    latest = run / "checkpoints" / "step_3"
    os.truncate(latest / "optimizer.pt", 100)
    (third,) = (f for f in run_findings(run) if "LATEST" in f.text)
    assert third.level == "fail" and "cut short" in third.text
    shutil.rmtree(latest)
    assert level_of(list(run_findings(run)), "checkpoints") == "fail"
    (run / "checkpoints" / "LATEST").unlink()
    (missing,) = (f for f in run_findings(run) if f.subject == "checkpoints")
    assert missing.level == "fail" and "step_2" in missing.remedy
    shutil.rmtree(run / "checkpoints")
    assert level_of(list(run_findings(run)), "checkpoints") == "warn"


def test_what_a_kill_while_saving_left_is_told(run: Path) -> None:
    (run / "checkpoints" / "step_4.tmp").mkdir()
    assert level_of(list(run_findings(run)), "checkpoints") == "warn"


def test_a_run_without_config_or_with_a_broken_model_fails(run: Path, tmp_path: Path) -> None:
    (run / "config.json").write_text("{")
    os.truncate(run / "model" / "model.safetensors", 50)
    findings = list(run_findings(run))
    assert level_of(findings, "run") == level_of(findings, "model") == "fail"
    assert [f.level for f in run_findings(tmp_path / "none")] == ["fail"]


HOLD = """
import fcntl, json, os, platform, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
json.dump({"pid": os.getpid(), "host": platform.node(), "since": "noon"}, file)
file.flush()
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_is_held_by_a_process_that_lives_and_stale_after_its_kill(run: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run / "lock")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    try:
        (held,) = (f for f in run_findings(run) if f.subject == "lock")
        who = f"process {holder.pid} on {platform.node()}, since noon"
        assert held == ok("lock", f"held by {who}: the run is training")
        long_ago = time.time() - 3600
        os.utime(run / "metrics.jsonl", (long_ago, long_ago))
        assert level_of(list(run_findings(run)), "last sign of life") == "warn"
    finally:
        holder.kill()
        holder.wait()
    findings = list(run_findings(run))
    (stale,) = (f for f in findings if f.subject == "lock")
    assert stale.level == "warn" and who in stale.text
    assert level_of(findings, "last sign of life") == "ok"


def test_metrics_cut_short_count_up_to_the_last_whole_line_and_a_bad_loss_is_told(
    run: Path,
) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": null}\n{"step": 5, "lo')
    (life,) = (f for f in run_findings(run) if f.subject == "last sign of life")
    assert life.level == "warn" and life.text.startswith("step 4, ")
    (run / "metrics.jsonl").write_text("")
    assert level_of(list(run_findings(run)), "last sign of life") == "warn"


def test_the_command_tells_each_finding_and_fails_when_one_does(
    run: Path,
    pair_directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor_launch, "launch", lambda *_, **__: [ok("launch", "left out")])
    assert main(["doctor", "--data", str(pair_directory), "--run", str(run)]) == 0
    text = capsys.readouterr().out
    needed = in_bytes(shared_memory_needed(2, 4096, 1))
    assert f"the loader needs {needed}" in text and "fail " not in text
    assert "data, train" in text and "step_3 is whole" in text and "All works" in text
    damage(run / "checkpoints" / "step_3" / "optimizer.pt")
    assert main(["doctor", "--run", str(run)]) == 1
    assert "\n1 failed, " in capsys.readouterr().out


def test_a_launch_that_does_not_end_or_fails_is_told_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "hanging.py").write_text("import time; time.sleep(600)")
    began = time.monotonic()
    (hung,) = doctor_launch.launch(2, use_cpu=True, module="hanging", seconds=1)
    assert hung.level == "fail" and "not done in 1.0 s" in hung.text
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_a_launch_whose_processes_fail_is_told_with_their_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "failing.py").write_text("raise ValueError('no network')")
    (failed,) = doctor_launch.launch(2, use_cpu=True, module="failing")
    assert failed.level == "fail" and "no network" in failed.text


@pytest.mark.slow
def test_a_machine_alone_launches_two_processes_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pointup", "doctor"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes over gloo" in done.stdout and "ok    all-reduce" in done.stdout


WITH_ANOTHER_TORCH = """
import os, sys
from pointup.apps import cli, doctor_group
real = doctor_group.version
if os.environ["RANK"] == "1":
    doctor_group.version = lambda name: "1.0" if name == "torch" else real(name)
sys.exit(cli.main(["doctor"]))
"""


@pytest.mark.slow
def test_a_launched_group_is_checked_as_a_whole_and_what_differs_is_named(
    tmp_path: Path, launch: Callable[..., Run]
) -> None:
    script = tmp_path / "differing.py"
    script.write_text(WITH_ANOTHER_TORCH)
    done = launch(script=script, num_processes=2, timeout=600)
    assert done.returncode == 1
    assert done.stdout.count("environment") == 1
    assert "2 processes over gloo" in done.stdout and "ok    broadcast objects" in done.stdout
    named = f"process 1 on {platform.node()} differs from process 0 in packages: torch 1.0, there"
    assert f"fail  agreement          {named}" in done.stdout


ONE_GOES = """
import os, sys
from pointup.apps import cli, doctor_group
def leave(device):
    os._exit(0)
if os.environ["RANK"] == "1":
    doctor_group.compute_finding = leave
sys.exit(cli.main(["doctor"]))
"""


@pytest.mark.slow
def test_a_process_that_goes_is_told_by_the_others(
    tmp_path: Path, launch: Callable[..., Run]
) -> None:
    script = tmp_path / "going.py"
    script.write_text(ONE_GOES)
    done = launch(script=script, num_processes=2, timeout=600)
    assert done.returncode == 1
    assert "fail  group              a process has gone" in done.stdout


@pytest.mark.slow
def test_a_process_that_never_comes_is_told_in_bounded_time() -> None:
    code = (
        "import sys; from pointup.apps import cli, doctor_group; doctor_group.MINUTES = 0.05\n"
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
