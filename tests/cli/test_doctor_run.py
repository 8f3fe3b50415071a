from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pointup.cli.doctor.findings import (
    Finding,
    data_findings,
    ok,
    run_findings,
    shared_memory_needed,
)
from pointup.cli.main import main
from pointup.datasets.opening import open_together
from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import write_pairs
from pointup.errors import DataError
from pointup.model.upsampler import Upsampler
from pointup.terminal import in_bytes
from pointup.training.run_directory.checkpoint import save_checkpoint, save_model


def level_of(findings: list[Finding], subject: str) -> str:
    (level,) = [finding.level for finding in findings if finding.subject == subject]
    return level


def cloud(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, number]).random((number, 3)).astype(np.float32)


def test_a_good_dataset_is_ok_and_a_pair_beyond_the_budget_is_named(pair_directory):
    findings = list(data_findings(str(pair_directory), 12, 20480))
    assert [finding.level for finding in findings] == ["ok", "ok"]
    assert "40 pairs" in findings[0].text
    small = [f for f in data_findings(str(pair_directory), 12, 50) if f.level == "warn"]
    assert len(small) == 2 and small[0].text.startswith("train_") and "--crop" in small[0].remedy
    assert len(list(data_findings(str(pair_directory), 12, "auto"))) == 2


def test_bad_samples_are_named_and_a_dataset_without_good_ones_fails(tmp_path):
    hurt = cloud(20)
    hurt[3] = np.nan
    bad, good = Pair("hurt", hurt, cloud(40)), Pair("good", cloud(20), cloud(40))
    write_pairs([bad, good], [bad], tmp_path / "pairs", {})
    train, validation = data_findings(str(tmp_path / "pairs"), 12, "auto")
    assert train.level == "warn" and "1 bad: hurt: source has 1 points" in train.text
    assert validation.level == "fail" and "pointup inspect" in validation.remedy
    (missing,) = data_findings(str(tmp_path / "none"), 12, "auto")
    assert missing.level == "fail" and "none" in missing.text


def test_what_looks_wrong_with_pairs_is_a_warning(tmp_path):
    write_pairs([Pair("a", cloud(40), cloud(20))], [Pair("b", cloud(20), cloud(40))],
                tmp_path / "pairs", {})  # fmt: skip
    train, note, validation = data_findings(str(tmp_path / "pairs"), 12, "auto")
    assert (train.level, note.level, validation.level) == ("ok", "warn", "ok")
    assert "are they swapped?" in note.text and "pointup inspect" in note.remedy


def test_a_dataset_of_one_pair_fails_with_what_training_would_say(tmp_path):
    folder = tmp_path / "pairs"
    write_pairs([Pair("only", cloud(20), cloud(40))], [], folder, {})
    train, validation = data_findings(str(folder), 12, "auto")
    assert train.level == "ok" and validation.level == "fail"
    assert validation.text.startswith(f"training refuses {folder}: one sample can't be split into")
    remedy = "add a validation split, or train on it together with a dataset that has one"
    assert validation.remedy == remedy
    with pytest.raises(DataError, match=remedy):
        open_together([folder], "validation")
    write_pairs([Pair("a", cloud(20), cloud(40))], [Pair("b", cloud(21), cloud(40))],
                tmp_path / "other", {})  # fmt: skip
    assert list(map(len, open_together([folder, tmp_path / "other"], "validation"))) == [0, 1]


@pytest.fixture
def run(tmp_path) -> Path:
    """The directory of a finished run, with checkpoints of steps 1, 2 and 3."""
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


def test_a_finished_run_is_ok(run):
    findings = list(run_findings(run))
    assert {finding.level for finding in findings} == {"ok"}
    texts = "\n".join(finding.text for finding in findings)
    assert "step_3 is intact" in texts and "LATEST" in texts and "step 3, " in texts


def test_a_run_that_crops_gets_no_warning_of_large_pairs(run, pair_directory, capsys):
    for crop, warned in ((False, True), (True, False)):
        (run / "config.json").write_text(json.dumps({"token_budget": 50, "crop": crop}))
        assert main(["doctor", "--data", str(pair_directory), "--run", str(run)]) == 0
        assert ("more than the token budget" in capsys.readouterr().out) == warned


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_a_changed_byte_in_the_latest_checkpoint_fails_and_an_intact_one_is_offered(run, name):
    damage(run / "checkpoints" / "step_3" / name)
    damage(run / "checkpoints" / "step_1" / name)
    first, second, third = (f for f in run_findings(run) if f.subject == "checkpoint")
    assert (first.level, second.level, third.level) == ("warn", "ok", "fail")
    assert f"damaged {name}" in third.text and "write step_2 into" in third.remedy


def test_a_checkpoint_that_is_cut_short_or_gone_fails_and_a_missing_marker_warns(run):
    latest = run / "checkpoints" / "step_3"
    os.truncate(latest / "optimizer.pt", 100)
    (third,) = (f for f in run_findings(run) if "LATEST" in f.text)
    assert third.level == "fail" and "cut short" in third.text
    shutil.rmtree(latest)
    assert level_of(list(run_findings(run)), "checkpoints") == "fail"
    (run / "checkpoints" / "LATEST").unlink()
    (missing,) = (f for f in run_findings(run) if f.subject == "checkpoints")
    assert missing.level == "warn" and "step_2" in missing.remedy
    shutil.rmtree(run / "checkpoints")
    assert level_of(list(run_findings(run)), "checkpoints") == "warn"


def test_the_rest_of_an_interrupted_save_is_reported(run):
    (run / "checkpoints" / ".step_4.part").mkdir()
    assert level_of(list(run_findings(run)), "checkpoints") == "warn"


def test_a_run_without_config_or_with_a_broken_model_fails(run, tmp_path):
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


def test_a_lock_is_held_by_a_process_that_lives_and_stale_after_its_kill(run):
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
        assert level_of(list(run_findings(run)), "last heartbeat") == "warn"
    finally:
        holder.kill()
        holder.wait()
    findings = list(run_findings(run))
    (stale,) = (f for f in findings if f.subject == "lock")
    assert stale.level == "warn" and who in stale.text
    assert level_of(findings, "last heartbeat") == "ok"


def test_metrics_cut_short_count_up_to_the_last_whole_line_and_a_bad_loss_is_told(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": null}\n{"step": 5, "lo')
    (life,) = (f for f in run_findings(run) if f.subject == "last heartbeat")
    assert life.level == "warn" and life.text.startswith("step 4, ")
    (run / "metrics.jsonl").write_text("")
    assert level_of(list(run_findings(run)), "last heartbeat") == "warn"


def test_the_command_prints_each_finding_and_fails_when_one_does(run, pair_directory, capsys):
    assert main(["doctor", "--data", str(pair_directory), "--run", str(run)]) == 0
    text = capsys.readouterr().out
    needed = in_bytes(shared_memory_needed(2, 4096, 1))
    assert f"the loader needs {needed}" in text and "fail " not in text
    assert "data, train" in text and "step_3 is intact" in text and "No check failed" in text
    damage(run / "checkpoints" / "step_3" / "optimizer.pt")
    assert main(["doctor", "--run", str(run)]) == 1
    assert "\n1 failed, " in capsys.readouterr().out
