from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pointup.geometry import neighbors
from pointup.geometry.neighbors import in_threads, knn, nearest
from pointup.geometry.packed import batch_from_ptr

# No deadline: the time depends on the load of the machine.
quick = settings(deadline=None, max_examples=40)
SEARCHES = ["_search_trees", "_search_chunks"]
any_search = pytest.mark.parametrize("search", SEARCHES)


def use(search: str) -> AbstractContextManager[Any]:
    """The given backend searches tensors on the CPU, in small chunks and tasks."""
    return mock.patch.multiple(
        neighbors,
        _search_trees=getattr(neighbors, search),
        _PAIRS_PER_CHUNK=20,
        _QUERIES_PER_TASK=5,
    )


def squared_distances(query: Tensor, query_ptr: Tensor, pos: Tensor, ptr: Tensor) -> Tensor:
    """Brute force (Q, N): inf between clouds."""
    difference = query.double()[:, None] - pos.double()[None]
    same = batch_from_ptr(query_ptr)[:, None] == batch_from_ptr(ptr)[None]
    return difference.square().sum(2).masked_fill(~same, torch.inf)


@st.composite
def two_packed_sets(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query and points of the same number of clouds; small integers have ties and duplicates."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    sets: list[Tensor] = []
    for side in range(2):
        ptr = np.cumsum([0] + [pair[side] for pair in sizes])
        shape = (int(ptr[-1]), 3)
        pos = rng.integers(0, 3, shape) if draw(st.booleans()) else rng.normal(size=shape)
        sets += [torch.tensor(pos, dtype=torch.float32), torch.tensor(ptr)]
    return sets[0], sets[1], sets[2], sets[3]


@any_search
@quick
@given(sets=two_packed_sets(), k=st.integers(1, 15))
def test_knn_finds_what_brute_force_finds(search, sets, k):
    query, query_ptr, pos, ptr = sets
    with use(search):
        squared, index = neighbors._search(query, query_ptr, pos, ptr, k)
    pairs = torch.nn.functional.pad(squared_distances(*sets), (0, k), value=torch.inf)
    torch.testing.assert_close(squared.double(), pairs.sort(1).values[:, :k], rtol=1e-5, atol=1e-6)
    assert squared.dtype == torch.float32 and index.dtype == torch.int64
    assert torch.equal(index < 0, squared == torch.inf)
    for row in range(len(query)):
        found = index[row][index[row] >= 0]
        assert len(found.unique()) == len(found)
        expected = pairs[row, found]
        torch.testing.assert_close(squared[row, : len(found)].double(), expected, rtol=1e-5, atol=0)


@any_search
@quick
@given(sets=two_packed_sets(), k=st.integers(1, 15))
def test_a_point_is_its_own_first_neighbour_even_among_duplicates(search, sets, k):
    pos, ptr = torch.cat([sets[0], sets[0]]), torch.cat([sets[1], sets[1][1:] + sets[1][-1]])
    with use(search):
        squared, index = knn(pos, ptr, k)
        expected, _ = neighbors._search(pos, ptr, pos, ptr, k)
    assert torch.equal(index[:, 0], torch.arange(len(pos)))
    assert torch.equal(squared, expected)
    for row in index:
        assert len(row[row >= 0].unique()) == (row >= 0).sum()


@any_search
@quick
@given(sets=two_packed_sets())
def test_nearest_finds_what_brute_force_finds(search, sets):
    with use(search):
        squared, index = nearest(*sets)
    pairs = torch.nn.functional.pad(squared_distances(*sets), (0, 1), value=torch.inf)
    torch.testing.assert_close(squared.double(), pairs.amin(1), rtol=1e-5, atol=1e-6)
    assert torch.equal(index < 0, squared == torch.inf)


@any_search
@quick
@given(sets=two_packed_sets())
def test_nearest_has_the_gradients_of_brute_force(search, sets):
    query, query_ptr, pos, ptr = sets
    # Off the grid: with ties the nearest neighbour is not unique.
    rng = np.random.default_rng(0)
    query, pos = (x.double() + torch.tensor(rng.normal(size=x.shape)) for x in (query, pos))
    query.requires_grad_(), pos.requires_grad_()
    with use(search):
        squared, _ = nearest(query, query_ptr, pos, ptr)
    pairs = squared_distances(query, query_ptr, pos, ptr)
    expected = torch.nn.functional.pad(pairs, (0, 1), value=torch.inf).amin(1)
    weights = torch.arange(1.0, len(query) + 1)
    for ours, theirs in zip(
        *(
            torch.autograd.grad(
                (distance.masked_fill(distance == torch.inf, 0.0) * weights).sum(),
                (query, pos),
                allow_unused=True,
                materialize_grads=True,
            )
            for distance in (squared, expected)
        ),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@any_search
@pytest.mark.parametrize(
    ("place", "dtype", "rtol"),
    [([431_000, 4_582_000, 300], torch.float64, 1e-9), ([1000] * 3, torch.float32, 1e-5)],
)
def test_neighbours_are_right_far_from_the_origin(search, place, dtype, rtol):
    rng = np.random.default_rng(0)
    pos, ptr = torch.tensor(rng.random((300, 3)) + place, dtype=dtype), torch.tensor([0, 300])
    with use(search):
        squared, _ = knn(pos, ptr, 4)
    expected = squared_distances(pos, ptr, pos, ptr).sort(1).values[:, :4]
    torch.testing.assert_close(squared, expected.to(dtype), rtol=rtol, atol=0)


@pytest.mark.parametrize("k", [1, 5, 100])
def test_mass_duplicates_leave_few_copies_in_the_tree_and_exact_neighbours(k):
    rng = np.random.default_rng(0)
    pos = torch.tensor(rng.random((400, 3)), dtype=torch.float32)
    pos[rng.permutation(400)[:300]] = 0.5
    ptr = torch.tensor([0, 400])
    tree, kept = neighbors._tree(pos.numpy(), k)
    assert kept is not None and len(kept) == tree.n == 100 + max(k, neighbors._MAX_COPIES)
    squared, index = knn(pos, ptr, k)
    expected = squared_distances(pos, ptr, pos, ptr).sort(1).values[:, :k].float()
    torch.testing.assert_close(squared, expected)
    torch.testing.assert_close(squared, (pos[index] - pos[:, None]).square().sum(2))
    assert torch.equal(index[:, 0], torch.arange(400))


def test_threads_and_tasks_change_nothing():
    rng = np.random.default_rng(0)
    pos = torch.tensor(rng.random((500, 3)), dtype=torch.float32)
    ptr = torch.tensor([0, 200, 200, 500])
    num_threads = torch.get_num_threads()
    expected = knn(pos, ptr, 7)
    try:
        torch.set_num_threads(3)
        with mock.patch.object(neighbors, "_QUERIES_PER_TASK", 40):
            result = knn(pos, ptr, 7)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])


