"""Starts of train.py with invalid options or damaged files: a line with the remedy, or a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starts import continues, refused_in_a_line

from pointup.disk import checksum, remove
from pointup.training.run_directory.checkpoint import DATA_FILES


@pytest.mark.parametrize(
    "name, content, remedy",
    [
        ("config.json", b"[]", "restore it"),
        ("config.json", b"{", "restore it"),
        ("metrics.jsonl", None, "can't be written"),
        ("lock", None, "--output-dir"),
        ("logs", b"", "move away"),
    ],
    ids=str,
)
def test_an_unreadable_file_is_refused_in_a_line_that_names_it(start, run, name, content, remedy):
    remove(run / name)
    if content is None:
        (run / name).mkdir()
    else:
        (run / name).write_bytes(content)
    refused_in_a_line(start(run), name, remedy)


def test_with_a_missing_or_unreadable_latest_a_run_continues_from_the_newest_complete_checkpoint(
    start, run
):
    for damage in (lambda latest: latest.write_bytes(b"\0\xff\xfe"), Path.unlink):
        damage(run / "checkpoints" / "LATEST")
        (run / "checkpoints" / "step_9").mkdir(exist_ok=True)
        assert "the newest whole one" in continues(start(run), run)


def test_incomplete_checkpoints_are_never_overwritten_by_a_new_run(start, run):
    (run / "checkpoints" / "LATEST").unlink()
    for step in (1, 2):
        (run / "checkpoints" / f"step_{step}" / "optimizer.pt").unlink()
    before = (run / "metrics.jsonl").read_bytes()
    refused_in_a_line(start(run), "step_2", "optimizer.pt", "remove")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_another_number_of_threads_is_reported(start, run):
    assert "cpu_threads" not in continues(start(run), run)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        message = continues(start(run), run)
    finally:
        torch.set_num_threads(threads)
    assert f"cpu_threads changed from {threads} to {threads + 1}" in message


def test_a_start_that_fails_does_not_claim_the_directory(start, tmp_path, pair_directory):
    run = tmp_path / "run"
    refused_in_a_line(start(run, "--data", tmp_path / "nowhere"), "nowhere")
    refused_in_a_line(start(run, "--token-budget", 100), "raise --token-budget")
    status, message = start(run, "--steps", 1)
    assert status == 0, message
    refused_in_a_line(start(run, "--steps", 1, "--learning-rate", 1), "learning_rate")


def test_several_processes_without_a_launcher_are_refused(start, tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR")
    refused_in_a_line(
        start(tmp_path / "run"), "WORLD_SIZE is 2", "MASTER_ADDR", "accelerate launch"
    )
    monkeypatch.setenv("WORLD_SIZE", "two")
    refused_in_a_line(start(tmp_path / "run"), "WORLD_SIZE is 'two'")


def test_a_cache_that_can_not_be_written_is_named(start, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("POINTUP_CACHE", str(tmp_path / "file" / "cache"))
    outcome = start(tmp_path / "run", data=None)
    refused_in_a_line(outcome, str(tmp_path / "file" / "cache"), "POINTUP_CACHE")


def changed_state(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's state.json, as JSON."""
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))


def changed_optimizer(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's optimizer.pt, and its checksum with it."""
    saved = torch.load(path / "optimizer.pt", weights_only=True)
    change(saved)
    torch.save(saved, path / "optimizer.pt")
    files = {
        name: {"bytes": (path / name).stat().st_size, "crc32": checksum(path / name)}
        for name in DATA_FILES
    }
    changed_state(path, lambda state: state.update(files=files))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(step=7),
        lambda s: s.update(files=None),
        lambda s: s.pop("sampler"),
        lambda s: s["sampler"].update(segments=[[1, 800, None, 10**6]]),
    ],
)  # fmt: skip
def test_an_impossible_state_is_refused_and_a_complete_checkpoint_offered(start, run, change):
    changed_state(run / "checkpoints" / "step_2", change)
    refused_in_a_line(start(run), "step_2", "write step_1 into")


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.pop("optimizer"),
        lambda o: o["optimizer"]["param_groups"].append({"params": []}),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_and_a_complete_checkpoint_offered(
    start, run, change
):
    changed_optimizer(run / "checkpoints" / "step_2", change)
    refused_in_a_line(start(run), "step_2: can't be continued from", "write step_1 into")
