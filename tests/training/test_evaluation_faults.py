"""Faults of single clouds in the evaluation during training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import write_pairs
from pointup.model.upsampler import Upsampler, UpsamplerOutput
from pointup.training.config import TrainConfig
from pointup.training.datasets import open_training_data
from pointup.training.evaluation import Evaluation, EvaluationResult


def test_a_cloud_too_large_for_the_memory_does_not_make_a_model_unusable(
    pair_directory: Path, accelerator: Accelerator
) -> None:
    config = TrainConfig(data=(str(pair_directory),), num_pictures=0)
    data = open_training_data(config, accelerator)
    evaluation, upsampler = Evaluation(data, accelerator, config, 20_480), Upsampler()
    largest = int(data.validation.num_source.max())

    def result_with(fault: Callable[[UpsamplerOutput], UpsamplerOutput]) -> EvaluationResult:
        class Faulty(nn.Module):
            def forward(self, pos: Tensor, ptr: Tensor, ratio: Tensor) -> UpsamplerOutput:
                output: UpsamplerOutput = upsampler(pos, ptr, ratio)
                return fault(output) if int(ptr.diff().max()) == largest else output

        model = Faulty()
        records = [r for batch in evaluation.batches for r in evaluation.records_of(batch, model)]
        result = evaluation.result_of(records)
        assert result is not None
        return result

    def without_memory(output: UpsamplerOutput) -> UpsamplerOutput:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def not_finite(output: UpsamplerOutput) -> UpsamplerOutput:
        return output._replace(pos=output.pos * torch.nan)

    number = len(data.validation)
    left = result_with(without_memory)
    assert np.isfinite(left.score) and len(left.shares) == number - 1
    assert result_with(not_finite).score == np.inf


@pytest.mark.parametrize(
    ("description", "unit"),
    [('{"recipe": 1}', "m"), ('{"inputs": ["a.laz"]}', ""), ('{"recipe"', "")],
)
def test_figures_have_the_unit_of_the_surveys_and_a_damaged_description_costs_only_the_unit(
    description: str, unit: str, tmp_path: Path, accelerator: Accelerator
) -> None:
    cloud = np.random.default_rng(0).random((40, 3)).astype(np.float32)
    pairs = [Pair(str(i), cloud, cloud) for i in range(3)]
    write_pairs(pairs[:2], pairs[2:], tmp_path / "pairs", {})
    config = TrainConfig(data=(str(tmp_path / "pairs"),), num_pictures=0)
    evaluation = Evaluation(open_training_data(config, accelerator), accelerator, config, 20_480)
    (tmp_path / "pairs" / "pointup.json").write_text(description)
    upsampler = Upsampler()
    records = [r for batch in evaluation.batches for r in evaluation.records_of(batch, upsampler)]
    result = evaluation.result_of(records)
    assert result is not None and len(result.shares) == 1
    assert result.unit == unit
