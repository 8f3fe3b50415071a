"""train.py in this process: what a run leaves behind, and that it continues where it stopped."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import ROOT, metrics_of, wavy_pair
from safetensors.torch import load_file
from torch import Tensor
from torch_geometric.data import Batch

sys.path.insert(0, str(ROOT))

import train as training
from pointup.data.batch import collate
from pointup.data.pairs import PairDataset, open_pairs, write_pairs
from pointup.errors import ConfigError, DataError, PointupError, TrainingError
from pointup.model import Upsampler
from pointup.modelconfig import ModelConfig
from pointup.training import checkpoint
from pointup.training.config import TrainConfig
from pointup.training.launch import make_accelerator
from pointup.training.reduction import StepReduction

SMALL = ModelConfig(feature_dim=16, k=6, num_layers=1, heads=2, child_heads=2, position_hidden=8)


@pytest.fixture
def accelerator(tmp_path: Path) -> Accelerator:
    return make_accelerator(tmp_path, ("tensorboard",))


def options(data: Path, output_dir: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(
        **{
            "data": str(data), "output_dir": output_dir, "steps": 6, "token_budget": 1200,
            "num_workers": 0, "log_every": 1, "eval_every": 3, "save_every": 3,
            "num_pictures": 1, "model": SMALL, **changes,
        }
    )  # fmt: skip


def final_weights(output_dir: Path, step: int = 6) -> dict[str, Tensor]:
    return load_file(output_dir / "checkpoints" / f"step_{step}" / "model.safetensors")


def test_a_run_leaves_config_metrics_events_logs_checkpoints_and_the_best_model(
    pair_directory: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    training.train(options(pair_directory, tmp_path / "run"), accelerator)
    run = tmp_path / "run"
    saved = json.loads((run / "config.json").read_text())
    assert saved["model"]["feature_dim"] == 16 and saved["slots"] == 1
    lines = metrics_of(run)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    fields = {
        "step", "epoch", "loss", "learning_rate", "grad_norm", "num_clouds", "num_tokens",
        "tokens_per_second", "step_seconds", "data_wait_seconds", "idle_fraction",
        "peak_memory_bytes", "data_reading_seconds", "data_augmenting_seconds",
        "data_packing_seconds", "limited_by",
    }  # fmt: skip
    assert fields <= steps[0].keys()
    assert all(line["num_tokens"] <= 1200 for line in steps)
    evaluations = [line["validation"] for line in lines if "validation" in line]
    assert len(evaluations) == 2
    assert set(evaluations[0]) == {"model", "midpoints", "source", "floor"}
    assert (run / "logs" / "rank_0.log").stat().st_size > 0
    assert list(run.rglob("events.out.tfevents.*"))
    assert (run / "checkpoints" / "LATEST").read_text() == "step_6"
    assert Upsampler.from_pretrained(run / "model").config == SMALL


def test_a_run_can_start_from_another_model(
    pair_directory: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    torch.manual_seed(1)
    first = Upsampler(**{**SMALL.__dict__, "k": 7})
    torch.nn.init.normal_(first.pull.weight, std=0.1)
    first.save_pretrained(tmp_path / "first")
    config = options(
        pair_directory, tmp_path / "run", steps=1, learning_rate=1e-12, model=ModelConfig(),
        initial_model=str(tmp_path / "first"),
    )  # fmt: skip
    training.train(config, accelerator)
    last = Upsampler.from_pretrained(tmp_path / "run" / "model").state_dict()
    for name, weights in last.items():
        torch.testing.assert_close(weights, first.state_dict()[name], rtol=0, atol=1e-9)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["k"] == 7
    with pytest.raises(ConfigError, match=r"--initial-model .* leave out"):
        training.train(
            options(
                pair_directory, tmp_path / "other", steps=1, model=SMALL,
                initial_model=str(tmp_path / "first"),
            ),
            accelerator,
        )  # fmt: skip


def test_weights_that_are_not_to_be_trained_stay_as_they_are(
    pair_directory: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    torch.manual_seed(1)
    first = Upsampler(**SMALL.__dict__)
    first.save_pretrained(tmp_path / "first")
    config = options(
        pair_directory, tmp_path / "run", steps=2, model=ModelConfig(), train_only=("quota",),
        initial_model=str(tmp_path / "first"),
    )  # fmt: skip
    training.train(config, accelerator)
    before, after = first.state_dict(), final_weights(tmp_path / "run", step=2)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("quota") for name in changed)
    with pytest.raises(ConfigError, match=r"--train-only none: no such weights; .*quota"):
        other = replace(config, train_only=("none",), output_dir=tmp_path / "other")
        training.train(other, accelerator)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop_after", [2, 5])
def test_a_stopped_run_ends_bit_for_bit_where_the_undisturbed_one_ends(
    pair_directory: Path,
    tmp_path: Path,
    accelerator: Accelerator,
    stop_after: int,
    num_workers: int,
) -> None:
    # Six steps are more than an epoch: the stops fall in the middle of the first and the second.
    changes = {
        "num_workers": num_workers, "save_every": 1, "token_budget": 4000, "num_pictures": 0,
        "model": ModelConfig(**{**SMALL.__dict__, "dropout": 0.1}),
    }  # fmt: skip
    whole = options(pair_directory, tmp_path / "whole", **changes)
    parts = options(pair_directory, tmp_path / "parts", **changes)
    training.train(whole, accelerator)
    training.train(parts, accelerator, stop_after=stop_after)
    assert (tmp_path / "parts" / "checkpoints" / "LATEST").read_text() == f"step_{stop_after}"
    training.train(parts, accelerator)
    expected, actual = final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts")
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    losses = [
        [line["loss"] for line in metrics_of(tmp_path / name) if "loss" in line]
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_a_finished_run_is_not_trained_further(
    pair_directory: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    config = options(pair_directory, tmp_path / "run", steps=2)
    training.train(config, accelerator)
    before = metrics_of(tmp_path / "run")
    training.train(config, accelerator)
    assert metrics_of(tmp_path / "run") == before


def test_a_changed_option_is_refused_by_name_and_a_harmless_one_is_not(
    pair_directory: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    training.train(options(pair_directory, tmp_path / "run", steps=1), accelerator)
    with pytest.raises(ConfigError, match=r"learning_rate 0\.003, not 0\.1"):
        training.train(
            options(pair_directory, tmp_path / "run", steps=1, learning_rate=0.1), accelerator
        )
    with pytest.raises(ConfigError, match=r"model\.k 6, not 5"):
        other = ModelConfig(**{**SMALL.__dict__, "k": 5})
        training.train(options(pair_directory, tmp_path / "run", steps=1, model=other), accelerator)
    training.train(options(pair_directory, tmp_path / "run", steps=1, log_every=7), accelerator)


def test_forty_steps_beat_the_baseline_without_a_network(
    pair_directory: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    config = options(
        pair_directory, tmp_path / "run", steps=40, eval_every=40, save_every=40, warmup_steps=5,
        token_budget=2500, augment=False, learning_rate=5e-3,
    )  # fmt: skip
    training.train(config, accelerator)
    (rows,) = [line["validation"] for line in metrics_of(tmp_path / "run") if "validation" in line]
    assert rows["model"]["chamfer"] < 0.99 * rows["midpoints"]["chamfer"]
    assert rows["model"]["cd"] < 0.95 * rows["midpoints"]["cd"]


def test_bad_samples_are_left_out_by_name_and_the_rest_is_trained_on(
    tmp_path: Path, accelerator: Accelerator, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(1)
    pairs = [wavy_pair(f"good_{i}", 40, 3, rng) for i in range(6)]
    broken = wavy_pair("broken", 40, 3, rng)
    broken.source[3] = np.nan
    few = wavy_pair("few", 3, 3, rng)
    write_pairs([*pairs[:4], broken, few], pairs[4:], tmp_path / "data", info={})
    training.train(options(tmp_path / "data", tmp_path / "run", steps=1), accelerator)
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "Left out: train sample broken" in log and "Left out: train sample few" in log
    assert "4 for training" in log


def test_a_dataset_without_any_good_sample_is_an_error(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    rng = np.random.default_rng(1)
    pairs = [wavy_pair(f"few_{i}", 3, 3, rng) for i in range(4)]
    write_pairs(pairs[:3], pairs[3:], tmp_path / "data", info={})
    with pytest.raises(DataError, match="none of the 3 train samples can be used"):
        training.train(options(tmp_path / "data", tmp_path / "run"), accelerator)


def test_a_cloud_larger_than_the_budget_is_named_and_cropped_only_where_asked(
    pair_directory: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    with pytest.raises(PointupError, match=r"train_\d+"):
        training.train(options(pair_directory, tmp_path / "run", token_budget=100), accelerator)
    training.train(
        options(pair_directory, tmp_path / "cropped", token_budget=100, crop=True, steps=1),
        accelerator,
    )
    assert metrics_of(tmp_path / "cropped")[0]["num_tokens"] <= 100


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"token_budget": 0}, "--token-budget is 0"),
        ({"ratio": 0.5}, "ratio of at least 1"),
        ({"steps": 5, "hours": 1.0}, "exclude each other"),
        ({"learning_rate": -1.0}, "--learning-rate"),
        ({"num_workers": -1}, "--num-workers"),
    ],
)
def test_an_impossible_option_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**changes)


def batch_of(directory: Path, *indices: int) -> Batch:
    dataset = PairDataset(open_pairs(directory, "train"))
    return collate([dataset[(0, index)] for index in indices])


def test_the_gradient_does_not_depend_on_how_clouds_are_packed(
    pair_directory: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    config = options(pair_directory, tmp_path)
    torch.manual_seed(0)
    model = Upsampler(**SMALL.__dict__)
    torch.nn.init.normal_(model.pull.weight, std=0.1)
    gradients, totals = [], []
    for packing in ([(0, 1, 2, 3, 4, 5)], [(0,), (1, 2), (), (3, 4, 5)], [(5, 3), (4,), (0, 1, 2)]):
        reduction = StepReduction(accelerator, model.parameters())
        reduction.start()
        for indices in packing:
            batch = batch_of(pair_directory, *indices)
            losses = training.micro_batch_losses(model, batch, accelerator, config)
            assert len(losses) == len(indices)
            losses.sum().backward()
            reduction.add(losses, num_tokens=len(batch.pos) + len(batch.target))
        totals.append(reduction.finish(stop=False, elapsed_seconds=1.0))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert totals[-1].num_clouds == 6
        assert not totals[-1].stop
    for gradient, total in zip(gradients[1:], totals[1:], strict=True):
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-4)
        assert total.loss == pytest.approx(totals[0].loss, rel=1e-5)
        assert total.num_tokens == totals[0].num_tokens


def test_a_micro_batch_without_clouds_adds_nothing(
    pair_directory: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    model = Upsampler(**SMALL.__dict__)
    reduction = StepReduction(accelerator, model.parameters())
    reduction.start()
    losses = training.micro_batch_losses(
        model, batch_of(pair_directory), accelerator, options(pair_directory, tmp_path)
    )
    losses.sum().backward()
    reduction.add(losses, num_tokens=0)
    totals = reduction.finish(stop=True, elapsed_seconds=0.0)
    assert totals.num_clouds == 0 and totals.loss == 0 and totals.stop
    assert all(not p.grad.any() for p in model.parameters())


def test_out_of_memory_is_worked_round_with_the_same_gradient(
    pair_directory: Path,
    tmp_path: Path,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"steps": 3, "token_budget": 2000, "num_pictures": 0}
    training.train(options(pair_directory, tmp_path / "whole", **changes), accelerator)
    real = training.micro_batch_losses

    def too_large(model: Any, batch: Batch, *rest: Any) -> Tensor:
        losses = real(model, batch, *rest)
        if batch.num_graphs > 3:
            losses.sum().backward()  # Gradients of what fails must not count.
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return losses

    monkeypatch.setattr(training, "micro_batch_losses", too_large)
    training.train(options(pair_directory, tmp_path / "halves", **changes), accelerator)
    assert "done again in halves" in (tmp_path / "halves/logs/rank_0.log").read_text()
    for expected, actual in zip(
        metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "halves"), strict=True
    ):
        if "loss" in expected:
            assert actual["num_clouds"] == expected["num_clouds"]
            assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_with_a_bad_number_is_skipped_and_its_cloud_named(
    pair_directory: Path,
    tmp_path: Path,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
) -> None:
    real = training.micro_batch_losses
    bad: list[str] = []

    def spoil(model: Any, batch: Batch, *rest: Any) -> Tensor:
        losses = real(model, batch, *rest)
        if not bad:
            bad.append(batch.name[1])
            losses = losses * torch.tensor([1.0, value, *[1.0] * (len(losses) - 2)])
        return losses

    monkeypatch.setattr(training, "micro_batch_losses", spoil)
    training.train(options(pair_directory, tmp_path, steps=2, num_pictures=0), accelerator)
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert f"step 0 skipped: loss {value:.4g}" in log and f"from {bad[0]}\n" in log
    assert "step 1 skipped" not in log
    assert all(weight.isfinite().all() for weight in final_weights(tmp_path, 2).values())


def test_bad_numbers_without_end_end_the_run_with_the_last_checkpoint_intact(
    pair_directory: Path,
    tmp_path: Path,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training.train(options(pair_directory, tmp_path, steps=20), accelerator, stop_after=3)
    real = training.micro_batch_losses
    monkeypatch.setattr(training, "micro_batch_losses", lambda *given: real(*given) * float("nan"))
    with pytest.raises(TrainingError, match=r"10 steps in a row .* from train_\d+"):
        training.train(options(pair_directory, tmp_path, steps=20, save_every=100), accelerator)
    assert all(weight.isfinite().all() for weight in final_weights(tmp_path, 3).values())


def test_a_disk_that_can_not_be_written_is_said_and_training_goes_on_or_ends_by_choice(
    pair_directory: Path,
    tmp_path: Path,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = checkpoint.save_file

    def full(weights: Any, path: Path) -> None:
        if "step_4" in str(path):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(weights, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
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


def test_debugging_names_the_operation_a_bad_gradient_came_from(
    pair_directory: Path,
    tmp_path: Path,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = training.micro_batch_losses
    monkeypatch.setattr(
        training, "micro_batch_losses", lambda *given: (real(*given) * 0.0).sqrt() * 0.0
    )
    with pytest.raises(RuntimeError, match="SqrtBackward0"):
        training.train(options(pair_directory, tmp_path, debug=True), accelerator)
    assert "[0] process 0 of 1" in capsys.readouterr().err
    assert not torch.is_anomaly_enabled()
