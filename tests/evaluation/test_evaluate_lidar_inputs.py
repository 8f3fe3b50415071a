"""pointup evaluate lidar: what it says and does about inputs of other extents, kinds and sizes."""

from __future__ import annotations

from pathlib import Path

import laspy
import numpy as np
import pytest
from test_evaluate_command import evaluate, figures_of
from test_evaluate_command import surveys as surveys


def test_without_a_source_no_figure_is_called_one_of_new_points(
    surveys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--reference", surveys / "dense.xyz", "--prediction", surveys / "raised.xyz"
    out = surveys / "out.json"
    conventions = {}
    for source in ((), ("--source", surveys / "sparse.xyz")):
        assert not evaluate("lidar", *given, *source, "--json", out)
        metrics = figures_of(out)["metrics"]
        names = "beyond_0.5", "below_ground_points", "below_ground"
        conventions[bool(source)] = [metrics[name]["convention"] for name in names]
    assert all("new points" in text for text in conventions[True])
    assert not any("new" in text for text in conventions[False])
    assert conventions[False][0].endswith("of all points, because no source is given")


def test_a_source_far_larger_than_the_reference_is_upsampled_near_it_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    # A strip with one point on each metre, and a denser survey of its first 20 m.
    source = np.column_stack([np.sort(600 * rng.random(600)), rng.random((600, 2))])
    # It is narrower, so that it is the common extent.
    reference = rng.random((200, 3)) * [20, 0.8, 1] + [0, 0.1, 0]
    files = {"all": source, "cut": source[source[:, 0] < 84], "reference": reference}
    for name, points in files.items():
        np.savetxt(tmp_path / f"{name}.xyz", points, fmt="%.6f")
    rows, texts = {}, {}
    for name in ("all", "cut"):
        assert not evaluate(
            "lidar", "--reference", tmp_path / "reference.xyz", "--source",
            tmp_path / f"{name}.xyz", "--ratio", 3, "--json", tmp_path / "out.json",
        )  # fmt: skip
        rows[name] = figures_of(tmp_path / "out.json")["rows"]
        texts[name] = capsys.readouterr().out
    number = len(files["cut"])
    assert f"upsampled near the reference only, {number} of 600 points" in texts["all"]
    assert "near the reference only" not in texts["cut"]
    for name in ("midpoints", "jitter", "plane"):
        assert rows["all"][name] == pytest.approx(rows["cut"][name], rel=1e-6)


def test_new_points_of_an_upsampled_survey_are_not_thinned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    las = laspy.LasData(laspy.LasHeader(version="1.4", point_format=6))
    las.header.scales = np.full(3, 0.001)
    las.xyz = np.random.default_rng(0).random((1200, 3)) * [10, 10, 1]
    las.synthetic = np.arange(1200) >= 400
    las.write(tmp_path / "upsampled.las")
    given = "--thin", tmp_path / "upsampled.las", "--ratio", 3
    assert not evaluate("lidar", *given, "--json", tmp_path / "out.json")
    text = capsys.readouterr().out
    assert "upsampled.las: 800 points have the synthetic flag: they are not measured, le" in text
    # 100 of the 400 measured points are the source, and those beyond whole cells don't count.
    reference = figures_of(tmp_path / "out.json")["reference_figures"]["num_points"]
    assert 200 < reference <= 300


def test_a_survey_of_one_point_to_thin_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savetxt(tmp_path / "one.xyz", np.zeros((1, 3)))
    assert evaluate("lidar", "--thin", tmp_path / "one.xyz") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "one.xyz: 1 points thinned for a ratio of 4" in error
