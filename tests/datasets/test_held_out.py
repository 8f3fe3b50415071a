"""Held-out tiles never touch training ground: compared with a brute force over all points."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from survey_files import write_las

from pointup.cli.main import main
from pointup.datasets.held_out import measure_held_out
from pointup.datasets.opening import open_samples
from pointup.datasets.survey_tiles import HeldOutTiles, away_from, hold_out, split_few

OFFSET = np.array([500_000.0, 4_000_000.0, 100.0])
TILE = 10.0


def ground(columns: int, rows: int, per_tile: int, seed: int, shift: float = 0.0) -> np.ndarray:
    """Random points on columns x rows tiles; a shift moves them partly into one more tile each."""
    rng = np.random.default_rng(seed)
    points = rng.random((per_tile * columns * rows, 3)) * [columns * TILE, rows * TILE, 3]
    return OFFSET + points.round(3) + [shift, shift, 0]


def prepare(folder: Path, *options: Any) -> int:
    words = ["prepare", *options, "--tile", TILE, "--num-workers", 1, "-o", folder / "out"]
    return main([str(word) for word in words])


def points_of(folder: Path, split: str) -> np.ndarray:
    """All points (N, 2) of a split in the coordinates of the files, of validation on the cores."""
    return np.concatenate([xy_of(row) for row in load_from_disk(folder / "out")[split]])


def xy_of(row: dict[str, Any], sides: Sequence[str] = ("source", "target")) -> np.ndarray:
    """The points (N, 2) of a pair in the coordinates of its file, on its core if it has one."""
    clouds = [np.reshape(row[side], (-1, 3))[:, :2] + row["origin"][:2] for side in sides]
    low, high = np.reshape(row["core"], (2, 2)) if row["core"] else (-np.inf, np.inf)
    points = np.concatenate(clouds)
    return points[((points >= low) & (points <= high)).all(axis=1)]


def smallest_distance(one: np.ndarray, other: np.ndarray) -> float:
    """The smallest of all distances between two sets."""
    nearest = [np.square(other - point).sum(axis=1).min() for point in one]
    return float(np.sqrt(min(nearest)))


@settings(max_examples=12)
@given(
    columns=st.integers(1, 3),
    rows=st.integers(1, 3),
    shift=st.sampled_from([0.0, 1.5, 5.0]),
    strip=st.sampled_from([None, 2.0, 5.0]),
    command=st.sampled_from(["pairs", "thin"]),
    seed=st.integers(0, 5),
)
def test_no_training_point_is_nearer_to_a_held_out_point_than_the_strip(
    columns, rows, shift, strip, command, seed
):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "sparse.npy", ground(columns, rows, 150, seed, shift))
        np.save(folder / "dense.npy", ground(columns, rows, 400, seed + 1, shift))
        inputs = (
            ["pairs", "--source", folder / "sparse.npy", "--target", folder / "dense.npy"]
            if command == "pairs"
            else ["thin", folder / "dense.npy"]
        )
        options = [*inputs, "--min-points", 4, "--seed", seed]
        status = prepare(folder, *options, *(["--strip", strip] if strip else []))
        if status and command == "pairs" and (columns, rows, shift) == (1, 1, 5.0) and strip != 2.0:
            # Four quarters of a tile: the strip around one of them holds all usable points.
            assert not (folder / "out").exists()
            return
        assert status == 0
        if columns * rows == 1 and not shift:
            return  # a single tile is not split
        train, validation = (points_of(folder, split) for split in ("train", "validation"))
        distance = smallest_distance(validation, train)
        # Points are stored as float32 relative to the origin of their pair.
        assert distance >= (strip or TILE / 2) - 1e-5
        splits = [open_samples(folder / "out", split) for split in ("train", "validation")]
        measured = measure_held_out(*splits, {"made_by": f"pointup 0 prepare {command}"})
        assert measured.gap == pytest.approx(distance, abs=1e-5)
        assert measured.num_pairs == len(splits[1])
        if columns * rows == 9 and not shift:
            assert len(splits[1]) == 1
            assert len(train) > 0.5 * 9 * (550 if command == "pairs" else 400)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.5, 1.0, 2.5]),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.3, 1.0, 2.2]),
)
def test_only_points_within_the_strip_are_left_out(seed, tile, num_held, block, strip):
    rng = np.random.default_rng(seed)
    held = rng.integers(-4, 5, (num_held, 2))
    block_xy = tuple(rng.integers(-2, 2, 2).tolist())
    points = rng.random((60, 3)) * block * tile
    points[:, :2] += np.array(block_xy) * block * tile
    near = HeldOutTiles(tile, held, strip).near_block(block_xy, block)
    kept = near.without_strip(points)
    expected = []
    for point in points:
        gaps = []
        for low in held * tile:
            nearest = np.minimum(np.maximum(point[:2], low), low + tile)
            gaps.append(np.hypot(*(point[:2] - nearest)))
        if all(gap >= strip for gap in gaps):
            expected.append(point)
    np.testing.assert_array_equal(kept, np.reshape(expected, (-1, 3)))


def test_points_at_the_edge_of_the_strip_are_kept():
    xy = np.array([[0.5, 0.5], [1.999, 0.5], [2.0, 0.5], [-1.0, 0.5], [1.8, 1.8], [1.7, 1.7]])
    kept = away_from(xy, 1.0, np.array([[0, 0]]), 1.0)
    assert kept.tolist() == [False, False, True, True, True, False]


@given(
    st.sets(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=9),
    st.floats(0.05, 0.6),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_few_tiles_are_split_by_their_points_and_not_by_their_order(tiles, fraction, seed, random):
    tile_xy = np.array(sorted(tiles))
    weights = np.array([random.randint(1, 100) for _ in tiles])
    held = split_few(tile_xy, weights, fraction, seed)
    assert 0 < held.sum() < len(tiles)
    # If a tile is light enough, the held-out weight is below twice the goal.
    goal = fraction * weights.sum()
    light = weights[weights < 2 * goal]
    if len(light) and (weights.argmax() != weights.argmin()):
        assert weights[held].sum() < 2 * goal or weights[held].sum() == weights.min()
    order = random.sample(range(len(tiles)), len(tiles))
    assert np.array_equal(split_few(tile_xy[order], weights[order], fraction, seed), held[order])


def test_the_few_held_out_tiles_are_adjacent_and_the_fullest_is_for_training():
    tile_xy = np.stack(np.meshgrid(np.arange(8), np.arange(2)), axis=-1).reshape(-1, 2)
    for seed in range(20):
        (held,) = hold_out([tile_xy], 0.13, seed, block=4, weights=[np.ones(16)])
        assert held.sum() == 2
        assert np.abs(np.diff(tile_xy[held], axis=0)).sum() == 1
    sliver = np.array([[0, 0], [1, 0]])
    for seed in range(20):
        (held,) = hold_out([sliver], 0.1, seed, block=4, weights=[np.array([95, 5])])
        assert held.tolist() == [False, True]


def test_source_and_target_of_a_pair_cut_by_the_strip_cover_the_same_ground(tmp_path):
    np.save(tmp_path / "sparse.npy", ground(3, 1, 3000, 0))
    np.save(tmp_path / "dense.npy", ground(3, 1, 3000, 1))
    inputs = ["--source", tmp_path / "sparse.npy", "--target", tmp_path / "dense.npy"]
    assert prepare(tmp_path, "pairs", *inputs, "--strip", 4) == 0
    cut = 0
    for row in load_from_disk(tmp_path / "out")["train"]:
        source, target = (np.reshape(row[side], (-1, 3)) for side in ("source", "target"))
        for one, other in ((source, target), (target, source)):
            assert np.abs(one.min(axis=0) - other.min(axis=0)).max() < 0.3
            assert np.abs(one.max(axis=0) - other.max(axis=0)).max() < 0.3
        cut += np.ptp(source[:, 0]) < 7
    assert cut >= 1


def test_a_strip_that_leaves_no_training_pairs_is_an_error_with_a_remedy(tmp_path, capsys):
    np.save(tmp_path / "dense.npy", ground(2, 1, 400, 0))
    assert prepare(tmp_path, "thin", tmp_path / "dense.npy", "--strip", 30) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--strip" in error and "--tile" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("strip", [-1, "nan", "inf"])
def test_an_impossible_strip_is_refused(strip, tmp_path, capsys):
    np.save(tmp_path / "dense.npy", ground(1, 1, 400, 0))
    assert prepare(tmp_path, "thin", tmp_path / "dense.npy", "--strip", strip) == 1
    assert f"--strip {float(str(strip))}" in capsys.readouterr().err


def test_inspect_reports_the_held_out_share_and_contact_with_training_ground(tmp_path, capsys):
    np.save(tmp_path / "dense.npy", ground(3, 3, 400, 0))
    for strip, text in ((4, "a strip of 4 was left out"), (0, "touches training ground")):
        assert (
            prepare(tmp_path, "thin", tmp_path / "dense.npy", "--strip", strip, "--overwrite") == 0
        )
        capsys.readouterr()
        assert main(["inspect", str(tmp_path / "out")]) == 0
        output = capsys.readouterr().out
        assert "held out to validate on: 1 pair (11.1%)" in output
        assert text in output


def test_gaps_of_separate_files_are_measured_within_each_file_only(tmp_path):
    for name in ("a", "b", "c"):
        np.save(tmp_path / f"{name}.npy", ground(1, 1, 400, ord(name)))
    inputs = [tmp_path / f"{name}.npy" for name in ("a", "b", "c")]
    assert prepare(tmp_path, "thin", *inputs, "--separate") == 0
    train, validation = (open_samples(tmp_path / "out", split) for split in ("train", "validation"))
    info = {"made_by": "pointup 0 prepare thin"}
    assert measure_held_out(train, validation, {**info, "separate": True}).gap is None
    assert measure_held_out(train, validation, info).gap == pytest.approx(0, abs=1)


def test_inspect_says_no_strip_of_a_dataset_without_a_validation_split_and_counts_its_files(
    tmp_path, capsys
):
    np.save(tmp_path / "dense.npy", ground(3, 3, 400, 0))
    assert prepare(tmp_path, "thin", tmp_path / "dense.npy", "--validation", 0) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "touches training ground" in output and "was left out" not in output
    assert "surveys" in output and "1 file\n" in output and "'strip'" not in output


def gap_between(one: np.ndarray, other: np.ndarray) -> float:
    """The smallest of all distances between two large sets."""
    return float(cKDTree(one).query(other)[0].min())


def test_joined_datasets_of_one_survey_have_no_training_points_near_validation_points(
    tmp_path, capsys, monkeypatch
):
    dense, elsewhere = tmp_path / "survey" / "dense.npy", tmp_path / "elsewhere.npy"
    dense.parent.mkdir()
    np.save(dense, ground(4, 4, 200, 0))
    np.save(elsewhere, ground(4, 4, 200, 1))
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
    direct, later = (load_from_disk(tmp_path / name)["train"] for name in ("direct", "later"))
    assert len(direct) == len(later)

    def points(split: str, numbers: str) -> list[np.ndarray]:
        rows = [row for row in load_from_disk(tmp_path / "out")[split] if row["name"][0] in numbers]
        return [xy_of(row, ["target"]) for row in rows]

    validation = np.concatenate(points("validation", "01"))
    train = points("train", "01")
    assert min(gap_between(validation, pair) for pair in train) >= 2 - 1e-4
    # Only the pairs that touch validation points are left out.
    for number, name, other in (("0", "a", "b"), ("1", "b", "a")):
        before = load_from_disk(tmp_path / name)["train"]
        held = points("validation", "1" if other == "b" else "0")
        held += [xy_of(row, ["source"]) for row in load_from_disk(tmp_path / other)["validation"]]
        far = 0
        for row in before:
            far += gap_between(np.concatenate(held), xy_of(row)) >= 2 - 1e-4
        assert len(points("train", number)) == far


def test_separate_files_are_compared_with_the_same_file_of_another_dataset_only(tmp_path):
    """Plots with coordinates of their own, in the same place: prepared with tiles of 10 and 8."""
    plots = [tmp_path / name for name in ("a.npy", "b.npy")]
    for seed, plot in enumerate(plots):
        np.save(plot, ground(4, 4, 100, seed))
    for tile in (10, 8):
        words = ["prepare", "thin", *plots, "--separate", "--tile", tile, "--strip", 2, "--seed", 1]
        words += ["--min-points", 4, "--num-workers", 1, "-o", tmp_path / f"tiles-{tile}"]
        assert main([str(word) for word in words]) == 0
    first, second = (tmp_path / f"tiles-{tile}" for tile in (10, 8))
    assert main(["prepare", "join", str(first), str(second), "-o", str(tmp_path / "out")]) == 0

    def clouds(folder: Path, split: str) -> dict[str, np.ndarray]:
        """x and y of all points of each pair."""
        return {row["name"]: xy_of(row) for row in load_from_disk(folder)[split]}

    kept = clouds(tmp_path / "out", "train").keys()
    for number, (own, other) in enumerate([(first, second), (second, first)]):
        held_out = clouds(other, "validation")
        num_left_out = 0
        for name, points in clouds(own, "train").items():
            near = {
                tile[0]
                for tile, held in held_out.items()
                if gap_between(held[:, :2], points[:, :2]) < 2 - 1e-4
            }
            is_kept = f"{number}-{own.name}/{name}" in kept
            assert is_kept == (name[0] not in near)
            num_left_out += not is_kept
        assert 0 < num_left_out < len(clouds(own, "train"))


@pytest.mark.parametrize("command", ["thin", "pairs", "passes"])
def test_a_validation_pair_has_the_points_around_its_tile_and_no_training_pair_has_them(
    tmp_path, command
):
    rng = np.random.default_rng(0)
    time = np.repeat([0.0, 100.0, 200.0], 1600) + rng.random(4800)
    survey = ground(4, 4, 300, 1)
    write_las(tmp_path / "all.las", survey, gps_time=time)
    np.save(tmp_path / "sparse.npy", ground(4, 4, 150, 2))
    inputs = {
        "thin": [tmp_path / "all.las", "--ratio", 3],
        "pairs": ["--source", tmp_path / "sparse.npy", "--target", tmp_path / "all.las"],
        "passes": [tmp_path / "all.las"],
    }
    assert prepare(tmp_path, command, *inputs[command], "--block", 1, "--min-points", 8) == 0
    everything = {tuple(p) for p in survey[:, :2].round(3)}
    train, validation = (open_samples(tmp_path / "out", split) for split in ("train", "validation"))
    seen = set()
    for row in range(len(train)):
        pair = train.pair(row)
        assert pair.core is None
        seen |= {tuple(p) for p in (pair.target + pair.origin)[:, :2].round(3)}
    for row in range(len(validation)):
        pair = validation.pair(row)
        assert pair.core is not None and np.allclose(np.diff(pair.core, axis=0), TILE)
        points = (np.concatenate([pair.source, pair.target]) + pair.origin)[:, :2]
        low, high = pair.core
        assert (points >= low - TILE / 4 - 1e-3).all() and (points <= high + TILE / 4 + 1e-3).all()
        around = {tuple(p) for p in points.round(3)}
        assert not around & seen
        inside = {p for p in everything if (p >= low - 2.4).all() and (p <= high + 2.4).all()}
        if command == "thin":
            # 4 in 4 of them, but for the rest of the division.
            assert len(inside - around) <= 3
        assert len(around) > 1.2 * pair.num_points
