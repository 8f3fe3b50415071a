"""Writing pair datasets: what is read back, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from test_pair_dataset import UTM, cloud, pairs

from pointup.datasets.opening import open_samples
from pointup.datasets.pair import Pair
from pointup.datasets.pair_dataset import PairDataset
from pointup.datasets.pair_writer import write_pairs
from pointup.errors import DataError, FileError


def test_pairs_are_read_as_they_were_written(tmp_path):
    full = Pair(
        "tile",
        cloud(5),
        cloud(7, 1),
        origin=UTM + 0.123,
        target_normals=cloud(7, 2),
        resample=cloud(9, 3),
        vertical=False,
        surface="tile.npz",
    )
    write_pairs([full, *pairs(3)], pairs(2, "v"), tmp_path / "pairs", {"made_by": "test"})
    dataset = load_from_disk(tmp_path / "pairs")["train"]
    row = dataset[0]
    for column in ("source", "target", "target_normals", "resample", "origin"):
        assert np.array_equal(row[column], getattr(full, column)), column
    assert (row["num_source"], row["num_target"], row["surface"]) == (5, 7, "tile.npz")

    samples = PairDataset(open_samples(tmp_path / "pairs", "train"))
    assert samples.sizes.tolist() == [12, 3 + 8, 4 + 10, 5 + 12]
    assert list(samples.names) == ["tile", "p0", "p1", "p2"]
    first, second = samples[(0, 0)], samples[1]
    assert np.array_equal(first.pos, full.source)
    assert np.array_equal(first.resample, full.resample)
    assert (first.name, first.index, first.vertical) == ("tile", 0, False)
    assert "resample" not in second
    assert "target_normals" not in second
    assert second.vertical

    assert load_from_disk(tmp_path / "pairs")["validation"]["name"][:] == ["v0", "v1"]
    info = json.loads((tmp_path / "pairs" / "pointup.json").read_text())
    assert info["made_by"] == "test" and info["contents"].keys() == {"train", "validation"}
    assert sorted(load_from_disk(tmp_path / "pairs")) == ["train", "validation"]


@pytest.mark.parametrize("kind", [np.asarray, np.ndarray.tolist, torch.from_numpy])
def test_a_pair_is_centred_whatever_holds_its_points(kind):
    points = UTM + cloud(40).astype(np.float64)
    pair = Pair.centred("hill", kind(points[::4]), kind(points))
    assert pair.origin.dtype == np.float64
    assert pair.source.dtype == pair.target.dtype == np.float32
    assert np.abs(pair.origin + pair.target - points).max() < 1e-6


def test_surfaces_are_saved_beside_the_pairs(tmp_path):
    class Surface:
        def save(self, path: Path) -> None:
            path.write_text("surface")

    write_pairs(pairs(1), [], tmp_path / "pairs", {}, surfaces={"p0.npz": Surface()})
    assert (tmp_path / "pairs" / "surfaces" / "p0.npz").read_text() == "surface"


def test_writing_that_fails_leaves_nothing_behind(tmp_path):
    def broken() -> Iterator[Pair]:
        yield from pairs(2)
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        write_pairs(broken(), [], tmp_path / "pairs", {})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_not_overwritten(tmp_path):
    write_pairs(pairs(1), [], tmp_path / "pairs", {})
    with pytest.raises(FileError, match="exists already"):
        write_pairs(pairs(2), [], tmp_path / "pairs", {})
    assert len(load_from_disk(tmp_path / "pairs")["train"]) == 1


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (Pair("flat", np.zeros((4, 2)), cloud(3)), r"flat: source has shape \(4, 2\)"),
        (Pair("n", cloud(3), cloud(4), target_normals=cloud(3)), "n: 3 normals for 4"),
    ],
)
def test_a_pair_of_a_wrong_shape_is_named(tmp_path, pair, message):
    with pytest.raises(DataError, match=message):
        write_pairs([pair], [], tmp_path / "pairs", {})


def test_no_training_pairs_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no training pairs"):
        write_pairs([], pairs(1), tmp_path / "pairs", {})


def test_map_coordinates_are_stored_relative_to_the_mean_of_the_source(tmp_path):
    far = Pair(
        "far",
        cloud(500) + UTM,
        cloud(900, 1) + UTM,
        origin=np.array([1e6, 0.0, 0.5]),
        target_normals=cloud(900, 2).astype(float),
        resample=cloud(900, 3) + UTM,
    )
    before = copy.deepcopy(far)
    write_pairs([far], [], tmp_path / "pairs", {})
    read = open_samples(tmp_path / "pairs", "train").pair(0)
    for column in ("source", "target", "resample"):
        given, stored = getattr(far, column), getattr(read, column)
        assert np.abs(stored + read.origin - (given + far.origin)).max() < 1e-6, column
        assert np.array_equal(given, getattr(before, column)), "the pair of the caller was changed"
    assert np.array_equal(read.origin, far.origin + np.round(far.source.mean(axis=0)))
    assert np.array_equal(read.target_normals, far.target_normals.astype(np.float32))


def test_float64_points_near_the_origin_keep_it_and_points_that_are_not_finite_stay(tmp_path):
    near = Pair("near", cloud(500) + 3.0, (cloud(900, 1) + 3.0).astype(float), surface="s.npz")
    hole = cloud(500) + UTM
    hole[3, 1] = np.nan
    write_pairs([near, Pair("hole", hole, hole)], pairs(1), tmp_path / "pairs", {})
    first, second = map(open_samples(tmp_path / "pairs", "train").pair, (0, 1))
    assert np.array_equal(first.target, near.target.astype(np.float32))
    assert not first.origin.any()
    assert np.isnan(second.source[3, 1])
    assert np.nanmax(np.abs(second.source + second.origin - hole)) < 1e-6


def test_float64_points_whose_surface_would_stay_behind_are_refused(tmp_path):
    far = Pair("far", cloud(500) + UTM, cloud(900, 1) + UTM, surface="far.npz")
    message = r"far: as float32, its points would move by up to 0.25: subtract \[5000"
    with pytest.raises(DataError, match=message):
        write_pairs([far], [], tmp_path / "pairs", {})


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"made_by": "test", "from": Path("a.las")}, "info: the value of 'from' can't be written"),
        ({"settings": {"number": np.int64(3)}}, "'settings' .*int64 is not JSON serializable"),
        ({("a", 1): 2}, r"\('a', 1\)"),
    ],
)
def test_info_that_is_not_json_is_refused_before_pairs_are_made(tmp_path, info, message):
    def unwanted() -> Iterator[Pair]:
        raise AssertionError("a pair was made")
        yield

    with pytest.raises(DataError, match=message):
        write_pairs(unwanted(), [], tmp_path / "pairs", info)
    assert list(tmp_path.iterdir()) == []
