"""Training pairs near what another dataset of the same survey holds out are left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial import cKDTree

from pointup.cli.main import main
from pointup.datasets.pair_dataset import open_pairs

CORNER = np.array([500_000.0, 4_000_000.0, 100.0])


def ground(seed: int, per_tile: int = 200) -> np.ndarray:
    """Random points (N, 3) on a square of 40 m, as if on 4 x 4 tiles of 10 m."""
    points = np.random.default_rng(seed).random((16 * per_tile, 3)) * [40, 40, 3]
    return CORNER + points.round(3)


def smallest_distance(one: np.ndarray, other: np.ndarray) -> float:
    """The smallest of all distances between two sets."""
    return float(cKDTree(one).query(other)[0].min())


def test_joined_datasets_of_one_survey_have_no_training_points_near_validation_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, elsewhere = tmp_path / "survey" / "dense.npy", tmp_path / "elsewhere.npy"
    dense.parent.mkdir()
    np.save(dense, ground(0))
    np.save(elsewhere, ground(1))
    names = ("a", "b", "c")
    monkeypatch.chdir(dense.parent)
    # The same file, by its name in the working directory and as that of a folder.
    relative = dense.relative_to(dense.parent)
    for name, survey, tile in (("a", relative, 10), ("b", dense.parent, 8), ("c", elsewhere, 10)):
        words = ["prepare", "thin", survey, "--tile", tile, "--strip", 2]
        words += ["--min-points", 4]
        words += ["--seed", ord(name), "--num-workers", 1, "-o", tmp_path / name]
        assert main([str(word) for word in words]) == 0
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    folders = [str(tmp_path / name) for name in names]
    assert main(["prepare", "join", *folders, "-o", str(tmp_path / "out")]) == 0
    reported = capsys.readouterr().err
    assert f"training pairs touching validation pairs of {folders[1]}" in reported
    assert folders[2] not in reported

    def join(inputs: Sequence[str], name: str) -> None:
        joined = [str(tmp_path / each) for each in inputs]
        assert main(["prepare", "join", *joined, "-o", str(tmp_path / name)]) == 0

    # A dataset that was joined before is compared like its parts, also where these are gone.
    join("ab", "direct")
    join("a", "first")
    (tmp_path / "a").rename(tmp_path / "gone")
    join(("first", "b"), "later")
    (tmp_path / "gone").rename(tmp_path / "a")
    direct, later = (open_pairs(tmp_path / name, "train") for name in ("direct", "later"))
    assert len(direct) == len(later)

    def points(split: str, numbers: str) -> list[np.ndarray]:
        rows = [row for row in open_pairs(tmp_path / "out", split) if row["name"][0] in numbers]
        return [np.reshape(row["target"], (-1, 3))[:, :2] + row["origin"][:2] for row in rows]

    validation = np.concatenate(points("validation", "01"))
    train = points("train", "01")
    assert min(smallest_distance(validation, pair) for pair in train) >= 2 - 1e-4
    # Only the pairs that touch validation points are left out.
    for number, name, other in (("0", "a", "b"), ("1", "b", "a")):
        before = open_pairs(tmp_path / name, "train")
        held = points("validation", "1" if other == "b" else "0")
        far = 0
        for row in before:
            clouds = [np.reshape(row[side], (-1, 3)) for side in ("source", "target")]
            xy = np.concatenate(clouds)[:, :2] + row["origin"][:2]
            sources = [
                np.reshape(r["source"], (-1, 3))[:, :2] + r["origin"][:2]
                for r in open_pairs(tmp_path / other, "validation")
            ]
            far += smallest_distance(np.concatenate([*held, *sources]), xy) >= 2 - 1e-4
        assert len(points("train", number)) == far


def test_separate_files_are_compared_with_the_same_file_of_another_dataset_only(
    tmp_path: Path,
) -> None:
    """Plots with coordinates of their own, in the same place: prepared with tiles of 10 and 8."""
    plots = [tmp_path / name for name in ("a.npy", "b.npy")]
    for seed, plot in enumerate(plots):
        np.save(plot, ground(seed, 100))
    for tile in (10, 8):
        words = ["prepare", "thin", *plots, "--separate", "--tile", tile, "--strip", 2, "--seed", 1]
        words += ["--min-points", 4, "--num-workers", 1, "-o", tmp_path / f"tiles-{tile}"]
        assert main([str(word) for word in words]) == 0
    first, second = (tmp_path / f"tiles-{tile}" for tile in (10, 8))
    assert main(["prepare", "join", str(first), str(second), "-o", str(tmp_path / "out")]) == 0

    def clouds(folder: Path, split: str) -> dict[str, np.ndarray]:
        """x and y of all points of each pair."""
        return {
            row["name"]: np.concatenate([np.reshape(row[s], (-1, 3)) for s in ("source", "target")])
            + row["origin"]
            for row in open_pairs(folder, split)
        }

    kept = clouds(tmp_path / "out", "train").keys()
    for number, (own, other) in enumerate([(first, second), (second, first)]):
        held_out = clouds(other, "validation")
        num_left_out = 0
        for name, points in clouds(own, "train").items():
            near = {
                tile[0]
                for tile, held in held_out.items()
                if smallest_distance(held[:, :2], points[:, :2]) < 2 - 1e-4
            }
            is_kept = f"{number}-{own.name}/{name}" in kept
            assert is_kept == (name[0] not in near)
            num_left_out += not is_kept
        assert 0 < num_left_out < len(clouds(own, "train"))
