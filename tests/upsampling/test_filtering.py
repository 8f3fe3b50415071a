"""Selection of the points to upsample: noise, withheld points and other classes are left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sheets import sheet, small_model

from pointup import upsample
from pointup.errors import ConfigError, DataError
from pointup.io.cloud import PointCloud
from pointup.upsampling.filtering import PointFilter


def classified(num_points: int, seed: int, name: str = "classification") -> PointCloud:
    rng = np.random.default_rng(seed)
    classes = rng.choice([1, 2, 7, 18], num_points, p=[0.4, 0.4, 0.1, 0.1]).astype(np.uint8)
    withheld = (rng.random(num_points) < 0.1).astype(np.uint8)
    return PointCloud(sheet(num_points, seed=seed), {name: classes, "withheld": withheld})


@given(
    st.integers(0, 1000),
    st.one_of(st.none(), st.sets(st.sampled_from([1, 2, 7, 18]), min_size=1)),
    st.booleans(),
)
def test_a_point_is_selected_by_its_class_and_its_withheld_flag(
    seed: int, classes: set[int] | None, include_noise: bool
) -> None:
    cloud = classified(40, seed)
    chosen = None if classes is None else tuple(classes)
    taken = PointFilter(classes=chosen, include_noise=include_noise)(cloud)
    for i in range(40):
        number = int(cloud.attributes["classification"][i])
        wanted = (
            number in classes if classes is not None else include_noise or number not in (7, 18)
        )
        if cloud.attributes["withheld"][i] and not include_noise:
            wanted = False
        assert taken[i] == wanted


@settings(max_examples=4)
@given(st.integers(0, 100), st.floats(1.0, 5.0), st.sampled_from([None, (1,), (2, 7)]))
def test_the_ratio_counts_the_points_that_are_upsampled(
    seed: int, ratio: float, classes: tuple[int, ...] | None
) -> None:
    cloud, model = classified(50, seed, "Classification"), small_model(0.1)
    taken = PointFilter(classes=classes)(cloud)
    made = upsample(cloud, ratio, model=model, classes=classes)
    assert len(made) == 50 - taken.sum() + round(ratio * taken.sum())
    assert np.array_equal(made.positions[:50], cloud.positions)
    assert taken[made.attributes["parent_index"]][50:].all()
    new = upsample(cloud.select(taken), ratio, model=model, include_noise=True, only_new=True)
    assert np.array_equal(made.positions[50:], new.positions)
    only_model = upsample(cloud, ratio, model=model, classes=classes, originals=False)
    assert len(only_model) == round(ratio * taken.sum())


def test_a_cloud_without_classes_is_upsampled_whole() -> None:
    points = sheet(50)
    assert PointFilter()(PointCloud(points)).all()
    with pytest.raises(DataError, match=r"^points: has no attribute `classification`"):
        upsample(points, classes=[2], model=small_model())
    with pytest.raises(
        DataError,
        match=r"^points: has 0 of 50 points without noise, withheld points and other classes",
    ):
        upsample(classified(50, 0), classes=[5], model=small_model())
    for bad in ((), (256,), (-1,), ("2",), 2, "2"):
        with pytest.raises(ConfigError, match=r"^class(es)?\b"):
            upsample(points, classes=bad, model=small_model())


def test_a_cloud_of_noise_alone_is_refused_for_its_noise() -> None:
    cloud = PointCloud(sheet(50), {"classification": np.full(50, 7, np.uint8)})
    with pytest.raises(DataError, match=r"^points: has 0 of 50 points without noise"):
        upsample(cloud, model=small_model())
