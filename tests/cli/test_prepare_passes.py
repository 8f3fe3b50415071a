"""`pointup prepare passes`: one flight pass beside the others, whole pulses, at given densities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import laspy
import numpy as np
import pytest
from datasets import load_from_disk
from scipy.spatial import cKDTree

from pointup.cli.main import main
from pointup.datasets import regions

WIDTH, NUM_PULSES = 60.0, 4500
SIDES = ("source", "target")
DENSITY = 2 * NUM_PULSES / WIDTH**2


@pytest.fixture(scope="module")
def survey(tmp_path_factory) -> laspy.LasData:
    """Three passes of the same ground with two returns for each pulse, one of them over a half."""
    rng = np.random.default_rng(0)
    columns = []
    for number in range(3):
        xy = rng.random((NUM_PULSES, 2)) * [WIDTH if number else WIDTH / 2, WIDTH]
        # All pulses have times of their own.
        seconds = 200 * number + xy[:, 1] / 20 + np.arange(NUM_PULSES) * 1e-8
        for height in (0.0, 5.0):
            z = height + rng.random(NUM_PULSES)
            columns.append(np.column_stack([xy, z, seconds, np.full(NUM_PULSES, 40 + number)]))
    table = np.concatenate(columns)[rng.permutation(6 * NUM_PULSES)]
    las = laspy.LasData(laspy.LasHeader(version="1.4", point_format=6))
    las.header.scales = np.full(3, 1e-5)
    las.xyz, las.gps_time, las.point_source_id = table[:, :3], table[:, 3], table[:, 4]
    path = tmp_path_factory.mktemp("survey") / "flown.las"
    las.write(path)
    return laspy.read(path)


@pytest.fixture
def file(survey, tmp_path) -> Path:
    survey.write(tmp_path / "flown.las")
    return tmp_path / "flown.las"


def prepare(*words: object) -> int:
    options = ("--min-points", 10, "--num-workers", 1)
    return main(["prepare", "passes", *(str(word) for word in (*words, *options))])


def pairs_of(folder: Path, survey: laspy.LasData) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The name of each pair, and the indices of the points of source and target in the survey."""
    tree = cKDTree(survey.xyz)
    for split in load_from_disk(folder).values():
        for row in split:
            found = []
            for side in SIDES:
                distance, index = tree.query(np.reshape(row[side], (-1, 3)) + row["origin"])
                assert distance.max() < 1e-4
                found.append(index)
            yield row["name"], *found


def test_a_source_is_one_pass_and_its_target_are_the_others(file, survey, tmp_path, capsys):
    assert prepare(file, "-o", tmp_path / "out") == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert [row[1] for row in table] == ["40", "41", "42"]
    assert [row[3] for row in table] == ["9,000"] * 3
    assert [float(row[4]) for row in table] == pytest.approx(
        [2 * DENSITY, DENSITY, DENSITY], rel=0.1
    )
    share = [float(row[5].removesuffix("%")) for row in table]
    assert share == pytest.approx([50, 100, 100], rel=0.05)
    # All fly north.
    assert all(
        (int(row[6].removesuffix("°")) + 180) % 360 == pytest.approx(180, abs=3) for row in table
    )
    ids = np.array(survey.point_source_id)
    in_tile: dict[str, list[int]] = {}
    names = []
    for name, source, target in pairs_of(tmp_path / "out", survey):
        (number,) = set(ids[source])
        tile, _, number_of_pass = name.partition("-pass")
        in_tile.setdefault(tile, []).append(number)
        names.append(name)
        assert 1 <= int(number_of_pass) <= 3
        assert number not in ids[target]
        assert 2 <= len(target) / len(source) < 4.5
        if int(name.split("_")[1]) < 2:
            assert len(set(ids[target])) == 2
    assert len(in_tile) == 36
    assert len(set(names)) == len(names) == 72
    xy = {}
    for split in ("train", "validation"):
        rows = [(row, side) for row in load_from_disk(tmp_path / "out")[split] for side in SIDES]
        clouds = [np.reshape(row[side], (-1, 3)) + row["origin"] for row, side in rows]
        xy[split] = np.concatenate(clouds)[:, :2]
        if split == "validation":  # Such pairs show ground around their cores.
            low, high = np.array([np.reshape(row["core"], (2, 2)) for row, _ in rows]).swapaxes(
                0, 1
            )
            on_core = [
                ((cloud[:, :2] >= low[i]) & (cloud[:, :2] < high[i])).all(axis=1)
                for i, cloud in enumerate(clouds)
            ]
            xy[split] = xy[split][np.concatenate(on_core)]
    assert cKDTree(xy["train"]).query(xy["validation"])[0].min() > 5 - 1e-3
    for name, numbers in in_tile.items():
        assert len(set(numbers)) == len(numbers) == 2
        assert int(name.split("_")[1]) < 3 or set(numbers) == {41, 42}


