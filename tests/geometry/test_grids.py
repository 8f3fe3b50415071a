import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pointup.geometry.grids import box_of, in_box

COORDINATES = st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 1.0, np.nan])


@given(arrays(np.float64, st.tuples(st.integers(0, 9), st.just(3)), elements=COORDINATES))
def test_a_box_holds_the_points_that_a_comparison_of_rows_finds(points):
    for num_axes in (2, 3):
        low, high = np.array([-1.0, 0.0, -np.inf])[:num_axes], np.array([0.5, 1.0, 0.5])[:num_axes]
        rows = points[:, :num_axes]
        expected = ((rows >= low) & (rows <= high)).all(axis=1)
        assert np.array_equal(in_box(points, low, high), expected)


@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 9), st.integers(1, 3)),
        elements=st.floats(-9, 9, width=32),
    )
)
def test_the_box_of_points_reaches_from_the_smallest_to_the_largest_coordinates(points):
    low, high = box_of(points)
    assert np.array_equal(low, points.min(axis=0)) and np.array_equal(high, points.max(axis=0))
    assert low.dtype == points.dtype and in_box(points, low, high).all()
