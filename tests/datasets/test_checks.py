"""All columns of a dataset are checked, and each bad sample is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from runs import options

from pointup.datasets.checks import check_samples, coarse_step, notes_on_pairs
from pointup.datasets.columns import pack_points
from pointup.datasets.opening import open_samples
from pointup.datasets.pair import Pair, surface_path
from pointup.datasets.pair_writer import write_pairs
from pointup.errors import DataError
from pointup.geometry.surfaces import Surface
from pointup.training.datasets import open_training_data

TRIANGLE = Surface.from_triangles(np.eye(3), np.array([[0, 1, 2]]))


def cloud(num_points: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((num_points, 3), dtype=np.float32)


def with_holes(num_points: int, rows: list[int], value: float = np.nan) -> np.ndarray:
    points = cloud(num_points, 9)
    points[rows, 1] = value
    return points


def pair(name: str, **columns: Any) -> Pair:
    return Pair(name, cloud(20), cloud(40, 1), **columns)


BAD = [
    pair("normals", target_normals=with_holes(40, [3, 7])),
    pair("resample", resample=with_holes(30, [5], np.inf)),
    pair("missing", surface="missing.npz"),
    pair("cut off", surface="cut.npz"),
]
REASONS = {
    "normals": "target_normals has 2 points that are not finite",
    "resample": "resample has 1 points that are not finite",
    "missing": "surfaces/missing.npz is missing",
    "cut off": "surfaces/cut.npz is damaged",
}


@pytest.fixture
def damaged(tmp_path) -> Path:
    """A dataset whose splits have a good sample before each bad sample."""
    folder = tmp_path / "pairs"
    good = [
        pair(f"good {i}", surface="a.npz", target_normals=cloud(40, 2), resample=cloud(9, 3))
        for i in range(len(BAD))
    ]
    mixed = [sample for both in zip(good, BAD, strict=True) for sample in both]
    surfaces = {"a.npz": TRIANGLE, "cut.npz": TRIANGLE}
    write_pairs(mixed, mixed, folder, {}, surfaces)
    path = folder / "surfaces" / "cut.npz"
    path.write_bytes(path.read_bytes()[:200])
    return folder


def test_every_bad_column_is_found_and_good_samples_are_not(damaged):
    found = open_samples(damaged, "train").bad_samples(5)
    assert [sample.name for sample in found] == list(REASONS)
    assert [sample.index for sample in found] == [1, 3, 5, 7]
    for sample in found:
        assert REASONS[sample.name] in sample.reason


def test_training_leaves_bad_samples_out_and_names_them(damaged, accelerator):
    config = options(damaged, damaged.parent / "run")
    data = open_training_data(config, accelerator)
    for part in (data.train, data.validation):
        assert list(part.names) == [f"good {i}" for i in range(4)]
    assert len(data.left_out) == 8
    for line, (split, name) in zip(
        data.left_out, ((s, n) for s in ("train", "validation") for n in REASONS), strict=True
    ):
        assert line.startswith(f"{split} sample {name}: ")
    files = [data.validation.samples.surface(i) for i in range(4)]
    assert all(path is not None and path.is_file() for path in files)


def test_a_missing_point_makes_only_its_own_sample_bad():
    whole = pack_points([cloud(6), cloud(7), cloud(8)])
    triples = pa.array([[0.0, 0.0, 0.0], None, [1.0, 1.0, 1.0]], pa.list_(pa.float32(), 3))
    hurt = pa.ListArray.from_arrays(pa.array([0, 3], pa.int32()), triples)
    source = pa.concat_arrays([whole.slice(0, 1), hurt.cast(whole.type), whole.slice(2, 1)])
    table = pa.table(
        {
            "source": source,
            "target": whole,
            "num_source": pa.array([6, 3, 8]),
            "num_target": pa.array([6, 7, 8]),
        }
    )
    assert check_samples(table)[0] == ["", "a point is missing", ""]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("name", [None, None]),
        ("name", ["a", None]),
        ("origin", [None, None]),
        ("origin", [[0.0, 0.0, 0.0], None]),
        ("origin", [[0.0, 0.0, None], [0.0, 0.0, 0.0]]),
        ("origin", [[0.0, 0.0], [0.0, 0.0]]),
        ("num_target", [8, None]),
    ],
)
def test_missing_values_of_a_column_raise_one_line_with_the_dataset_and_the_remedy(
    column, values, tmp_path
):
    points = [cloud(8).tolist()] * 2
    given = Dataset.from_dict({"source": points, "target": points, column: values})
    given.save_to_disk(tmp_path / "given")
    with pytest.raises(DataError, match="leave the column out") as error:
        open_samples(tmp_path / "given", "train")
    for text in (str(tmp_path / "given"), repr(column)):
        assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_the_column_vertical_may_have_missing_values(tmp_path):
    points = [cloud(8).tolist()] * 3
    columns = {"source": points, "target": points, "vertical": [None, True, False]}
    features = datasets.Dataset.from_dict(columns)
    features.save_to_disk(tmp_path / "given")
    for split in ("train", "validation"):
        assert not open_samples(tmp_path / "given", split).bad_samples(2)


@pytest.mark.parametrize(
    "name", ["../state.json", "a/../../x.npz", "/etc/passwd", "link", "links/a", "loop", "a\0b"]
)
def test_a_surface_path_does_not_lead_out_of_its_dataset(tmp_path, name):
    surfaces, outside = tmp_path / "data" / "surfaces", tmp_path / "outside"
    surfaces.mkdir(parents=True)
    outside.mkdir()
    (outside / "a").write_bytes(b"secret")
    (surfaces / "link").symlink_to(outside / "a")
    (surfaces / "links").symlink_to(outside)
    (surfaces / "loop").symlink_to(surfaces / "loop")
    with pytest.raises(DataError, match=r"data: the surface .* is not a file in its folder"):
        surface_path(tmp_path / "data", name)


def test_a_surface_path_of_a_linked_dataset_is_in_its_folder(tmp_path):
    (tmp_path / "data" / "surfaces" / "deep").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    for dataset in ("data", "linked", "linked/../data"):
        assert surface_path(tmp_path / dataset, "deep/a.npz").name == "a.npz"


def test_pairs_whose_sides_lie_apart_are_bad():
    shifted = [cloud(40, 1) + np.float32([0, shift, 0]) for shift in (0.9, -1.1, 1.5, -167)]
    sides = {"source": pack_points([cloud(20)] * 4), "target": pack_points(shifted)}
    first, second, *apart = check_samples(pa.table(sides))[0]
    assert (first, second) == ("", "")
    assert [float(text.split()[-2]) for text in apart] == pytest.approx([0.5, 166], abs=0.2)


UTM = np.array([450_000.0, 4_100_000.0, 200.0])


def hill(number: int, spacing: float) -> np.ndarray:
    """Points on a hillside, about this far apart, in map coordinates."""
    points = np.random.default_rng(number).random((number, 3)) * [1, 1, 0.3] * spacing * number**0.5
    return UTM + points


@pytest.mark.parametrize("spacing", [0.2, 0.7])
def test_rounding_of_map_coordinates_in_float32_is_found(spacing):
    exact = hill(800, spacing)
    rounded = exact.astype(np.float32).astype(np.float64)
    of_file = (exact / 0.01).round() * 0.01
    steps = [coarse_step((points - UTM).astype(np.float32)) for points in (exact, rounded, of_file)]
    assert steps == pytest.approx([0, 0.25, 0], abs=1e-4)


def test_a_grid_is_not_rounded():
    x, y = (axis.ravel() for axis in np.meshgrid(np.arange(30.0), np.arange(30.0)))
    assert coarse_step(np.column_stack([x, y, np.sin(x) + y / 7]).astype(np.float32)) == 0
    # Points above one another are no grid.
    several = np.column_stack([np.tile(x, 2), np.tile(y, 2), np.random.default_rng(0).random(1800)])
    assert coarse_step(several.astype(np.float32)) == 1


def test_swapped_sides_and_rounded_coordinates_are_noted(tmp_path):
    low, high = (hill(number, 0.5).astype(np.float32) - np.float32(UTM) for number in (300, 900))
    for name, sides in (("right", (low, high)), ("swapped", (high, low))):
        write_pairs([Pair(name, *sides)] * 3, [Pair(name, *sides)], tmp_path / name, {})
        notes = notes_on_pairs(open_samples(tmp_path / name, "train"))
        assert ("swapped" in " ".join(notes)) == (name == "swapped")
        assert "coordinates are rounded to 0.25, coarse beside" in notes[-1]


def test_sides_in_different_units_are_noted(tmp_path):
    source, target = cloud(60), cloud(240, 1)
    for name, scale in (("same", 1.0), ("feet", 3.28), ("metres", 0.3048)):
        pair = Pair(name, source, target * np.float32(scale))
        write_pairs([pair] * 3, [pair], tmp_path / name, {})
        notes = " ".join(notes_on_pairs(open_samples(tmp_path / name, "train")))
        wide = {"same": "", "feet": "the target is 3.", "metres": "the source is 3."}[name]
        assert wide in notes and ("same unit" in notes) == (name != "same")


def test_stray_returns_are_no_other_unit(tmp_path):
    source, target = cloud(60), cloud(240, 1)
    target[::50, 2] += 50
    pair = Pair("stray", source, target)
    write_pairs([pair] * 3, [pair], tmp_path / "stray", {})
    assert "same unit" not in " ".join(notes_on_pairs(open_samples(tmp_path / "stray", "train")))


def test_no_bad_sample_is_held_out_while_there_are_good_ones(tmp_path):
    def rows_of(split: str, bad: set[int]) -> list[int]:
        sides = {"source": [cloud(20).tolist()] * 9, "target": [cloud(80).tolist()] * 9}
        sides["source"] = [[[np.nan] * 3] if i in bad else x for i, x in enumerate(sides["source"])]
        Dataset.from_dict(sides).save_to_disk(tmp_path / "data")
        samples = open_samples(tmp_path / "data", split)
        return [int(samples.name(row).removeprefix("sample_")) for row in range(len(samples))]

    (held_out,) = rows_of("validation", set())
    (other,) = rows_of("validation", {held_out})
    assert other != held_out
    assert rows_of("train", {held_out}) == [row for row in range(9) if row != other]
    assert rows_of("validation", set(range(9))) == [held_out]
