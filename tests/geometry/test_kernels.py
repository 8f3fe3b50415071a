"""The Triton kernels fulfil the contract of the searches and of thinning, also at their limits.

`pytest tests/geometry/test_kernels.py` runs these tests on a CUDA GPU where there is one, and in
each case in Triton's interpreter, on the CPU, in a separate process.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from test_neighbors import squared_distances, two_packed_sets
from torch import Tensor

from pointup.geometry import kernels, neighbors
from pointup.geometry.neighbors import knn, nearest
from pointup.geometry.packed import assume_valid, batch_from_ptr, ptr_from_sizes

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
KERNEL_FILES = ("insertion", "knn")
Sets = tuple[Tensor, Tensor, Tensor, Tensor]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def needs_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """A test of the GPU itself, which `pytest -m gpu` selects."""
    is_missing = IS_INTERPRETED or not HAS_GPU
    return pytest.mark.gpu(pytest.mark.skipif(is_missing, reason="needs a CUDA GPU")(test))


def needs_device(test: Callable[..., None]) -> Callable[..., None]:
    """A test of the GPU, which `pytest -m gpu` selects; in the interpreter a test of that."""
    reason = "needs a CUDA GPU; run in the interpreter instead"
    test = pytest.mark.skipif(not (IS_INTERPRETED or HAS_GPU), reason=reason)(test)
    return test if IS_INTERPRETED else pytest.mark.gpu(test)


few = settings(deadline=None, max_examples=3 if IS_INTERPRETED else 60)
# On a GPU they are fast.
long = pytest.mark.slow if IS_INTERPRETED else pytest.mark.skipif(False, reason="")


@pytest.mark.skipif(IS_INTERPRETED, reason="runs in the interpreter already")
@needs_triton
@pytest.mark.parametrize(
    "selected", ["not slow", pytest.param("slow", marks=pytest.mark.slow)], ids=["core", "rest"]
)
def test_kernels_in_the_interpreter_and_training_on_an_emulated_device(selected):
    """In one process, whose start takes as long as half of the tests."""
    import triton

    version = tuple(int(number) for number in triton.__version__.split(".")[:2])
    if version < (3, 8) and np.__version__ >= "2.4":
        pytest.skip(f"the interpreter of triton {triton.__version__} doesn't support numpy 2.4")
    emulated = Path(__file__).parents[1] / "model" / "test_emulated.py"
    files = [Path(__file__), Path(__file__).with_name("test_kernels_trial.py"), emulated]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", selected, *files],
        capture_output=True,
        text=True,
        timeout=600,
        # The interpreter works on numpy arrays, most of them tiny.
        env=os.environ
        | dict.fromkeys(["TRITON_INTERPRET", "POINTUP_TESTS_EMULATED"], "1")
        | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr


@pytest.fixture
def on_kernels() -> Iterator[None]:
    """Kernels search tensors of the CPU too, in the interpreter; those on CUDA they always do."""
    if not IS_INTERPRETED:
        yield
        return

    with (
        mock.patch.object(neighbors, "_search_trees", neighbors._search_accelerator),
        mock.patch.object(kernels, "take", lambda pos, k: True),
    ):
        yield


# All examples of a test share one fixture.
pytestmark = [needs_triton, pytest.mark.usefixtures("on_kernels")]


def ragged(
    sizes: list[tuple[int, int]], seed: int = 0, offset: float = 0.0, device: str = DEVICE
) -> Sets:
    """Two packed sets of clouds of these sizes, on the device, float32."""
    rng = np.random.default_rng(seed)
    sets: list[Tensor] = []
    for side in range(2):
        ptr = ptr_from_sizes(torch.tensor([pair[side] for pair in sizes]))
        pos = rng.normal(size=(int(ptr[-1]), 3)) + offset
        sets += [torch.tensor(pos, dtype=torch.float32, device=device), ptr.to(device)]
    return sets[0], sets[1], sets[2], sets[3]


def expect_nearest(sets: Sets, squared: Tensor, index: Tensor, rtol: float = 1e-5) -> None:
    pairs = torch.nn.functional.pad(squared_distances(*sets), (0, 1), value=torch.inf)
    torch.testing.assert_close(squared.double(), pairs.amin(1), rtol=rtol, atol=1e-12)
    assert index.dtype == torch.int64 and torch.equal(index < 0, squared == torch.inf)
    chosen = pairs.gather(1, torch.where(index < 0, pairs.shape[1] - 1, index)[:, None])[:, 0]
    torch.testing.assert_close(chosen, pairs.amin(1), rtol=rtol, atol=1e-12)


@needs_device
def test_bounds_need_not_be_contiguous():
    pos, ptr, target, target_ptr = ragged([(20, 30), (15, 9)])
    ptr_of_2, target_ptr_of_2 = (torch.stack([of, of], dim=1)[:, 0] for of in (ptr, target_ptr))
    assert torch.equal(knn(pos, ptr_of_2, 4)[1], knn(pos, ptr, 4)[1])
    found = nearest(pos, ptr_of_2, target, target_ptr_of_2)
    expect_nearest((pos, ptr, target, target_ptr), *found)


# Blocks of queries within a cloud and across several, tiles full and not, empty clouds.
SIZES = [(20, 110), (0, 3), (1, 1), (10, 0), (3, 70), (0, 0), (8, 20)]


@needs_device
@pytest.mark.parametrize("offset", [pytest.param(0.0, marks=long), 1000.0])
def test_nearest_of_ragged_clouds_of_several_blocks(offset):
    sets = ragged(SIZES, offset=offset)
    expect_nearest(sets, *nearest(*sets))


@needs_device
def test_float64_points_with_map_coordinates_keep_their_precision():
    sets = ragged([(50, 70), (30, 60)])
    offset = torch.tensor([431_000.0, 4_582_000.0, 300.0], dtype=torch.float64, device=DEVICE)
    sets = (sets[0].double() + offset, sets[1], sets[2].double() + offset, sets[3])
    squared, index = nearest(*sets)
    assert squared.dtype == torch.float64
    expect_nearest(sets, squared, index, rtol=1e-12)


def expect_knn(sets: Sets, k: int, squared: Tensor, index: Tensor, rtol: float = 1e-5) -> None:
    pairs = torch.nn.functional.pad(squared_distances(*sets), (0, k), value=torch.inf)
    expected = pairs.sort(1).values[:, :k]
    torch.testing.assert_close(squared.double(), expected, rtol=rtol, atol=1e-12)
    assert index.dtype == torch.int64 and torch.equal(index < 0, squared == torch.inf)
    chosen = pairs.gather(1, torch.where(index < 0, pairs.shape[1] - 1, index))
    torch.testing.assert_close(chosen, expected, rtol=rtol, atol=1e-12)
    for row in index:
        assert len(row[row >= 0].unique()) == (row >= 0).sum()


@needs_device
@few
@given(sets=two_packed_sets(), k=st.sampled_from([1, 2, 5, 16]))
def test_knn_finds_what_brute_force_finds(sets, k):
    sets = tuple(tensor.to(DEVICE) for tensor in sets)
    expect_knn(sets, k, *neighbors._search(*sets, k))


@needs_device
@pytest.mark.parametrize("k", [3, pytest.param(32, marks=long)])
def test_knn_of_ragged_clouds_of_several_blocks_and_tiles(k):
    from pointup.geometry.kernels import knn as module

    sets = ragged(SIZES, offset=100.0)
    # Two tiles per chunk: several chunks, beginning with any.
    with mock.patch.object(module, "CHUNK", 2):
        expect_knn(sets, k, *neighbors._search(*sets, k))


@needs_device
@pytest.mark.parametrize("k", [2, pytest.param(5, marks=long)])
def test_knn_along_a_line_finds_neighbours_beyond_the_border_of_a_tile(k):
    # Along a line all tiles but those next to a block of queries are skipped.
    pos, ptr, _, _ = ragged([(160, 0)])
    pos[:, 1:] = 0.0
    expect_knn((pos, ptr, pos, ptr), k, *knn(pos, ptr, k))


@needs_device
def test_knn_puts_each_point_first_even_among_duplicates():
    pos, ptr, _, _ = ragged([(50, 0), (0, 0), (9, 0)])
    pos[10:45] = pos[10]
    squared, index = knn(pos, ptr, 8)
    assert torch.equal(index[:, 0], torch.arange(len(pos), device=DEVICE))
    expect_knn((pos, ptr, pos, ptr), 8, squared, index)


@needs_device
@pytest.mark.parametrize("k", [pytest.param(1, marks=long), 4])
def test_float64_neighbours_at_map_coordinates_keep_their_precision(k):
    pos, ptr, _, _ = ragged([(40, 0), (20, 0)])
    pos = pos.double()
    pos += torch.tensor([431_000.0, 4_582_000.0, 300.0], dtype=torch.float64, device=DEVICE)
    expect_knn((pos, ptr, pos, ptr), k, *knn(pos, ptr, k), rtol=1e-12)


@needs_device
def test_distant_queries_find_the_nearest_points():
    pos, ptr, target, target_ptr = ragged([(40, 130), (10, 40)])
    sets = (pos + 1000.0, ptr, target, target_ptr)
    expect_knn(sets, 4, *neighbors._search(*sets, 4))


@needs_device
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_points_that_are_not_finite_are_refused_or_have_the_distance_nan(bad):
    pos, ptr, target, target_ptr = ragged([(3, 4), (5, 6)])
    pos[5, 1] = bad
    with pytest.raises(ValueError, match="cloud 1"):
        nearest(pos, ptr, target, target_ptr)
    with pytest.raises(ValueError, match="cloud 1"):
        nearest(target, target_ptr, pos, ptr)
    with mock.patch.object(neighbors, "check_clouds"):
        squared, _ = nearest(pos, ptr, target, target_ptr)
    assert torch.isnan(squared[5]) and torch.isfinite(squared[[0, 1, 2, 3, 4, 6, 7]]).all()


@needs_device
@long
def test_the_points_of_very_many_clouds_stay_with_their_cloud():
    from pointup.geometry.kernels.knn import along_curve

    num_clouds = 70_000  # More than 16 bits can count.
    axes = torch.rand(3, 2 * num_clouds, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    pairs = axes.view(3, num_clouds, 2)
    boxes = torch.cat([pairs.amin(2), pairs.amax(2)]).T.contiguous()
    ptr = torch.arange(0, 2 * num_clouds + 1, 2, device=DEVICE)
    curve = along_curve(axes, ptr, boxes)
    assert torch.equal(curve.order // 2, torch.arange(2 * num_clouds, device=DEVICE) // 2)
    assert (curve.code.diff() >= 0).all() and curve.code[0] >= 0


@needs_device
@pytest.mark.parametrize("k", [33, pytest.param(70, marks=long)])
def test_more_than_32_neighbours_are_those_of_brute_force(k):
    sets = ragged([(4, 90), (1, 3), (2, 40)])
    expect_knn(sets, k, *neighbors._search(*sets, k))


@pytest.mark.skipif(IS_INTERPRETED, reason="nothing is compiled there")
def test_no_kernel_is_recompiled_for_other_counts():
    from triton.runtime.jit import JITFunction

    counts = []
    for name in KERNEL_FILES:
        module = importlib.import_module(f"pointup.geometry.kernels.{name}")
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction) and kernel.__name__.endswith("_kernel"):
                for param in kernel.params:
                    if param.name.startswith("num_") or param.name == "k":
                        counts.append(param.name)
                        assert param.do_not_specialize, f"{kernel.__name__}: {param.name}"
    assert len(counts) == 10 and counts.count("k") == 1


EXTENTS = [1e-37, *(pytest.param(e, marks=long) for e in (1e-34, 1e-30, 1e-15, 1e15)), 1e30]


@needs_device
@pytest.mark.parametrize("extent", EXTENTS)
def test_clouds_of_any_extent_have_the_neighbours_of_brute_force(extent):
    from pointup.geometry.kernels.knn import along_curve, cloud_boxes

    pos, ptr, other, other_ptr = ragged([(40, 20), (0, 0), (50, 30)])
    pos, other = pos * extent, other * extent
    curve = along_curve(pos.T.contiguous(), ptr, cloud_boxes(pos.T.contiguous(), ptr))
    # The code of a point contains the number of its cloud.
    assert torch.equal(curve.code >> 42, batch_from_ptr(ptr))
    squared, index = neighbors._search(other, other_ptr, pos, ptr, 4)
    expected, _ = neighbors._search_chunks(other, other_ptr, pos, ptr, 4)
    # Squares in float32 underflow below 1e-38 and overflow above 1e38.
    torch.testing.assert_close(squared, expected, rtol=1e-5, atol=1e-38)
    found = index >= 0
    assert torch.equal(found, squared < torch.inf)
    cloud = batch_from_ptr(other_ptr)[:, None].expand(-1, 4)[found]
    assert torch.equal(batch_from_ptr(ptr)[index[found]], cloud)


@needs_device
def test_radii_of_the_kernel_equal_those_of_torch():
    from pointup.geometry import thinning as insertion
    from pointup.geometry.kernels.insertion import settle

    settled, plain = [], insertion.settle

    def both(neighbor: Tensor, squared: Tensor, parent: Tensor, limit: Tensor) -> Tensor:
        settled.append(plain(neighbor, squared, parent, limit))
        settled.append(settle(neighbor, squared, parent.int(), limit, num_levels=2))
        return settled[-1]

    # Duplicates, ties on a grid, an empty cloud and one of a single point.
    pos, ptr, _, _ = ragged([(40, 0), (0, 0), (1, 0), (27, 0)])
    pos[5:20] = pos[3]
    pos[41:] = torch.cartesian_prod(*[torch.arange(3.0, device=DEVICE)] * 3)
    with (
        mock.patch.object(insertion, "settle", both),
        mock.patch.object(kernels, "take", return_value=False),
    ):
        insertion.insertion_radii(pos, ptr, torch.tensor([12, 0, 1, 6]))
    assert torch.equal(*settled)


@needs_gpu
def test_searches_assumed_valid_never_wait_for_the_gpu():
    sets = ragged(SIZES)

    def search() -> None:
        nearest(*sets)
        knn(*sets[:2], 8)
        neighbors._search(*sets, 8)

    search()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with assume_valid():
            search()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("k", [1, 16])
def test_neighbours_in_large_clouds_are_those_of_trees(k):
    sets = ragged([(20_000, 100_000), (0, 10), (50_000, 30_000)], offset=100.0)
    squared, _ = neighbors._search(*sets, k)
    query, query_ptr, pos, ptr = (tensor.cpu().numpy() for tensor in sets)
    for i in (0, 2):
        tree = cKDTree(pos[ptr[i] : ptr[i + 1]])
        ranks = list(range(1, k + 1))
        expected = tree.query(query[query_ptr[i] : query_ptr[i + 1]], k=ranks)[0] ** 2
        result = squared[query_ptr[i] : query_ptr[i + 1]].cpu().numpy()
        np.testing.assert_allclose(result, expected, rtol=1e-5)
