"""Starts of train.py with invalid options or damaged files: a line with the remedy, or a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from starts import Start, continues, refused_in_a_line


@pytest.mark.parametrize(
    "options, named",
    [
        (("--token-budget", 10**30), "--token-budget"),
        (("--token-budget", 1, "--crop"), "--token-budget"),
        (("--epochs", "inf"), "--epochs"),
        (("--hours", "inf"), "--hours"),
        (("--hours", "nan"), "--hours"),
        (("--worker-timeout", "inf"), "--worker-timeout"),
        (("--hang-timeout", "inf"), "--hang-timeout"),
        (("--collective-timeout", "inf"), "--collective-timeout"),
        (("--collective-timeout", 1e12), "--collective-timeout"),
        (("--learning-rate", "nan"), "--learning-rate"),
        (("--weight-decay", "nan"), "--weight-decay"),
        (("--loss.density", "inf"), "--loss.density"),
        (("--seed", 2**64), "--seed"),
        (("--ratio", 1e9), "--ratio"),
        (("--max-ratio", "inf"), "--max-ratio"),
        (("--accumulation-steps", 10**9), "--accumulation-steps"),
        (("--num-workers", 10**6), "--num-workers"),
        (("--num-pictures", 10**9), "--num-pictures"),
        (("--log-with", "nonsense"), "--log-with"),
        (("--noise", -0.1), "--noise"),
        (("--noise", 0.005), "augmentation adds 0.01 in any case"),
        (("--noise", 0.5, "--no-augment"), "--noise needs --augment"),
    ],
    ids=str,
)
def test_an_impossible_value_is_refused_in_a_line_that_names_the_option(
    start: Start, tmp_path: Path, options: tuple[object, ...], named: str
) -> None:
    length = ("--steps", "None") if named in ("--epochs", "--hours") else ()
    refused_in_a_line(start(tmp_path / "run", *length, *options), named)
    assert not (tmp_path / "run" / "checkpoints").exists()


def damaged(path: Path, content: bytes | None) -> None:
    """Replace a file by this content, or by a directory for None."""
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


@pytest.mark.parametrize(
    "name, content, remedy",
    [
        ("config.json", b"[]", "remove it"),
        ("config.json", b"null", "remove it"),
        ("config.json", b"\xff\xfe{}", "remove it"),
        ("config.json", b"{", "remove it"),
        ("config.json", b"[" * 100_000, "remove it"),
        ("config.json", None, "remove it"),
        ("metrics.jsonl", None, "move away"),
        ("lock", None, "--output-dir"),
        ("logs", b"", "move away"),
        ("checkpoints", b"", "move it away"),
    ],
    ids=str,
)
def test_an_unreadable_file_is_refused_in_a_line_that_names_it(
    start: Start, run: Path, name: str, content: bytes | None, remedy: str
) -> None:
    if (run / name).is_dir():
        shutil.rmtree(run / name)
    damaged(run / name, content)
    refused_in_a_line(start(run), name, remedy)


@pytest.mark.parametrize("content", [b"", b"\0\xff\xfe", b"step_2" * 1000, b"step_\xc2\xb2", None])
def test_with_an_unreadable_latest_a_run_continues_from_the_newest_complete_checkpoint(
    start: Start, run: Path, content: bytes | None
) -> None:
    damaged(run / "checkpoints" / "LATEST", content)
    assert "the newest whole one" in continues(start(run), run)


def test_without_latest_a_run_continues_from_the_newest_complete_checkpoint(
    start: Start, run: Path
) -> None:
    (run / "checkpoints" / "LATEST").unlink()
    (run / "checkpoints" / "step_9").mkdir()
    assert "the newest whole one" in continues(start(run), run)


def test_incomplete_checkpoints_are_never_overwritten_by_a_new_run(start: Start, run: Path) -> None:
    (run / "checkpoints" / "LATEST").unlink()
    for step in (1, 2):
        (run / "checkpoints" / f"step_{step}" / "optimizer.pt").unlink()
    before = (run / "metrics.jsonl").read_bytes()
    refused_in_a_line(start(run), "step_2", "optimizer.pt", "remove")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_stray_checkpoint_names_and_metrics_lines_are_ignored(start: Start, run: Path) -> None:
    checkpoints = run / "checkpoints"
    for name in ("step_3", "step_3.tmp", "notes.txt"):
        (checkpoints / name).write_text("stray")
    shutil.rmtree(run / "model")
    for name in ("model", "model.tmp", "model.old", "baselines"):
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).write_text("stray")
    (checkpoints / "step_\u00b2").mkdir()
    (checkpoints / "step_x").mkdir()
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'1\n\xff\xfe\n{"step": "2"}\n[]\n{"step": 2, "lo')
    (run / "lock").write_bytes(b"\xff" * 100)
    continues(start(run), run)
    (run / "lock").write_bytes(b"[" * 100_000)
    # --steps can't change in a run, so config.json is edited to make the run one step longer.
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "steps": 3}))
    state = json.loads((checkpoints / "step_2" / "state.json").read_text())
    # The next evaluation is the best, so that the model is saved.
    text = json.dumps({**state, "finished": False, "best": 1e9})
    (checkpoints / "step_2" / "state.json").write_text(text)
    status, message = start(run, "--steps", 3)
    assert status == 0, message
    assert (checkpoints / "LATEST").read_text() == "step_3"
    assert (checkpoints / "step_3" / "model.safetensors").is_file()
    assert (run / "model" / "model.safetensors").is_file() and "no more curves" in message


def test_a_run_continues_with_options_of_other_versions_of_pointup(start: Start, run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    del config["patience"], config["weight_decay"], config["loss"]["repulsion"], config["slots"]
    config["of_a_later_version"] = {"depth": 3}
    (run / "config.json").write_text(json.dumps(config))
    message = continues(start(run), run)
    assert "of_a_later_version.depth is no option of this version" in message
    del config["seed"]
    (run / "config.json").write_text(json.dumps(config))
    refused_in_a_line(start(run, "--seed", 5), "seed 0 by default, not 5", "--output-dir")


def test_another_number_of_threads_is_reported(start: Start, run: Path) -> None:
    assert "cpu_threads" not in continues(start(run), run)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        message = continues(start(run), run)
    finally:
        torch.set_num_threads(threads)
    assert f"cpu_threads changed from {threads} to {threads + 1}" in message


def test_a_start_that_fails_does_not_claim_the_directory(
    start: Start, tmp_path: Path, pair_directory: Path
) -> None:
    run = tmp_path / "run"
    refused_in_a_line(start(run, "--data", tmp_path / "nowhere"), "nowhere")
    refused_in_a_line(start(run, "--token-budget", 100), "raise --token-budget")
    status, message = start(run, "--steps", 1)
    assert status == 0, message
    refused_in_a_line(start(run, "--steps", 1, "--learning-rate", 1), "learning_rate")


@pytest.mark.parametrize("lacking", ["RANK", "MASTER_ADDR"])
def test_several_processes_without_a_launcher_are_refused(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(lacking)
    refused_in_a_line(start(tmp_path / "run"), "WORLD_SIZE is 2", lacking, "accelerate launch")
    monkeypatch.setenv("WORLD_SIZE", "two")
    refused_in_a_line(start(tmp_path / "run"), "WORLD_SIZE is 'two'")


def test_a_cache_that_can_not_be_written_is_named(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("POINTUP_CACHE", str(tmp_path / "file" / "cache"))
    outcome = start(tmp_path / "run", data=None)
    refused_in_a_line(outcome, str(tmp_path / "file" / "cache"), "POINTUP_CACHE")
