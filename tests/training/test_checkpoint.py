"""Checkpoints: complete or absent."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
import torch

from pointup.model.upsampler import Upsampler
from pointup.training.run_directory.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    save_checkpoint,
    save_model,
)
from pointup.training.training_state import load_checkpoint

Trained = tuple[torch.nn.Module, torch.optim.Optimizer]


def trained(steps: int = 0, seed: int = 0) -> Trained:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(directory: Path, step: int, keep: int = 3, state: Trained | None = None) -> Path:
    model, optimizer = state or trained(step)
    return save_checkpoint(directory, model, optimizer, None, {"step": step, "best": 0.5}, keep)


def test_a_loaded_checkpoint_has_the_saved_state_and_trains_identically(tmp_path):
    model, optimizer = trained(3)
    save(tmp_path, 3, state=(model, optimizer))
    again, its_optimizer = trained(seed=1)
    path = latest_checkpoint(tmp_path)
    assert path == tmp_path / "step_3"
    assert load_checkpoint(path, again, its_optimizer, None) == {"step": 3, "best": 0.5}
    for net, opt in ((model, optimizer), (again, its_optimizer)):
        net(torch.ones(1, 3)).sum().backward()
        opt.step()
    assert torch.equal(model.weight, again.weight)


def test_no_checkpoint_is_none_and_a_partially_written_one_is_ignored(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, 5)
    (tmp_path / ".step_9.part").mkdir()
    (tmp_path / ".step_9.part" / "state.json").write_text("{")
    assert latest_checkpoint(tmp_path) == tmp_path / "step_5"
    save(tmp_path, 9)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_9"
    assert not (tmp_path / ".step_9.part").exists()


def test_the_oldest_by_step_are_deleted_not_the_oldest_by_name(tmp_path):
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_10", "step_11"]


def test_a_kill_at_any_file_operation_leaves_latest_on_a_whole_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)
    real = os.fsync
    for fatal in range(7):
        calls = 0

        def fsync(descriptor: int, fatal: int = fatal) -> None:
            nonlocal calls
            calls += 1
            if calls > fatal:
                raise SystemExit
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(SystemExit):
            save(tmp_path, 2 + fatal)
        monkeypatch.setattr(os, "fsync", real)
        path = latest_checkpoint(tmp_path)
        assert path is not None
        load_checkpoint(path, *trained(), None)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json"])
def test_a_truncated_file_is_refused_by_name_and_an_older_checkpoint_offered(tmp_path, name):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"step_2: can't be continued from.*write step_1"):
        load_checkpoint(path, *trained(), None)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json"])
def test_an_incomplete_checkpoint_newer_than_latest_is_skipped_and_never_offered(tmp_path, name):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (save(tmp_path, 3) / name).unlink()
    path = save(tmp_path, 4) / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=rf"step_4: .*{name}.*; write step_2 into"):
        latest_checkpoint(tmp_path)
    (tmp_path / "LATEST").write_text("step_2")
    assert latest_checkpoint(tmp_path) == tmp_path / "step_2"
    save(tmp_path, 3, keep=1)
    path = latest_checkpoint(tmp_path)
    assert path == tmp_path / "step_3"
    assert load_checkpoint(path, *trained(), None)["step"] == 3


def test_after_going_back_to_an_earlier_checkpoint_later_ones_do_not_count_as_kept(tmp_path):
    for step in (4, 6, 8):
        save(tmp_path, step)
    (tmp_path / "LATEST").write_text("step_4")
    save(tmp_path, 5, keep=1)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_5"
    assert not (tmp_path / "step_4").exists()


def test_a_changed_byte_a_foreign_model_and_another_format_are_refused(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    foreign = torch.nn.Linear(5, 2), torch.optim.AdamW(torch.nn.Linear(5, 2).parameters())
    with pytest.raises(CheckpointError, match=r"step_2: can't be continued from.*size mismatch"):
        load_checkpoint(path, *foreign, None)
    content = bytearray((path / "optimizer.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "optimizer.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is damaged.*write step_1"):
        load_checkpoint(path, *trained(), None)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 0}))
    with pytest.raises(CheckpointError, match=r"step_2: .* not that of this checkpoint; write"):
        latest_checkpoint(tmp_path)


def test_a_disk_that_can_not_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="can't be written"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_a_disk_without_space_for_the_optimizer_is_named_as_such(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"can't be written \(File too large\)"):
            save(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_best_model_is_replaced_as_a_whole(tmp_path):
    small = {"feature_dim": 8, "heads": 2, "child_heads": 2, "num_layers": 1}
    for k in (4, 5):
        save_model(Upsampler(k=k, **small), tmp_path / "model")
        assert json.loads((tmp_path / "model" / "config.json").read_text())["k"] == k
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
