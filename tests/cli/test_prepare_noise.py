"""`pointup prepare` leaves out noise, withheld points, and points that are not measured."""

from __future__ import annotations

from pathlib import Path

import laspy
import numpy as np
import pytest
from datasets import load_from_disk
from survey_files import write_las

from pointup.cli.main import main
from pointup.datasets import regions


def write_survey(path: Path, noise: slice) -> np.ndarray:
    """A survey of 3,000 points with noise far below: of class 7, of class 18 and withheld."""
    points = np.random.default_rng(0).random((3000, 3)) * [30, 30, 2]
    is_noise = np.zeros(3000, bool)
    is_noise[noise] = True
    points[is_noise, 2] -= 200
    kind = np.arange(3000) % 3
    classes = np.where(is_noise & (kind < 2), np.array([7, 18, 2])[kind], 2)
    withheld = is_noise & (kind == 2)
    write_las(path, points, offset=np.zeros(3), classification=classes, withheld=withheld)
    return is_noise


def prepare(*words: object) -> int:
    options = ("--tile", 15, "--min-points", 10, "--strip", 0, "--num-workers", 1)
    return main(["prepare", *(str(word) for word in (*words, *options))])


def heights(out: Path) -> np.ndarray:
    rows = [row for split in ("train", "validation") for row in load_from_disk(out)[split]]
    clouds = [np.reshape(row[side], (-1, 3)) for row in rows for side in ("source", "target")]
    origins = [row["origin"][2] for row in rows for _ in range(2)]
    return np.concatenate([c[:, 2] + z for c, z in zip(clouds, origins, strict=True)])


@pytest.mark.parametrize("large_bytes", [0, regions.LARGE_BYTES])
def test_noise_is_left_out_of_pairs_unless_it_is_asked_for(
    large_bytes, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(regions, "LARGE_BYTES", large_bytes)
    num_noise = write_survey(tmp_path / "a.las", slice(0, None, 10)).sum()
    assert prepare("thin", tmp_path / "a.las", "-o", tmp_path / "out") == 0
    # Thinning leaves out the points that the ratio has no room for.
    assert 0 <= 3000 - num_noise - len(heights(tmp_path / "out")) < 5
    assert heights(tmp_path / "out").min() > -1
    told = capsys.readouterr().err
    assert f"left out {num_noise} points: noise, withheld or synthetic" in told
    assert "upsampled" not in told
    words = ("thin", tmp_path / "a.las", "--include-noise", "-o", tmp_path / "all")
    assert prepare(*words) == 0
    assert 0 <= 3000 - len(heights(tmp_path / "all")) < 5
    assert (heights(tmp_path / "all") < -100).sum() == pytest.approx(num_noise, abs=5)


def test_a_file_of_noise_alone_is_reported(tmp_path, capsys):
    write_survey(tmp_path / "noise.las", slice(None))
    write_survey(tmp_path / "good.las", slice(0, 0))
    words = ("thin", tmp_path / "noise.las", tmp_path / "good.las", "-o", tmp_path / "out")
    assert prepare(*words) == 1
    assert "noise.las: all 3,000 points are noise, withheld or synthetic" in capsys.readouterr().err
    assert heights(tmp_path / "out").min() > -1


def test_new_points_of_an_upsampled_file_are_left_out_of_pairs(tmp_path, capsys):
    write_survey(tmp_path / "a.las", slice(0, 0))
    las = laspy.read(tmp_path / "a.las")
    las.synthetic = np.arange(3000) >= 1000
    las.z = np.where(np.arange(3000) >= 1000, 500.0, las.z)
    las.write(tmp_path / "a.las")
    assert prepare("thin", tmp_path / "a.las", "-o", tmp_path / "out") == 0
    assert heights(tmp_path / "out").max() < 3
    told = capsys.readouterr().err
    assert "left out 2,000 points: noise, withheld or synthetic" in told
    assert "fewer are left: is a survey one that was upsampled?" in told
    words = ("thin", tmp_path / "a.las", "--include-noise", "-o", tmp_path / "all")
    assert prepare(*words) == 0
    assert (heights(tmp_path / "all") > 400).mean() == pytest.approx(2 / 3, abs=0.01)
