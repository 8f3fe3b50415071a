"""Faults of single clouds in the evaluation during training."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from runs import SMALL

from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import write_pairs
from pointup.errors import ConfigError
from pointup.evaluation import pairs
from pointup.model.upsampler import Upsampler
from pointup.training.config import TrainConfig
from pointup.training.datasets import open_training_data
from pointup.training.evaluation import Evaluation, EvaluationResult


def evaluate(evaluation: Evaluation, model: Upsampler) -> EvaluationResult:
    records = [r for batch in evaluation.batches for r in evaluation.records_of(batch, model)]
    result = evaluation.result_of(records)
    assert result is not None
    return result


def test_a_cloud_too_large_for_the_memory_does_not_make_a_model_unusable(
    pair_directory, accelerator, monkeypatch
):
    config = TrainConfig(data=(str(pair_directory),), num_pictures=0)
    data = open_training_data(config, accelerator)
    evaluation, upsampler = Evaluation(data, accelerator, config), Upsampler(**asdict(SMALL))
    largest, real = int(data.validation.num_source.max()), pairs.upsampled_pairs

    def without_memory(batch: Any, *given: Any, **named: Any) -> Any:
        if len(batch.pos) == largest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(batch, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(pairs, "upsampled_pairs", without_memory)
        left = evaluate(evaluation, upsampler)
    assert np.isfinite(left.score) and len(left.shares) == len(data.validation) - 1
    # Parts of few pairs have unequally many points, and the score is the mean of the pairs.
    assert {len(parts) for parts in left.parts.values()} == {9}
    assert left.score == pytest.approx(np.mean(left.shares))
    for weights in upsampler.parameters():
        weights.data.fill_(torch.nan)
    assert evaluate(evaluation, upsampler).score == np.inf


@pytest.mark.parametrize(("figure", "missing"), [("p2f", "a surface"), ("canopy_rmse", "heights")])
def test_a_figure_that_no_validation_pair_has_is_refused_before_the_first_step(
    figure, missing, tmp_path, accelerator
):
    cloud = np.random.default_rng(0).random((40, 3)).astype(np.float32)
    clouds = [Pair(str(i), cloud, cloud, vertical=False) for i in range(3)]
    write_pairs(clouds[:2], clouds[2:], tmp_path / "pairs", {})
    config = TrainConfig(data=(str(tmp_path / "pairs"),), choose_by=figure)
    data = open_training_data(config, accelerator)
    with pytest.raises(
        ConfigError, match=f"--choose-by {figure}: no validation pair has {missing}"
    ):
        Evaluation(data, accelerator, config)


@pytest.mark.parametrize(
    ("description", "unit"),
    [('{"recipe": 1}', "m"), ('{"inputs": ["a.laz"]}', ""), ('{"recipe"', "")],
)
def test_figures_have_the_unit_of_the_surveys_and_a_damaged_description_costs_only_the_unit(
    description, unit, tmp_path, accelerator
):
    cloud = np.random.default_rng(0).random((40, 3)).astype(np.float32)
    clouds = [Pair(str(i), cloud, cloud) for i in range(3)]
    write_pairs(clouds[:2], clouds[2:], tmp_path / "pairs", {})
    config = TrainConfig(data=(str(tmp_path / "pairs"),), num_pictures=0)
    data = open_training_data(config, accelerator)
    (tmp_path / "pairs" / "pointup.json").write_text(description)
    result = evaluate(Evaluation(data, accelerator, config), Upsampler(**asdict(SMALL)))
    assert len(result.shares) == 1 and result.unit == unit
