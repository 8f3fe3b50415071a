from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from sheets import CPU, grid, sheet

from pointup.geometry import kernels
from pointup.geometry.neighbors import DeviceTree, host_tree
from pointup.upsampling.store.region import Region

CLOUDS = {
    "random": sheet(900),
    "grid": grid(30),
    "outliers": np.concatenate([sheet(600), [[900, 0, 0], [0, 5, 400], [900, 1, 0]]]),
    "duplicates": np.concatenate([sheet(300), np.full((400, 3), 5.0), sheet(300).round()]),
    "line": np.arange(700.0)[:, None] * (1, 0, 0),
}


# As on a GPU, with the search of the CPU.
device_tree = partial(DeviceTree, device=CPU, use=nullcontext)


@pytest.mark.parametrize(
    ("name", "make_tree"),
    [
        *((name, host_tree) for name in CLOUDS),
        ("duplicates", device_tree),
        *(pytest.param(name, device_tree, marks=pytest.mark.slow) for name in CLOUDS),
    ],
)
def test_neighbors_in_a_region_are_those_in_the_whole_cloud(name, make_tree, make_store):
    store = make_store(CLOUDS[name], block_size=100)
    position = store.read(0, len(store))["position"]
    for dims, k in ((3, 1), (3, 9), (2, 9)):
        gap = position[:, None, :dims] - position[None, :, :dims]
        distance = np.sqrt(np.square(gap).sum(2))
        # By distance, then by place in the store: a region must break ties like this.
        expected = np.lexsort((np.broadcast_to(np.arange(len(position)), gap.shape[:2]), distance))
        for block in range(0, store.num_blocks, 3):
            rows = slice(store.block_ptr[block], store.block_ptr[block + 1])
            region = Region(store, block, block + 1, dims, make_tree)
            found = region.neighbors(position[rows], k)
            other_dims = Region(store, block, block + 1, dims=5 - dims)
            other_dims.neighbors(position[rows], k)
            assert np.array_equal(found[0], other_dims.neighbors(position[rows], k, dims)[0])
            index = expected[rows, :k]
            assert np.allclose(found[0], np.take_along_axis(distance[rows], index, axis=1))
            assert np.array_equal(region.rows["position"][found[1]], position[index])
            original = store.read(0, len(store))["index"]
            assert np.array_equal(region.rows["index"][found[1]], original[index])


def test_each_point_is_its_own_first_neighbor(make_store):
    store = make_store(CLOUDS["duplicates"], block_size=100)
    for block in range(store.num_blocks):
        region = Region(store, block, block + 1)
        places = region.places(block)
        distance, found = region.neighbors_of(places, 5)
        assert np.array_equal(found[:, 0], places)
        assert all(len(set(row)) == 5 for row in found.tolist())
        assert np.allclose(distance, region.neighbors(region.rows["position"][places], 5)[0])


def test_few_points_leave_places_for_neighbors_empty(make_store):
    region = Region(make_store(sheet(4), block_size=1), 0, 1)
    distance, found = region.neighbors(np.zeros((2, 3)), 6)
    assert (found[:, 4:] == -1).all() and np.isinf(distance[:, 4:]).all()
    assert (found[:, :4] >= 0).all()


@pytest.mark.parametrize("most", [4, 128])
def test_distances_of_a_device_are_those_of_the_tree_bit_for_bit(most, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_K", most)
    for points in (sheet(400, seed=1) / 3, grid(20) / 3, sheet(400)[:, :2]):
        queries = points[::2] + 0.1
        expected, _ = host_tree(points).query(queries, k=[1, 2, 3, 4, 5])
        distance, found = device_tree(points).query(queries, k=[1, 2, 3, 4, 5])
        np.testing.assert_array_equal(distance, expected)
        gap = np.linalg.norm(points[found] - queries[:, None], axis=2)
        np.testing.assert_allclose(gap, expected)
