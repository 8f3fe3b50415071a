"""float64 as torch's default dtype, and as that of points: models compute in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from forest_options import FOREST
from test_model import as_if_trained, packed
from torch_geometric.data import Data

from pointup import Upsampler, upsample
from pointup.datasets.batch import collate
from pointup.training.objective import LossConfig, losses_of_model


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("options", [{}, FOREST])
def test_models_are_made_loaded_and_applied_whatever_the_default_dtype(
    options: dict[str, object], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, points = as_if_trained(**options), packed(60)[0].numpy()
    expected = upsample(points, 2.5, model=model)
    model.save_pretrained(tmp_path)
    request.getfixturevalue("float64_by_default")
    assert {weight.dtype for weight in Upsampler(**options).parameters()} == {torch.float32}
    assert np.array_equal(upsample(points, 2.5, model=tmp_path), expected)


@pytest.mark.usefixtures("float64_by_default")
def test_batches_are_float32_and_are_trained_on_whatever_the_default_dtype() -> None:
    pos = packed(40)[0].float()
    samples = [
        Data(pos=pos, target=pos, name=name, index=0, **more)
        for name, more in (("a", {}), ("b", {"resample": pos}))
    ]
    batch = collate(samples)
    for name in ("pos", "target", "resample"):
        assert batch[name].dtype == torch.float32
    losses_of_model(as_if_trained().train(), batch, None, 4.0, LossConfig()).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_points_of_another_floating_dtype_are_cast_to_float32(
    dtype: torch.dtype, autocast: bool
) -> None:
    model, (pos, ptr) = as_if_trained(), packed(60)
    pos = pos.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        made, expected = (model(points, ptr, 2.0) for points in (pos, pos.float()))
    assert made.pos.dtype == made.candidates.dtype == torch.float32
    assert torch.equal(made.pos, expected.pos)


@pytest.mark.parametrize(
    "pos", [torch.zeros(9, 6), torch.zeros(9), torch.zeros(9, 3, dtype=torch.int64)]
)
def test_points_that_are_not_three_floats_each_are_refused(pos: torch.Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"^points \(9,.*\) of torch\..*: must be \(N, 3\) float32"
    ):
        as_if_trained()(pos, torch.tensor([0, 9]), 2.0)