@pytest.mark.parametrize("large_bytes", [0, regions.LARGE_BYTES])
def test_thinning_to_a_density_keeps_the_returns_of_a_pulse_together(
    large_bytes, file, survey, tmp_path, monkeypatch
):
    monkeypatch.setattr(regions, "LARGE_BYTES", large_bytes)
    words = (file, "--source-density", "0.7:1.5", "--target-density", 3, "--pairs-per-tile", 1)
    assert prepare(*words, "--validation", 0, "-o", tmp_path / "out") == 0
    time = np.array(survey.gps_time)
    densities = []
    for _, source, target in pairs_of(tmp_path / "out", survey):
        for points in (source, target):
            assert (np.unique(time[points], return_counts=True)[1] == 2).mean() > 0.95
        densities.append([len(source) / 100, len(target) / 100])
    source, target = np.transpose(densities)
    assert len(source) == 36
    # On the half without the first pass, the target is a pass of 2.5.
    assert (target > 2).all() and (target <= 3).all() and (target == 3).sum() > 12
    assert source.min() > 0.5 and source.max() < 1.7 and np.ptp(source) > 0.3


def test_rounded_times_are_not_those_of_pulses(file, survey, tmp_path):
    rounded = laspy.read(file)
    rounded.gps_time = np.floor(survey.gps_time)
    rounded.write(file)
    words = (file, "--source-density", 1, "--validation", 0, "-o", tmp_path / "out")
    assert prepare(*words) == 0
    # Each tile is flown in half a second, so that by their times all points were of one pulse.
    for _, source, _ in pairs_of(tmp_path / "out", survey):
        assert len(source) == pytest.approx(100, rel=0.25)


def test_a_survey_without_two_passes_is_refused_with_what_is_missing(
    file, survey, tmp_path, capsys
):
    single = laspy.LasData(survey.header, survey.points[survey.point_source_id == 41])
    single.write(file)
    assert prepare(file, "-o", tmp_path / "out") == 1
    message = capsys.readouterr().err
    assert "flown.las: only one flight pass: gps_time has no pause of 3 s, and the point" in message
    np.savetxt(tmp_path / "a.xyz", survey.xyz[:1000])
    assert prepare(tmp_path / "a.xyz", "-o", tmp_path / "out") == 1
    assert "a.xyz: has neither gps_time nor point_source_id" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_platform_may_turn_while_it_records(tmp_path):
    xyz = np.random.default_rng(0).random((8000, 3)) * [30, 200, 3]
    las = laspy.LasData(laspy.LasHeader(version="1.4", point_format=6))
    las.header.scales = np.full(3, 1e-4)
    las.xyz = xyz
    is_back = np.arange(8000) % 2 == 1
    # There and back in 21 s, with a turn of 1 s at the far end.
    las.gps_time = np.where(is_back, 11 + (200 - xyz[:, 1]) / 20, xyz[:, 1] / 20)
    las.write(tmp_path / "a.las")
    assert prepare(tmp_path / "a.las", "--validation", 0, "-o", tmp_path / "out") == 0
    rows = [
        int(name.partition("-")[0].split("_")[2]) for name, *_ in pairs_of(tmp_path / "out", las)
    ]
    assert set(rows) == set(range(16)), "all blocks but the last, where no pause is seen"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--source-density", "60:6", "must be a number or LOW:HIGH"),
        ("--target-density", "0", "must be greater than 0"),
        ("--pairs-per-tile", "0", "must be at least 1"),
    ],
)
def test_impossible_options_are_refused(option, value, message, file, capsys):
    assert prepare(file, "-o", file.parent / "out", option, value) == 1
    assert message in capsys.readouterr().err
