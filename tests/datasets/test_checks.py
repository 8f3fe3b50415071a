"""All columns of a dataset are checked, and each bad sample is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from accelerate import Accelerator
from datasets import Dataset
from runs import options

from pointup.datasets.checks import find_bad_samples
from pointup.datasets.columns import pack_points
from pointup.datasets.pair import surface_path
from pointup.datasets.pair_dataset import Pair, open_pairs, write_pairs
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
def damaged(tmp_path: Path) -> Path:
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


def test_every_bad_column_is_found_and_good_samples_are_not(damaged: Path) -> None:
    found = find_bad_samples(open_pairs(damaged, "train"), 5, damaged)
    assert [sample.name for sample in found] == list(REASONS)
    assert [sample.index for sample in found] == [1, 3, 5, 7]
    for sample in found:
        assert REASONS[sample.name] in sample.reason


def test_training_leaves_bad_samples_out_and_names_them(
    damaged: Path, accelerator: Accelerator
) -> None:
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


def test_a_missing_point_makes_only_its_own_sample_bad() -> None:
    whole = pack_points([cloud(6), cloud(7), cloud(8)])
    triples = pa.array([[0.0, 0.0, 0.0], None, [1.0, 1.0, 1.0]], pa.list_(pa.float32(), 3))
    hurt = pa.ListArray.from_arrays(pa.array([0, 3], pa.int32()), triples)
    source = pa.concat_arrays([whole.slice(0, 1), hurt.cast(whole.type), whole.slice(2, 1)])
    table = pa.table(
        {
            "name": ["a", "b", "c"],
            "source": source,
            "target": whole,
            "num_source": pa.array([6, 3, 8]),
            "num_target": pa.array([6, 7, 8]),
        }
    )
    (bad,) = find_bad_samples(Dataset(table), 2)
    assert (bad.index, bad.name, bad.reason) == (1, "b", "a point is missing")


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
    column: str, values: list[Any], tmp_path: Path
) -> None:
    points = [cloud(8).tolist()] * 2
    given = Dataset.from_dict({"source": points, "target": points, column: values})
    given.save_to_disk(tmp_path / "given")
    with pytest.raises(DataError, match="leave the column out") as error:
        open_pairs(tmp_path / "given", "train")
    for text in (str(tmp_path / "given"), repr(column)):
        assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_the_column_vertical_may_have_missing_values(tmp_path: Path) -> None:
    points = [cloud(8).tolist()] * 3
    columns = {"source": points, "target": points, "vertical": [None, True, False]}
    features = datasets.Dataset.from_dict(columns)
    features.save_to_disk(tmp_path / "given")
    for split in ("train", "validation"):
        assert not find_bad_samples(open_pairs(tmp_path / "given", split), 2, tmp_path / "given")


@pytest.mark.parametrize(
    "name", ["../state.json", "a/../../x.npz", "/etc/passwd", "link", "links/a", "loop", "a\0b"]
)
def test_a_surface_path_does_not_lead_out_of_its_dataset(tmp_path: Path, name: str) -> None:
    surfaces, outside = tmp_path / "data" / "surfaces", tmp_path / "outside"
    surfaces.mkdir(parents=True)
    outside.mkdir()
    (outside / "a").write_bytes(b"secret")
    (surfaces / "link").symlink_to(outside / "a")
    (surfaces / "links").symlink_to(outside)
    (surfaces / "loop").symlink_to(surfaces / "loop")
    with pytest.raises(DataError, match=r"data: the surface .* is not a file in its folder"):
        surface_path(tmp_path / "data", name)


def test_a_surface_path_of_a_linked_dataset_is_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "data" / "surfaces" / "deep").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    for dataset in ("data", "linked", "linked/../data"):
        assert surface_path(tmp_path / dataset, "deep/a.npz").name == "a.npz"
