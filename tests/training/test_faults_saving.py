"""Full disks and damaged checkpoints in real runs."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disturbed import (
    PATIENCE,
    STEPS,
    assert_ends_like,
    continues,
    has_ended,
    latest_of,
    launched,
    log_of,
    output_of,
    timed,
    wait_for_step,
)

from pointup.training.run_directory.checkpoint import FILES


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs takes privileges that are not there")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("on_save_error", ["go-on", "end"])
def test_a_full_disk_leaves_the_last_checkpoint_whole_and_the_run_continues_when_it_is_freed(
    pair_directory: Path, small_disk: Path, tmp_path: Path, undisturbed: Path, on_save_error: str
) -> None:
    run = tmp_path / "run"
    run.symlink_to(small_disk)
    filler = small_disk / "filler"
    options = ("--on-save-error", on_save_error)
    with launched(pair_directory, run, *options, STEP_SECONDS="0.3") as process:
        wait_for_step(run, 5)
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while file.write(bytes(4096)):
                pass
        full = time.time()
        assert process.wait(PATIENCE) != 0, "the last checkpoint could not be saved"
        assert has_ended(
            full, 120, run, f"full disk, --on-save-error {on_save_error}: reported, ends"
        )
    message = output_of(run)
    # The model of the evaluation at step 6 is the first thing to be written.
    first = "(model: the model|step_8: the checkpoint)"
    last = f"step_{STEPS}: the checkpoint"
    failed = first if on_save_error == "end" else last
    assert re.search(rf"{failed} can't be written \(.*No space left on device", message)
    assert ("training continues" in message) == (on_save_error == "go-on")
    assert latest_of(run) == "step_4"
    filler.unlink()
    continues(pair_directory, run, *options)
    assert_ends_like(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint_is_refused_and_the_offered_one_leads_to_the_same_end(
    pair_directory: Path, tmp_path: Path, undisturbed: Path, name: str, damage: str
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, fault="terminate reduction 9") as process:
        process.wait(PATIENCE)
    latest = latest_of(run)
    assert latest in ("step_9", "step_10"), "the step of the signal, or the next one"
    for step in (latest, "step_8"):
        path = run / "checkpoints" / step / name
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with launched(pair_directory, run) as process, timed(f"{damage} {name}: refused"):
        assert process.wait(PATIENCE) != 0
    message = output_of(run)
    assert (
        f"{latest}: the checkpoint " in message and name in message and message.count("error:") == 1
    )
    assert "write step_4 into" in message
    (run / "checkpoints" / "LATEST").write_text("step_4")
    continues(pair_directory, run)
    assert_ends_like(run, undisturbed)
    assert "Continuing from" in log_of(run) and latest_of(run) == f"step_{STEPS}"
