"""Attributes of new points: interpolated where there are values, and there even if empty."""

from __future__ import annotations

import numpy as np
import pytest
from sheets import small_model

from pointup import upsample
from pointup.io.cloud import PointCloud
from pointup.upsampling.attributes import attributes_between


def test_values_that_are_not_numbers_don_t_spread() -> None:
    rows = np.zeros(4, [("intensity", np.float32), ("rgb", np.float64, 3)])
    rows["intensity"] = [1.0, np.nan, 4.0, np.nan]
    rows["rgb"] = [[1, 2, 3], [np.nan, 2, 3], [3, 4, 5], [3, 4, np.nan]]
    distance = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, np.inf], [1.0, 1.0, 1.0]])
    nearest = np.array([[0, 1, 2], [0, 1, -1], [1, 3, 3]])
    found = attributes_between(rows, distance, nearest)
    assert found["intensity"][:2].tolist() == [2.5, 1.0]
    assert np.isnan(found["intensity"][2])
    np.testing.assert_allclose(found["rgb"][0], [2, 8 / 3, 11 / 3])
    np.testing.assert_allclose(found["rgb"][1], [1, 2, 3])


@pytest.mark.parametrize("options", [{"only_new": True}, {"originals": False}])
def test_an_empty_result_has_the_attributes_of_any_other(options: dict[str, bool]) -> None:
    rng = np.random.default_rng(0)
    classes = np.full(100, 5, np.uint8)
    cloud = PointCloud(rng.random((100, 3)), {"classification": classes})
    model = small_model()
    none = upsample(cloud, 1.0, model=model, only_new=True)
    some = upsample(cloud, 2.0, model=model, **options)
    assert len(none) == 0 < len(some)
    assert none.attributes.keys() == some.attributes.keys()
    assert none.attributes["classification"].dtype == np.uint8
