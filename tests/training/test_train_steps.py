"""Steps of train.py in this process: gradients and failures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import final_weights, options, training
from torch import Tensor
from torch_geometric.data import Batch

from pointup.training.datasets import open_training_data
from pointup.training.objective import LossConfig
from pointup.training.run_directory import checkpoint


def test_noise_moves_sources_and_no_targets_anew_in_training_and_once_in_validation(
    pair_directory, tmp_path, accelerator
):
    quiet, noisy = (
        open_training_data(options(pair_directory, tmp_path, noise_spacings=noise), accelerator)
        for noise in (0.0, 0.5)
    )
    for of in ("train", "validation"):
        before, after = (getattr(data, of)[(0, 0)] for data in (quiet, noisy))
        assert (before.pos - after.pos).abs().max() > 0
        assert torch.equal(before.target, after.target)
    assert not torch.equal(noisy.train[(0, 0)].pos, noisy.train[(1, 0)].pos)
    assert torch.equal(noisy.validation[0].pos, noisy.validation[0].pos)


def test_the_weights_of_the_loss_change_with_the_run_and_go_on_when_it_is_continued(
    pair_directory, tmp_path, accelerator, monkeypatch
):
    loss = LossConfig(point_to_plane=(3.0, 0.0), coverage=(0.0, 1.0))
    config = options(pair_directory, tmp_path, steps=4, save_every=2, loss=loss)
    real = training.losses_of_model
    shares: list[float] = []

    def record(*given: Any) -> Tensor:
        shares.append(given[-1])
        return real(*given)

    monkeypatch.setattr(training, "losses_of_model", record)
    training.train(config, accelerator, stop_after=2)
    training.train(config, accelerator)
    assert list(dict.fromkeys(shares)) == [0.0, 0.25, 0.5, 0.75]


def test_a_checkpoint_is_written_when_the_last_one_is_too_old(
    pair_directory, tmp_path, accelerator
):
    config = options(pair_directory, tmp_path, steps=4, num_pictures=0, save_every=99)
    config = replace(config, eval_every=99, keep_checkpoints=9)

    def saved() -> list[str]:
        return sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))

    training.train(replace(config, save_minutes=1e-9), accelerator, stop_after=2)
    assert saved() == ["step_1", "step_2"]
    # Counted from the checkpoint that the run continues from, here after an hour of training.
    path = tmp_path / "checkpoints" / "step_2" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "elapsed_seconds": 3600.0}))
    training.train(config, accelerator)
    assert saved() == ["step_1", "step_2", "step_4"]


def test_a_non_finite_step_is_skipped_and_its_cloud_named(
    pair_directory, tmp_path, accelerator, monkeypatch
):
    real = training.losses_of_model
    bad: list[str] = []

    def spoil(model: Any, batch: Batch, *rest: Any) -> Tensor:
        losses = real(model, batch, *rest)
        if not bad:
            bad.append(batch.name[1])
            losses = losses * torch.tensor([1.0, math.nan, *[1.0] * (len(losses) - 2)])
        return losses

    monkeypatch.setattr(training, "losses_of_model", spoil)
    training.train(options(pair_directory, tmp_path, steps=2, num_pictures=0), accelerator)
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert "step 1 skipped: loss nan" in log and f"from {bad[0]}\n" in log
    assert "step 2 skipped" not in log
    assert all(weight.isfinite().all() for weight in final_weights(tmp_path, 2).values())


def test_an_unwritable_disk_is_reported_and_training_continues_or_ends_by_choice(
    pair_directory, tmp_path, accelerator, monkeypatch
):
    real = Path.write_bytes

    def full(path: Path, content: Any) -> int:
        if "step_4" in str(path):
            real(path, b"half")
            raise OSError(28, "No space left on device")
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    changes = {"save_every": 2, "eval_every": 6, "num_pictures": 0}
    training.train(options(pair_directory, tmp_path / "on", **changes), accelerator)
    log = (tmp_path / "on" / "logs" / "rank_0.log").read_text()
    assert "step_4: the checkpoint can't be written (No space left on device)" in log
    saved = {path.name for path in (tmp_path / "on" / "checkpoints").iterdir()}
    assert saved == {"LATEST", "step_2", "step_6"}
    with pytest.raises(checkpoint.CheckpointError, match="step_4"):
        training.train(
            options(pair_directory, tmp_path / "end", on_save_error="end", **changes), accelerator
        )
    assert (tmp_path / "end" / "checkpoints" / "LATEST").read_text() == "step_2"


def test_debugging_names_the_operation_that_caused_a_non_finite_gradient(
    pair_directory, tmp_path, accelerator, monkeypatch, capsys
):
    real = training.losses_of_model
    monkeypatch.setattr(
        training, "losses_of_model", lambda *given: (real(*given) * 0.0).sqrt() * 0.0
    )
    with pytest.raises(RuntimeError, match="SqrtBackward0"):
        training.train(options(pair_directory, tmp_path, debug=True), accelerator)
    assert "[0] process 0 of 1" in capsys.readouterr().err
    assert not torch.is_anomaly_enabled()