class NeighborsOfCloud(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        torch.set_num_threads(2)
        with mock.patch.object(neighbors, "ThreadPoolExecutor", side_effect=AssertionError):
            return knn(torch.eye(3).repeat(4, 1), torch.tensor([0, 6, 12]), 2)[1]


def test_data_loader_workers_search_without_threads():
    in_threads(abs, range(4))
    loader = torch.utils.data.DataLoader(NeighborsOfCloud(), num_workers=1, batch_size=None)
    assert [index[:, 0].tolist() for index in loader] == [list(range(12))] * 2


def test_autocast_changes_nothing():
    pos, ptr = torch.randn(50, 3), torch.tensor([0, 20, 50])
    expected = nearest(pos, ptr, pos + 0.1, ptr)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(nearest(pos, ptr, pos + 0.1, ptr)[0], expected)


@any_search
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_error_about_coordinates_that_are_not_finite_names_the_cloud(search, bad):
    pos, ptr = torch.zeros(6, 3), torch.tensor([0, 2, 2, 6])
    pos[4, 1] = bad
    with use(search), pytest.raises(ValueError, match="cloud 2"):
        knn(pos, ptr, 1)
    with use(search), pytest.raises(ValueError, match="cloud 2"):
        nearest(pos, ptr, torch.zeros(6, 3), ptr)


def test_a_ptr_that_does_not_fit_the_points_is_refused():
    pos = torch.zeros(6, 3)
    with pytest.raises(ValueError, match="ptr runs from 0 to 5"):
        knn(pos, torch.tensor([0, 5]), 1)
    with pytest.raises(ValueError, match="ptr decreases"):
        knn(pos, torch.tensor([0, 8, 6]), 1)
    for wrong in (torch.tensor([0, 6], dtype=torch.int32), torch.tensor([[0, 6]])):
        with pytest.raises(ValueError, match=r"must be \(B \+ 1,\) int64"):
            knn(pos, wrong, 1)
    for wrong in (torch.zeros(5, 3).numpy(), [0, 5]), (torch.zeros(5, 3), [0, 5]):
        with pytest.raises(ValueError, match=r"^points and ptr are \w+ and list: make tensors"):
            knn(*wrong, 2)  # type: ignore[arg-type]
    for columns in (2, 6):
        with pytest.raises(ValueError, match=rf"shape \(6, {columns}\); expected \(N, 3\) points"):
            knn(torch.zeros(6, columns), torch.tensor([0, 6]), 1)
    with pytest.raises(ValueError, match="2 clouds of queries for 1 clouds of points"):
        nearest(pos, torch.tensor([0, 3, 6]), pos, torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="k must be at least 1"):
        knn(pos, torch.tensor([0, 6]), 0)


@pytest.mark.filterwarnings("ignore:overflow")
def test_an_overflow_is_nan_and_not_a_missing_neighbour():
    query, pos = torch.tensor([[1e30, 0, 0], [0, 0, 0]]), torch.zeros(3, 3)
    squared, index = nearest(query, torch.tensor([0, 2]), pos, torch.tensor([0, 3]))
    assert squared[0].isnan() and squared[1] == 0 and (index >= 0).all()
