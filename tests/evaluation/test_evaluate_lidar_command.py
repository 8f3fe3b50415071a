"""pointup evaluate lidar: a prediction, a model or a thinned survey against a reference."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import laspy
import numpy as np
import pytest
from matplotlib.image import imread
from survey_files import positions, write_las
from test_evaluate_command import chamfer_of, evaluate, figures_of
from test_evaluate_command import model as model
from test_evaluate_command import surveys as surveys
from viewer_files import scenes_of

from pointup import Upsampler, upsample
from pointup.cli.main import main
from pointup.evaluation.baselines import BASELINES, FITTED
from pointup.evaluation.lidar import read_survey, upsampled_surveys


def test_lidar_prints_prediction_baseline_and_source_against_the_reference(surveys, capsys):
    assert not evaluate(
        "lidar", "--reference", surveys / "dense.xyz", "--prediction", surveys / "raised.xyz",
        "--source", surveys / "sparse.xyz", "--json", surveys / "out.json",
        "--picture", surveys / "columns.png", "--markdown", surveys / "out.md",
    )  # fmt: skip
    text = capsys.readouterr().out
    # The first table has no title.
    assert "****" not in (surveys / "out.md").read_text()
    assert max(map(len, text.splitlines())) < 100 + 2 * len(str(surveys))
    content = figures_of(surveys / "out.json")
    assert list(content["rows"]) == ["prediction", "midpoints", *BASELINES, *FITTED, "source"]
    prediction, midpoints, *baselines, jitter, plane, source = content["rows"].values()
    for baseline in (*baselines, jitter, plane):
        assert baseline["num_points"] == pytest.approx(prediction["num_points"], rel=0.05)
    assert "unit: unknown, no file names a coordinate system" in text
    best = min(row["chamfer"] for row in (midpoints, *baselines))
    assert f"Chamfer of the prediction: {prediction['chamfer'] / best:.1%} of the best" in text
    fit = min(row["chamfer"] for row in (jitter, plane))
    assert f"{prediction['chamfer'] / fit:.1%} of that of the best with noise fitted" in text
    # The lowest points are raised so much that a remark names them.
    (remark,) = content["remarks"]
    assert f"RMSE, 7 x 7 {prediction['ground_rmse']:.4f} unit, not 0" in remark
    assert remark in " ".join(text.split())
    assert prediction["canopy_rmse"] == pytest.approx(0.2)
    assert prediction["density"] == pytest.approx(4 * source["density"], rel=0.1)
    assert midpoints["num_points"] == pytest.approx(prediction["num_points"], rel=0.05)
    # The source is part of the reference, but not all of it.
    assert source["to_reference"] == 0 < source["from_reference"]
    shown = {name for row in content["rows"].values() for name in row}
    for name in shown:
        assert content["metrics"][name]["convention"] in " ".join(text.split())
    # Four columns: source, midpoint baseline, prediction, reference.
    assert imread(surveys / "columns.png").shape[1] == 16 + 4 * 408


def test_the_uncertainty_of_new_points_alone_is_judged_with_the_source_only(surveys, capsys):
    new = np.loadtxt(surveys / "raised.xyz")
    np.savez(surveys / "new.npz", positions=new, uncertainty=np.full(len(new), 0.3, np.float32))
    ends = "--reference", surveys / "dense.xyz", "--prediction", surveys / "new.npz"
    for source, is_judged in ((("--source", surveys / "sparse.xyz"), True), ((), False)):
        assert not evaluate("lidar", *ends, *source)
        assert ("of the new points are within it" in capsys.readouterr().out) == is_judged


def test_a_second_survey_is_measured_and_the_gap_to_it_is_printed(surveys, capsys):
    dense = np.loadtxt(surveys / "dense.xyz")
    np.savetxt(surveys / "second.xyz", dense + np.array([0, 0, 0.02]))
    assert not evaluate(
        "lidar", "--reference", surveys / "dense.xyz", "--prediction", surveys / "raised.xyz",
        "--source", surveys / "sparse.xyz", "--second", surveys / "second.xyz",
        "--json", surveys / "out.json",
    )  # fmt: skip
    rows = figures_of(surveys / "out.json")["rows"]
    assert list(rows)[-1] == "resampled"
    assert rows["resampled"]["canopy_bias"] == pytest.approx(0.02)
    best = min(rows[name]["chamfer"] for name in ("midpoints", *BASELINES))
    gap = (best - rows["prediction"]["chamfer"]) / (best - rows["resampled"]["chamfer"])
    assert f"the prediction closes {gap:.0%} of the gap" in capsys.readouterr().out


def test_a_prediction_or_a_second_survey_of_a_part_of_the_area_is_named(surveys, capsys):
    given = ["--reference", surveys / "dense.xyz", "--source", surveys / "sparse.xyz"]
    for option, name in (("--prediction", "prediction"), ("--second", "second survey")):
        assert not evaluate("lidar", *given, option, surveys / "half.xyz")
        assert re.search(rf"the {name} covers [45]\d% of the common", capsys.readouterr().out)
        assert not evaluate("lidar", *given, option, surveys / "dense.xyz")
        assert "of the common extent, and" not in capsys.readouterr().out


def test_cells_wider_than_the_common_ground_are_named(surveys, capsys):
    given = ["--reference", surveys / "dense.xyz", "--prediction", surveys / "half.xyz"]
    width = min(np.ptp(np.loadtxt(surveys / "half.xyz")[:, :2], axis=0))
    for cell in (1.1 * width, 0.9 * width):
        assert not evaluate("lidar", *given, "--cell", cell)
        is_named = "wider than the common ground, densities are too low" in capsys.readouterr().out
        assert is_named == (cell > width)


def test_baselines_cover_the_source_at_the_ratio_of_a_prediction_of_a_part(surveys):
    counts = {}
    for name in ("half", "dense"):
        assert not evaluate(
            "lidar", "--reference", surveys / f"{name}.xyz", "--source", surveys / "sparse.xyz",
            "--prediction", surveys / f"{name}.xyz", "--json", surveys / "out.json",
        )  # fmt: skip
        rows = figures_of(surveys / "out.json")["rows"]
        for row in ("midpoints", *BASELINES):
            assert rows[row]["num_points"] == pytest.approx(
                rows["prediction"]["num_points"], rel=0.1
            )
            counts[name, row] = rows[row]["density"]
    for row in ("midpoints", *BASELINES):
        assert counts["half", row] == pytest.approx(counts["dense", row], rel=0.1)


def test_errors_are_shown_where_both_surveys_are(surveys):
    highs = {}
    for name in ("half", "dense"):
        assert not evaluate(
            "lidar", "--reference", surveys / f"{name}.xyz", "--source", surveys / "sparse.xyz",
            "--view", surveys / "page.html",
        )  # fmt: skip
        (scene,) = scenes_of(surveys / "page.html")
        highs[name] = scene["channels"]["error"]["high"]
    assert highs["half"] < 2 * highs["dense"]


def test_a_thinned_survey_says_how_many_copies_of_points_were_left_out(surveys, capsys):
    np.savetxt(surveys / "twice.xyz", np.tile(np.loadtxt(surveys / "dense.xyz"), (2, 1)))
    num_points = len(np.loadtxt(surveys / "dense.xyz"))
    copies = f"{num_points:,} points left out: where another one is"
    for name, is_said in (("twice", True), ("dense", False)):
        assert not evaluate("lidar", "--thin", surveys / f"{name}.xyz", "--ratio", 3)
        assert (copies in capsys.readouterr().out) == is_said


def test_a_survey_compared_with_itself_has_figures_and_no_shares(surveys, capsys):
    same = surveys / "dense.xyz"
    assert not evaluate("lidar", "--reference", same, "--source", same, "--prediction", same)
    text = capsys.readouterr().out
    assert "Chamfer" in text and "of the best baseline's" not in text


def test_the_midpoints_of_a_survey_have_the_densities_of_their_source(surveys):
    rng = np.random.default_rng(0)
    points = np.column_stack([20 * rng.random((1600, 2)), np.zeros(1600)]).round(6)
    # Four times as dense on the left.
    points = points[(points[:, 0] < 10) | (rng.random(1600) < 0.25)]
    path = surveys / "two_densities.xyz"
    np.savetxt(path, points, fmt="%.6f")
    assert not evaluate(
        "lidar", "--reference", path, "--source", path,
        "--ratio", 4, "--json", surveys / "out.json",
    )  # fmt: skip
    given = figures_of(surveys / "out.json")["rows"]["midpoints"]["chamfer"]

    def chamfer(exponent: float) -> float:
        made = upsample(points, 4.0, model=Upsampler(density_exponent=exponent), above_ground=True)
        return chamfer_of(made, points, points)

    assert given == pytest.approx(chamfer(0.0), rel=1e-6)
    assert given != pytest.approx(chamfer(0.7), rel=1e-3)


def test_lidar_upsamples_the_source_with_a_model(surveys, model):
    for target, ratio in ((["--ratio", 2], 2), ([], 4)):
        assert not evaluate(
            "lidar", "--reference", surveys / "dense.xyz", "--source", surveys / "sparse.xyz",
            "--model", model, *target, "--json", surveys / "out.json",
        )  # fmt: skip
        rows = figures_of(surveys / "out.json")["rows"]
        assert list(rows) == ["model", "midpoints", *BASELINES, *FITTED, "source"]
        for row in ("model", "midpoints", *BASELINES):
            density = ratio * rows["source"]["density"]
            assert rows[row]["density"] == pytest.approx(density, rel=0.1)
    assert rows["model"]["to_reference"] != rows["midpoints"]["to_reference"]


def test_the_figures_name_the_ratio_or_the_density_that_was_asked_for(surveys):
    for words, ratio, density in ((["--ratio", 2], 2, None), (["--density", 9], None, 9)):
        assert not evaluate(
            "lidar", "--reference", surveys / "dense.xyz", "--source", surveys / "sparse.xyz",
            *words, "--json", surveys / "out.json",
        )  # fmt: skip
        content = figures_of(surveys / "out.json")
        assert (content["ratio"], content["density"]) == (ratio, density)


def test_a_source_that_is_denser_than_the_reference_is_named(surveys, capsys):
    exchanged = ["--reference", surveys / "sparse.xyz", "--source", surveys / "dense.xyz"]
    for words, is_named in (([], True), (["--density", 9], False)):
        assert not evaluate("lidar", *exchanged, *words)
        text = capsys.readouterr().out
        assert ("the source is denser than the reference, so that no" in text) == is_named


def test_figures_are_in_feet_where_the_files_are(surveys, capsys):
    for name in ("dense", "raised"):
        points = np.loadtxt(surveys / f"{name}.xyz") / 0.3048
        np.savetxt(surveys / f"{name}_feet.xyz", points, fmt="%.6f")
    contents = []
    for suffix, unit in (("", 1), ("_feet", 0.3048)):
        assert not evaluate(
            "lidar", "--reference", surveys / f"dense{suffix}.xyz", "--prediction",
            surveys / f"raised{suffix}.xyz", "--metres-per-unit", unit,
            "--json", surveys / "out.json",
        )  # fmt: skip
        contents.append(figures_of(surveys / "out.json"))
    metres, feet = (content["rows"]["prediction"] for content in contents)
    assert [content["unit"] for content in contents] == ["m", "ft"]
    assert contents[1]["metrics"]["chamfer"]["unit"] == "ft"
    assert feet["chamfer"] * 0.3048 == pytest.approx(metres["chamfer"], rel=1e-4)
    assert feet["density"] == pytest.approx(0.3048**2 * metres["density"], rel=1e-2)
    assert feet["f_score_0.5"] == pytest.approx(metres["f_score_0.5"], abs=0.2)
    assert "F-score at 0.5 m (1.64 ft)" in capsys.readouterr().out


def test_a_thinned_survey_is_measured_against_its_other_points(surveys, model, capsys):
    def figures(seed: int) -> dict[str, Any]:
        path = surveys / "out.json"
        assert not evaluate(
            "lidar", "--thin", surveys / "dense.xyz", "--ratio", 3, "--model", model,
            "--seed", seed, "--json", path,
        )  # fmt: skip
        return figures_of(path)

    content = figures(0)
    assert "against the points left out of the source of" in capsys.readouterr().out
    rows = content["rows"]
    assert list(rows) == ["model", "midpoints", *BASELINES, *FITTED, "source"]
    # A fourth of the points is the source, the others are the reference, and none is in both.
    reference = content["reference_figures"]["num_points"]
    assert reference == pytest.approx(3 * rows["source"]["num_points"], rel=0.05)
    assert rows["source"]["to_reference"] > 0.05
    assert rows["model"]["num_points"] == pytest.approx(reference, rel=0.05)
    assert figures(0)["rows"] == rows
    assert figures(1)["rows"]["jitter"] != rows["jitter"]


def test_units_and_classes_come_from_las_files_and_noise_is_left_out(surveys, capsys):
    points = np.loadtxt(surveys / "dense.xyz")
    classes = np.where(points[:, 2] < 101, 2, 5)
    noisy = np.concatenate([points, [[points[0, 0], points[0, 1], 900.0]]])
    # NAD83 / Oregon GIC Lambert, in feet.
    write_las(surveys / "dense.las", noisy, classification=np.append(classes, 18), system=2994)
    write_las(surveys / "sparse.las", points[::4], classification=classes[::4], system=2994)
    given = ["--reference", surveys / "dense.las", "--source", surveys / "sparse.las"]
    assert not evaluate("lidar", *given, "--json", surveys / "out.json")
    content, text = figures_of(surveys / "out.json"), capsys.readouterr().out
    assert content["unit"] == "ft" and "unit: ft" in text
    assert "1 points left out: noise" in text
    assert content["ground"] == "the reference's points of classes 2 and 9, triangulated"
    assert content["rows"]["source"]["hausdorff"] < 10
    write_las(surveys / "sparse.las", points[::4], classification=classes[::4], system=32618)
    assert evaluate("lidar", *given) == 1
    assert "sparse.las: is in m, " in capsys.readouterr().err
    metres = [*given[:2], "--second", surveys / "sparse.las", "--prediction", surveys / "dense.las"]
    assert evaluate("lidar", *metres) == 1
    assert "sparse.las: is in m, " in capsys.readouterr().err
    write_las(surveys / "sparse.las", points[::4], classification=classes[::4], system=4326)
    assert evaluate("lidar", *given) == 1
    assert "its coordinates are in degrees" in capsys.readouterr().err


def test_the_cloud_that_is_measured_is_the_file_that_pointup_upsample_writes(tmp_path, model):
    # A roof without a class hides the ground. That it is no crown is known from its pulses: each
    # has one return, as elsewhere some have two.
    rng = np.random.default_rng(5)
    xy = rng.random((900, 2)) * 20
    is_hidden = np.abs(xy - 10).max(axis=1) < 3
    z = np.where(is_hidden, rng.uniform(6, 9, 900), 0.05 * rng.random(900))
    write_las(
        tmp_path / "in.las",
        np.concatenate([np.column_stack([xy, z]), [[3, 3, 90.0]]]),
        classification=[*np.where(is_hidden, 1, 2), 7],
        number_of_returns=[*np.where(xy[:, 0] < 1, 2, 1), 1],
        return_number=np.ones(901, np.uint8),
        offset=(0, 0, 0),
    )
    words = "--ratio", "2.5", "--model", str(model), "-o", str(tmp_path / "out.las")
    assert main(["upsample", str(tmp_path / "in.las"), *words]) == 0
    written = laspy.read(tmp_path / "out.las")
    survey = read_survey(tmp_path / "in.las", [])
    upsampler = Upsampler.from_pretrained(model).eval()
    measured = upsampled_surveys(survey, 2.5, upsampler=upsampler)["model"]
    np.testing.assert_allclose(
        written.xyz[np.asarray(written.classification) != 7], measured, atol=0.00051
    )
    classes = replace(survey, attributes={"classification": survey.attributes["classification"]})
    without_returns = upsampled_surveys(classes, 2.5, upsampler=upsampler)["model"]
    below = [
        int(((np.abs(points[:, :2] - 10).max(axis=1) < 2) & (points[:, 2] < 1)).sum())
        for points in (measured, without_returns)
    ]
    assert below[0] == 0 < below[1]


def test_a_given_unit_replaces_that_of_the_files(tmp_path, capsys):
    for seed, name in enumerate(("a.las", "b.las")):
        points = positions(2000, seed)
        write_las(tmp_path / name, points, scale=0.01, system="EPSG:26915+6360")
    files = "--reference", tmp_path / "a.las", "--prediction", tmp_path / "b.las"
    words = ["evaluate", "lidar", *map(str, files)]
    assert main(words) == 1
    assert "mixed units" in capsys.readouterr().err
    assert main([*words, "--metres-per-unit", "1"]) == 0


def test_without_a_source_no_figure_is_called_one_of_new_points(surveys, capsys):
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


def test_a_source_far_larger_than_the_reference_is_upsampled_near_it_only(tmp_path, capsys):
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
