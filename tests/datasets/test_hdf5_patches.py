"""HDF5 patches: choice of the arrays, pairs, places, and damaged files."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from pointup.datasets.hdf5_patches import hold_out_patches, open_patches, patch_pairs
from pointup.datasets.survey_tiles import hold_out
from pointup.errors import ConfigError, FileError


def patches(number: int, size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, size])
    return rng.normal(3.0, 1.0, (number, size, 3)).astype(np.float32)


def with_normals(points: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(points, axis=2, keepdims=True)
    return np.concatenate([points, points / lengths], axis=2)


def write(path: Path, **arrays: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return path


def unexpected(reason: str) -> None:
    raise AssertionError(reason)


def test_patches_are_those_of_the_file_centred_on_the_source(tmp_path):
    source, target = patches(600, 8), patches(600, 32)
    path = write(tmp_path / "a.h5", poisson_256=source, poisson_1024=target)
    chosen = np.arange(600) % 7 == 3
    pairs = list(patch_pairs(open_patches(path), chosen, unexpected))
    assert [pair.name for pair in pairs] == [f"a/{i // 60}/{i}" for i in np.flatnonzero(chosen)]
    for pair, i in zip(pairs, np.flatnonzero(chosen), strict=True):
        np.testing.assert_allclose(pair.source + pair.origin, source[i], atol=1e-6)
        np.testing.assert_allclose(pair.target + pair.origin, target[i], atol=1e-6)
        np.testing.assert_allclose(pair.source.mean(axis=0), 0, atol=1e-6)
        assert not pair.vertical
        assert pair.target_normals is None


def test_six_columns_are_points_and_normals(tmp_path):
    source, target = with_normals(patches(3, 8)), with_normals(patches(3, 32))
    path = write(
        tmp_path / "a.h5", montecarlo_1024=source, poisson_4096=target, poisson_2048=source
    )
    file = open_patches(path)
    assert (file.source_key, file.target_key) == ("montecarlo_1024", "poisson_4096")
    for i, pair in enumerate(patch_pairs(file, np.ones(3, bool), unexpected)):
        assert pair.source.shape == (8, 3)
        assert pair.target_normals is not None
        np.testing.assert_allclose(pair.target_normals, target[i, :, 3:], atol=1e-6)


def test_columns_that_are_not_unit_vectors_are_not_read_as_normals(tmp_path):
    colors = np.concatenate([patches(3, 32), 100 * patches(3, 32)], axis=2)
    path = write(tmp_path / "a.h5", poisson_256=patches(3, 8), poisson_1024=colors)
    (pair, *_) = patch_pairs(open_patches(path), np.ones(3, bool), unexpected)
    assert pair.target_normals is None


def test_a_patch_that_is_not_finite_is_left_out_and_reported(tmp_path):
    target = patches(5, 32)
    target[2, 7, 1] = np.nan
    path = write(tmp_path / "a.h5", poisson_256=patches(5, 8), poisson_1024=target)
    reports: list[str] = []
    pairs = list(patch_pairs(open_patches(path), np.ones(5, bool), reports.append))
    assert [pair.name for pair in pairs] == ["a/0/0", "a/1/1", "a/3/3", "a/4/4"]
    assert reports == ["a/2/2: coordinates that are not finite"]


def test_each_named_shape_is_a_place(tmp_path):
    names = np.array([b"cat", b"dog", b"cat", b"hen"])
    arrays = {"poisson_256": patches(4, 8), "poisson_1024": patches(4, 32), "name": names}
    place = open_patches(write(tmp_path / "a.h5", **arrays)).place
    assert place[0] == place[2]
    assert len(np.unique(place)) == 3


def test_a_shape_that_several_files_name_is_held_out_in_all_of_them(tmp_path):
    arrays = {"poisson_256": patches(40, 8), "poisson_1024": patches(40, 32)}
    shapes = {"a": range(10), "c": range(5, 15)}
    names = {file: np.repeat([f"shape{i}" for i in own], 4) for file, own in shapes.items()}
    paths = [
        write(tmp_path / f"{file}.h5", **arrays, **also)
        for file, also in (
            ("a", {"name": names["a"].astype("S")}),
            ("b", {}),
            ("c", {"name": names["c"].astype("S")}),
            ("d", {"name": np.repeat(np.arange(10), 4)}),
        )
    ]
    files = [open_patches(path) for path in paths]
    held = hold_out_patches(files, 0.3, 0)
    held_out, trained = (
        {*names["a"][held[0] == split], *names["c"][held[2] == split]} for split in (True, False)
    )
    assert held_out and trained and not held_out & trained
    assert {files[0].shape_of(place) for place in range(10)} & {
        files[2].shape_of(place) for place in range(10)
    } == {f"HDF5 shape shape{i}" for i in range(5, 10)}
    # Files without names, or with numbers, are split as alone.
    for number in (1, 3):
        assert files[number].shape_names is None
        assert files[number].shape_of(2) == f"{paths[number].resolve()}/2"
        places = [set(files[number].place[held[number] == split]) for split in (True, False)]
        assert not places[0] & places[1]
    for file in files:
        (alone,) = hold_out([np.column_stack([file.place, 0 * file.place])], 0.3, 0, 1)
        assert np.array_equal(hold_out_patches([file], 0.3, 0)[0], alone)


@pytest.mark.parametrize("per_shape, number", [(200, 24_000), (100, 4_000), (50, 51_000)])
def test_blocks_hold_whole_shapes_of_the_published_files(per_shape, number, tmp_path):
    arrays = {"poisson_256": patches(number, 1), "poisson_1024": patches(number, 2)}
    place = open_patches(write(tmp_path / "a.h5", **arrays)).place
    shape = np.arange(number) // per_shape
    assert len(np.unique(np.column_stack([shape, place]), axis=0)) == number // per_shape
    assert len(np.unique(place)) >= 10


def test_arrays_of_unknown_names_are_chosen_by_size_or_by_keys(tmp_path):
    path = write(tmp_path / "two.h5", dense=patches(3, 32), sparse=patches(3, 8))
    assert (open_patches(path).source_key, open_patches(path).target_key) == ("sparse", "dense")
    path = write(tmp_path / "three.h5", a=patches(3, 8), b=patches(3, 16), c=patches(3, 32))
    with pytest.raises(ConfigError, match=r"--source-key.*a 3x8x3, b 3x16x3, c 3x32x3"):
        open_patches(path)
    with pytest.raises(ConfigError, match=r"no array of patches 'd'.*a 3x8x3"):
        open_patches(path, "a", "d")
    assert open_patches(path, "a", "b").target_key == "b"


def test_points_and_normals_of_a_shape_are_not_paired_as_sparse_and_dense(tmp_path):
    points = patches(3, 32)
    path = write(tmp_path / "modelnet.h5", data=points, normal=with_normals(points)[..., 3:])
    with pytest.raises(ConfigError, match=r"say which arrays.*data 3x32x3, normal 3x32x3"):
        open_patches(path)


def test_unusable_files_are_named(tmp_path):
    junk = tmp_path / "junk.h5"
    junk.write_bytes(b"no HDF5 at all")
    whole = write(tmp_path / "whole.h5", poisson_256=patches(99, 8), poisson_1024=patches(99, 32))
    cut = tmp_path / "cut.h5"
    cut.write_bytes(whole.read_bytes()[:-5000])
    uneven = write(tmp_path / "uneven.h5", poisson_256=patches(3, 8), poisson_1024=patches(4, 8))
    turned = write(tmp_path / "turned.h5", poisson_256=patches(3, 8).transpose(0, 2, 1))
    for path in (junk, cut, uneven, turned, tmp_path / "missing.h5"):
        with pytest.raises(FileError, match=path.name):
            open_patches(path)
