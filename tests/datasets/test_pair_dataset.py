"""Pair datasets: writing, opening, checking, and reading samples."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Array2D, Dataset, Features, LargeList, List, Value
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.spatial import cKDTree
from scipy.spatial.distance import pdist

from pointup.datasets import pair_dataset
from pointup.datasets.opening import load_splits, open_samples
from pointup.datasets.pair import Pair
from pointup.datasets.pair_dataset import (
    SCALES,
    PairDataset,
    augment_pair,
    crop_pair,
    estimate_spacing,
    in_spatial_order,
    random_rotation,
    spatial_order,
)
from pointup.datasets.pair_writer import write_pairs
from pointup.datasets.samples import JoinedSamples
from pointup.errors import DataError, PointupError

UTM = np.array([500_000.0, 4_500_000.0, 100.0])


def cloud(num_points: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((num_points, 3), dtype=np.float32)


def pairs(number: int, prefix: str = "p") -> Iterator[Pair]:
    for i in range(number):
        yield Pair(f"{prefix}{i}", cloud(3 + i, i), cloud(8 + 2 * i, 100 + i), origin=UTM + i)


def saved(directory: Path, columns: dict, features: Features | None = None) -> Path:
    Dataset.from_dict(columns, features=features).save_to_disk(directory)
    return directory


@pytest.mark.parametrize(
    "features",
    [
        None,
        Features({c: Array2D((None, 3), "float64") for c in ("source", "target")}),
        Features({c: LargeList(List(Value("float64"), length=3)) for c in ("source", "target")}),
        Features(
            {
                "source": List(List(Value("float64"), length=3), length=5),
                "target": Array2D((7, 3), "float64"),
            }
        ),
    ],
    ids=["nested lists", "arrays", "large lists", "fixed sizes"],
)
def test_float64_columns_of_other_shapes_are_converted_without_losing_digits(tmp_path, features):
    sources = [cloud(5, i).astype(float) + UTM for i in range(3)]
    targets = [cloud(7, i).astype(float) + UTM for i in range(3)]
    columns = {"source": [s.tolist() for s in sources], "target": [t.tolist() for t in targets]}
    given = saved(tmp_path / "given", columns, features)
    samples = open_samples(given, "train")
    for pair in map(samples.pair, range(len(samples))):
        i = int(pair.name.removeprefix("sample_"))
        assert pair.source.dtype == pair.target.dtype == np.float32
        assert np.abs(pair.source + pair.origin - sources[i]).max() < 1e-6
        assert np.abs(pair.target + pair.origin - targets[i]).max() < 1e-6
        assert np.abs(pair.source).max() < 2


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"source": [[[1.0, 2.0, 3.0]]]}, "no column 'target'"),
        ({"source": ["text"], "target": [[[1.0, 2.0, 3.0]]]}, "column 'source' is Value"),
        ({"source": [[[1.0, 2.0]]], "target": [[[1.0, 2.0, 3.0]]]}, "'source'.*has 2 coord"),
        ({"source": [[[1.0, 2.0, 3.0]]], "target": [[[1, 2, 3]]]}, "column 'target' is List"),
    ],
)
def test_a_missing_or_wrong_column_is_named_with_the_expected_type(tmp_path, columns, message):
    with pytest.raises(DataError, match=message) as error:
        open_samples(saved(tmp_path / "given", columns), "train")
    assert "expected" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_path_without_a_dataset_raises_a_one_line_error(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "notes.bin").write_text("x")
    write_pairs(pairs(2), [], tmp_path / "pairs", {})
    for path, split, message in (
        (tmp_path / "empty", "train", "empty directory"),
        (tmp_path / "file", "train", "is a file"),
        (tmp_path / "junk", "train", "can't be opened"),
        (tmp_path / "missing", "train", "no such directory"),
        ("nowhere", "train", "no such directory"),
        (tmp_path / "pairs", "test", "no split 'test'; there are: train"),
    ):
        with pytest.raises(PointupError, match=message) as error:
            open_samples(path, split)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_a_folder_is_opened_by_the_name_of_the_working_directory(tmp_path, monkeypatch):
    parquet = datasets.Dataset.from_dict({"source": [[[0.0, 0.0, 0.0]]], "target": [[[0.0, 0, 1]]]})
    parquet.to_parquet(str(tmp_path / "full" / "train.parquet"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.bin").write_text("x")
    monkeypatch.chdir(tmp_path / "full")
    assert len(load_splits(".")["train"]) == 1
    monkeypatch.chdir(tmp_path / "run")
    message = (
        "can't be opened: it holds no dataset of `pointup prepare`, and no Arrow or Parquet "
        "files; make one, or name a file of points"
    )
    with pytest.raises(DataError, match=message):
        load_splits(".")


def test_without_a_validation_split_the_same_tenth_is_held_out_with_a_warning(tmp_path, caplog):
    write_pairs(pairs(30), [], tmp_path / "pairs", {})
    with caplog.at_level(logging.WARNING):
        validation = list(open_samples(tmp_path / "pairs", "validation").names)
    assert "no validation split: 3 of its 30" in caplog.text
    train = list(open_samples(tmp_path / "pairs", "train").names)
    assert len(validation) == 3
    assert sorted(train + validation) == sorted(f"p{i}" for i in range(30))
    assert list(open_samples(tmp_path / "pairs", "validation").names) == validation
    assert caplog.text.count("no validation split") == 1


def test_one_sample_can_be_trained_on_but_not_split(tmp_path):
    write_pairs(pairs(1), [], tmp_path / "pairs", {})
    assert len(open_samples(tmp_path / "pairs", "train")) == 1
    with pytest.raises(DataError, match="one sample can't be split"):
        open_samples(tmp_path / "pairs", "validation")


def test_every_kind_of_bad_sample_is_found_and_good_ones_are_not(tmp_path):
    good, hole = cloud(20), cloud(20)
    hole[3, 1], hole[5, 2] = np.nan, np.inf
    bad = {
        "no source": (Pair("", good[:0], good), "source is empty"),
        "no target": (Pair("", good, good[:0]), "target is empty"),
        "few": (Pair("", good[:4], good), "source has 4 points, fewer than 5"),
        "hole": (Pair("", good, hole), "target has 2 points that are not finite"),
        "dot": (Pair("", good * 0 + 3, good), "source has all its 20 points in one place"),
        "huge": (Pair("", good * 1e6, good), "source is .* units wide"),
        "tiny": (Pair("", good, good * 1e-8), "target is .* units wide"),
    }
    for name, (pair, _) in bad.items():
        pair.name = name
    written = [p for name in bad for p in (Pair(f"good {name}", good, good), bad[name][0])]
    write_pairs(written, pairs(1), tmp_path / "pairs", {})
    found = open_samples(tmp_path / "pairs", "train").bad_samples(min_points=5)
    assert [(b.index, b.name) for b in found] == [
        (i, p.name) for i, p in enumerate(written) if not p.name.startswith("good")
    ]
    for sample in found:
        assert re.search(bad[sample.name][1], sample.reason)


def test_sizes_that_differ_from_the_columns_are_found(tmp_path):
    points = [cloud(6).tolist()] * 3
    columns = {"source": points, "target": points, "num_target": [6, 9, 6]}
    columns["target_normals"] = [[], [], points[0][:2]]
    columns["name"] = [f"sample_{i}" for i in range(3)]
    both = dict.fromkeys(("train", "validation"), Dataset.from_dict(columns))
    datasets.DatasetDict(both).save_to_disk(tmp_path)
    bad = open_samples(tmp_path, "train").bad_samples(min_points=1)
    assert {sample.name: sample.reason for sample in bad} == {
        "sample_1": "num_target is 9, but target has 6 points",
        "sample_2": "2 normals for 6 points",
    }


def test_indices_refer_to_the_selected_samples(pair_directory):
    samples = open_samples(pair_directory, "train")
    every, some = PairDataset(samples), PairDataset(samples.select(np.array([7, 3])))
    assert list(some.names) == [every.names[7], every.names[3]]
    assert some.sizes.tolist() == every.sizes[[7, 3]].tolist()
    sample = some[(0, 1)]
    assert (sample.name, sample.index) == (every.names[3], 1)
    assert np.array_equal(sample.pos, every[3].pos)


def test_samples_of_several_datasets_follow_each_other(pair_directory):
    samples = open_samples(pair_directory, "train")
    joined = PairDataset(JoinedSamples(("a", "b"), (samples, samples.select(np.array([5])))))
    assert len(joined) == 41 and joined.sizes[40] == joined.sizes[5]
    assert [joined.names[i] for i in (1, 40)] == ["a/train_1", "b/train_5"]
    assert np.array_equal(joined[40].target, PairDataset(samples)[5].target)


def test_negative_indices_count_from_the_end_and_others_are_index_errors(pair_directory):
    samples = PairDataset(open_samples(pair_directory, "train"), augment=True, max_tokens=100)
    for key, same in ((-1, 39), (np.int64(-40), 0), ((2, -1), (2, 39))):
        found, expected = samples[key], samples[same]
        assert (found.name, found.index) == (expected.name, expected.index)
        assert np.array_equal(found.pos, expected.pos)
    for index in (40, -41):
        with pytest.raises(IndexError, match=f"sample {index} of 40"):
            samples[index]


def test_a_limit_of_tokens_can_be_any_integer_above_zero(pair_directory):
    samples = open_samples(pair_directory, "train")
    every = PairDataset(samples)
    assert PairDataset(samples, max_tokens=sys.maxsize).sizes.tolist() == every.sizes.tolist()
    for limit, message in ((0, "at least 1"), (1e4, "must be an integer")):
        with pytest.raises(ValueError, match=f"max_tokens is {limit}; it .*{message}"):
            PairDataset(samples, max_tokens=limit)


def test_writing_to_a_sample_does_not_change_the_dataset(pair_directory):
    samples = PairDataset(open_samples(pair_directory, "train"))
    before = samples[0].pos.clone()
    sample = samples[0]
    sample.pos += 1
    sample.target.zero_()
    assert np.array_equal(samples[0].pos, before)


def test_augmentation_depends_only_on_seed_epoch_and_index(pair_directory):
    dataset = open_samples(pair_directory, "train")
    samples = PairDataset(dataset, seed=1, augment=True)
    first = samples[(2, 5)]
    samples[(2, 6)]
    again = PairDataset(dataset, seed=1, augment=True)[(2, 5)]
    for name in ("pos", "target", "target_normals", "resample"):
        assert np.array_equal(first[name], again[name])
    others = [samples[(3, 5)], PairDataset(dataset, seed=2, augment=True)[(2, 5)]]
    assert not any(np.array_equal(first.pos, other.pos) for other in others)


def test_a_crop_keeps_the_points_nearest_to_one_source_point(pair_directory):
    dataset = open_samples(pair_directory, "train")
    samples = PairDataset(dataset, max_tokens=150)
    assert samples.sizes.tolist() == samples.full_sizes.clip(max=150).tolist()
    assert (samples.full_sizes > 150).any()
    assert (samples.full_sizes < 150).any()
    whole = PairDataset(dataset)
    for index, full_size in enumerate(samples.full_sizes):
        sample, uncut = samples[(1, index)], whole[index]
        assert len(sample.pos) + len(sample.target) == min(full_size, 150)
        if full_size <= 150:
            assert np.array_equal(sample.pos, uncut.pos)
            continue
        points = np.concatenate([uncut.pos, uncut.target])
        kept = {tuple(p) for p in np.concatenate([sample.pos, sample.target]).tolist()}
        balls = [
            points[np.argsort(((points - centre) ** 2).sum(axis=1))[:150]]
            for centre in uncut.pos.numpy()
        ]
        assert any({tuple(p) for p in ball.tolist()} == kept for ball in balls)
        # Normals stay with their points.
        normals = dict(
            zip(map(tuple, uncut.target.tolist()), uncut.target_normals.tolist(), strict=True)
        )
        assert [normals[tuple(p)] for p in sample.target.tolist()] == sample.target_normals.tolist()
        assert 0 < len(sample.resample) < len(uncut.resample)


def test_offsets_beyond_the_end_of_a_damaged_file_are_an_error_at_opening(tmp_path):
    write_pairs(pairs(2), pairs(1), tmp_path / "data", info={})
    (path,) = (tmp_path / "data" / "train").glob("*.arrow")
    with path.open("rb") as file:
        table = pa.ipc.open_stream(file).read_all()
    offsets = pa.py_buffer(np.array([0, 2**30, 5], "<i4"))
    names = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"hello")])
    damaged = table.set_column(table.column_names.index("name"), table.schema.field("name"), names)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(damaged)
    shutil.rmtree(tmp_path / "data" / "samples")
    with pytest.raises(DataError, match=r"data: can't be opened: .*offset"):
        open_samples(tmp_path / "data", "train")


def sheet(num_points: int, rng: np.random.Generator) -> np.ndarray:
    """Points of the plane z = x / 2 + 3, far from the origin."""
    xy = rng.random((num_points, 2)) + 50
    return np.column_stack([xy, xy[:, 0] / 2 + 3]).astype(np.float32)


@pytest.mark.parametrize("vertical", [True, False])
def test_all_clouds_of_a_pair_get_the_same_similarity_transform(vertical):
    rng = np.random.default_rng(0)
    normal = np.array([-0.5, 0, 1]) / np.sqrt(1.25)
    clouds = {
        "source": sheet(40, rng),
        "target": sheet(60, rng),
        "resample": sheet(50, rng),
        "target_normals": np.tile(normal, (60, 1)).astype(np.float32),
    }
    for seed in range(6):
        moved = augment_pair(clouds, vertical, np.random.default_rng(seed))
        assert all(points.dtype == np.float32 for points in moved.values())
        ratio = pdist(moved["target"]) / pdist(clouds["target"])
        assert ratio.std() < 1e-3 * ratio.mean()
        assert SCALES[0] <= ratio.mean() <= SCALES[1]
        # All clouds still lie in one plane, the jittered source approximately. The normals are
        # those of the plane.
        n = moved["target_normals"]
        assert np.abs(np.linalg.norm(n, axis=1) - 1).max() < 1e-5
        origin = moved["target"][0]
        assert np.abs((moved["target"] - origin) @ n[0]).max() < 1e-4
        assert np.abs((moved["resample"] - origin) @ n[0]).max() < 1e-4
        assert 1e-6 < np.abs((moved["source"] - origin) @ n[0]).max() < 1e-2
        if vertical:
            assert np.abs(n[:, 2] - normal[2]).max() < 1e-5
        # The mean of the source is the fixed point.
        shift = moved["source"].mean(axis=0) - clouds["source"].mean(axis=0)
        assert np.abs(shift).max() < 5e-3
    assert np.abs(clouds["source"] - sheet(40, np.random.default_rng(0))).max() == 0


@pytest.mark.parametrize("vertical", [True, False])
def test_rotations_are_orthogonal_uniform_and_reflected_half_of_the_time(vertical):
    rng = np.random.default_rng(1)
    rotations = np.stack([random_rotation(rng, vertical) for _ in range(2000)])
    identity = rotations @ rotations.transpose(0, 2, 1)
    assert np.abs(identity - np.eye(3)).max() < 1e-12
    assert abs((np.linalg.det(rotations) > 0).mean() - 0.5) < 0.05
    assert np.abs(rotations[:, 0].mean(axis=0)).max() < 0.06
    if vertical:
        assert np.array_equal(rotations[:, 2], np.tile([0, 0, 1], (2000, 1)))
    else:
        assert np.abs(rotations[:, 2].mean(axis=0)).max() < 0.06


def test_the_spacing_equals_a_brute_force_within_the_sampling_error():
    points = np.random.default_rng(2).random((500, 3), dtype=np.float32)
    nearest = cKDTree(points).query(points, 2)[0][:, 1]
    estimates = [estimate_spacing(points, np.random.default_rng(seed)) for seed in range(20)]
    assert np.median(estimates) == pytest.approx(np.median(nearest), rel=0.15)
    assert estimate_spacing(points[:1], np.random.default_rng(0)) == 0


def test_noise_is_drawn_evenly_up_to_its_largest_level():
    # Evenly spaced points of a sphere, on a spiral, so that the estimate of the spacing is exact.
    z = np.linspace(-0.99, 0.99, 600)
    turn = np.pi * (1 + 5**0.5) * np.arange(600)
    radius = np.sqrt(1 - z**2)
    sphere = np.column_stack([radius * np.cos(turn), radius * np.sin(turn), z]).astype(np.float32)
    spacing = np.median(cKDTree(sphere).query(sphere, 2)[0][:, 1])
    levels = []
    for seed in range(200):
        # The target is the source without noise, moved likewise.
        clouds = {"source": sphere, "target": sphere}
        moved = augment_pair(clouds, False, np.random.default_rng(seed), noise=0.5)
        scale = pdist(moved["target"][:50]).mean() / pdist(sphere[:50]).mean()
        levels.append((moved["source"] - moved["target"]).std() / scale / spacing)
    quartiles = np.quantile(levels, [0, 0.25, 0.5, 0.75, 1])
    assert quartiles == pytest.approx([0.01, 0.13, 0.255, 0.38, 0.5], abs=0.1)


def test_pairs_of_very_few_points_can_be_augmented():
    empty = np.empty((0, 3), np.float32)
    for source in (empty, empty + 0, np.ones((1, 3), np.float32), np.ones((5, 3), np.float32)):
        moved = augment_pair({"source": source, "target": empty}, True, np.random.default_rng(0))
        assert moved["source"].shape == source.shape
        assert np.isfinite(moved["source"]).all()


def test_a_crop_of_duplicate_points_has_exactly_the_budget():
    same = np.ones((50, 3), np.float32)
    cropped = crop_pair({"source": same, "target": same}, 30, np.random.default_rng(0))
    assert len(cropped["source"]) + len(cropped["target"]) == 30


def test_a_crop_has_points_of_both_clouds_where_they_overlap_in_part():
    rng = np.random.default_rng(0)
    source = rng.random((2000, 3)).astype(np.float32) * np.float32([10, 10, 0])
    target = source[source[:, 0] < 3]
    empty = 0
    for seed in range(100):
        cropped = crop_pair({"source": source, "target": target}, 200, np.random.default_rng(seed))
        assert len(cropped["source"]) + len(cropped["target"]) == 200
        empty += not len(cropped["target"])
    # Two thirds of the centres are without a target: of 8 draws, one in 17.
    assert empty < 15


def morton_code(cell: np.ndarray) -> int:
    """Interleaves the bits one by one: the lowest bits of x, y and z, then the next ones."""
    return sum(
        ((int(cell[axis]) >> bit) & 1) << (3 * bit + axis) for bit in range(16) for axis in range(3)
    )


def test_points_are_sorted_along_the_morton_curve():
    cells = np.random.default_rng(0).integers(0, 2**16, (300, 3))
    cells[:2] = [[0, 0, 0], [2**16 - 1] * 3]
    order = spatial_order(cells.astype(np.float64) + 7.0)
    codes = [morton_code(cell) for cell in cells[order]]
    assert codes == sorted(codes) and sorted(order) == list(range(300))


def test_neighbours_in_the_order_are_neighbours_in_space():
    points = np.random.default_rng(0).random((4000, 3)).astype(np.float32)
    steps = np.linalg.norm(np.diff(points[spatial_order(points)], axis=0), axis=1)
    assert np.median(steps) < 0.1 < 0.5 < np.median(np.linalg.norm(np.diff(points, axis=0), axis=1))


@given(
    arrays(
        np.float32,
        st.tuples(st.integers(0, 12), st.just(3)),
        elements=st.sampled_from([0.0, 1.0, -3e7, np.nan, np.inf]),
    )
)
def test_the_order_is_a_permutation_of_any_points(points):
    order = spatial_order(points)
    assert sorted(order.tolist()) == list(range(len(points)))
    if not np.isfinite(points).all():
        assert order.tolist() == list(range(len(points)))


def test_large_clouds_of_a_pair_are_sorted_together_with_their_normals(monkeypatch):
    monkeypatch.setattr(pair_dataset, "SORTED_FROM", 30)
    rng = np.random.default_rng(0)
    target = rng.random((50, 3)).astype(np.float32)
    clouds = {
        "source": rng.random((20, 3)).astype(np.float32),
        "target": target,
        "target_normals": 2 * target,
        "resample": np.empty((0, 3), np.float32),
    }
    ordered = in_spatial_order(clouds)
    assert list(ordered) == list(clouds)
    assert ordered["source"] is clouds["source"] and ordered["resample"] is clouds["resample"]
    assert np.array_equal(ordered["target"], target[spatial_order(target)])
    assert not np.array_equal(ordered["target"], target)
    assert np.array_equal(ordered["target_normals"], 2 * ordered["target"])
