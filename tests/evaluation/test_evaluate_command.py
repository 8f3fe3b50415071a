"""`pointup evaluate` through the command line: its output and its errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import laspy
import numpy as np
import pyproj
import pytest
import torch

from pointup import Upsampler, upsample
from pointup.cli.main import main
from pointup.evaluation.baselines import BASELINES
from pointup.evaluation.common_extent import common_extent
from pointup.evaluation.ground import find_ground
from pointup.evaluation.lidar import SurveyReference
from pointup.evaluation.shapes import Shape, measure_shape
from pointup.io.files import read_points

TETRAHEDRON = "OFF\n4 4 0\n0 0 0\n1 0 0\n0 1 0\n0 0 1\n3 0 2 1\n3 0 1 3\n3 0 3 2\n3 1 2 3\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with offsets that are not zero; an untrained one gives the midpoints."""
    torch.manual_seed(0)
    upsampler = Upsampler(feature_dim=8, heads=2, child_heads=2, position_hidden=4, k=6)
    with torch.no_grad():
        for parameter in upsampler.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    directory = tmp_path_factory.mktemp("model")
    upsampler.save_pretrained(directory)
    return directory


@pytest.fixture
def meshes(tmp_path: Path) -> Path:
    folder = tmp_path / "meshes"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.off").write_text(TETRAHEDRON)
    return folder


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """Folders `truth`, `inputs` and `predictions` of two shapes; the predictions are the truth."""
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        truth = rng.normal(size=(80, 3))
        truth /= np.linalg.norm(truth, axis=1, keepdims=True)
        for folder, points in (("truth", truth), ("inputs", truth[::4]), ("predictions", truth)):
            (tmp_path / folder).mkdir(exist_ok=True)
            np.savetxt(tmp_path / folder / f"{name}.xyz", points)
    return tmp_path


@pytest.fixture
def surveys(tmp_path: Path) -> Path:
    """`dense.xyz`, `sparse.xyz` (every fourth point of it) and `raised.xyz` (0.2 m higher)."""
    rng = np.random.default_rng(1)
    dense = rng.uniform(0, [12, 8, 3], (1600, 3)) + np.array([5e5, 4e6, 100])
    np.savetxt(tmp_path / "dense.xyz", dense, fmt="%.3f")
    np.savetxt(tmp_path / "sparse.xyz", dense[::4], fmt="%.3f")
    np.savetxt(tmp_path / "raised.xyz", dense + np.array([0, 0, 0.2]), fmt="%.3f")
    return tmp_path


def chamfer_of(made: np.ndarray, source: np.ndarray, reference: np.ndarray) -> float:
    extent = common_extent({"source": source, "reference": reference})
    against = SurveyReference(reference, extent, find_ground(reference, extent), source)
    return against.measure(made)["chamfer"]


def evaluate(*arguments: str | Path) -> int:
    return main(["evaluate", *map(str, arguments)])


def figures_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_shapes_drawn_from_meshes_are_reported_in_three_forms(
    meshes: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_path, markdown_path = tmp_path / "out.json", tmp_path / "out.md"
    assert not evaluate(
        "shapes", "--meshes", meshes, "--model", model, "--num-source", 60, "--seeds", 2,
        "--json", json_path, "--markdown", markdown_path,
    )  # fmt: skip
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) < 100 + len(str(meshes))
    for words in ("2 shapes, sampled 2 times", "60 points to 240: 4x", "protocol pu-gcn"):
        assert words in text
    content = figures_of(json_path)
    assert list(content["means"]) == ["model", "midpoints", "resampled"]
    assert [(s["name"], s["seed"]) for s in content["shapes"]] == [
        ("one", 0), ("one", 1), ("two", 0), ("two", 1),
    ]  # fmt: skip
    for row, figures in content["means"].items():
        for name, mean in figures.items():
            each = [shape["rows"][row][name] for shape in content["shapes"]]
            assert mean == pytest.approx(np.mean(each))
            # Every printed figure has its convention.
            assert content["metrics"][name]["convention"] in " ".join(text.split())
    assert content["means"]["model"]["cd"] != content["means"]["midpoints"]["cd"]
    cells = [line.split(" | ") for line in markdown_path.read_text().splitlines() if "|" in line]
    (row,) = [line for line in cells if line[0].startswith("| midpoints")]
    assert float(row[1]) == pytest.approx(content["means"]["midpoints"]["cd"], abs=5e-4)


def test_shapes_and_surveys_are_upsampled_with_the_requested_oversampling(
    shapes: Path, surveys: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = "shapes", "--truth", shapes / "truth", "--inputs", shapes / "inputs"
    survey = "lidar", "--reference", surveys / "dense.xyz", "--source", surveys / "sparse.xyz"
    path, upsampler = surveys / "out.json", Upsampler.from_pretrained(model)
    for oversampling in (1, 2):
        options = ["--model", model, "--oversampling", oversampling, "--json", path]
        assert not evaluate(*stored, *options)
        figures = figures_of(path)["shapes"][0]["rows"]["model"]
        points, truth = (np.loadtxt(shapes / name / "one.xyz") for name in ("inputs", "truth"))
        ratio = len(truth) / len(points)
        made = upsample(points, ratio, model=upsampler, oversampling=oversampling)
        expected = measure_shape(made, Shape("one", truth), "pu-gcn")
        assert figures["cd"] == pytest.approx(expected["cd"], rel=1e-5)
        assert not evaluate(*survey, "--ratio", 3, *options)
        points, dense = (np.loadtxt(surveys / f"{name}.xyz") for name in ("sparse", "dense"))
        made = upsample(points, 3, model=upsampler, above_ground=True, oversampling=oversampling)
        chamfer = figures_of(path)["rows"]["model"]["chamfer"]
        assert chamfer == pytest.approx(chamfer_of(made, points, dense), rel=1e-5)
        text = f"oversampling {oversampling}"
        assert capsys.readouterr().out.count(text) == (2 if oversampling > 1 else 0)


def test_16x_passes_and_both_protocols_are_reported(
    meshes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cds = []
    for protocol in ("pu-gcn", "half"):
        path = tmp_path / f"{protocol}.json"
        assert not evaluate(
            "shapes", "--meshes", meshes, "--num-source", 20, "--ratio", 16,
            "--protocol", protocol, "--json", path,
        )  # fmt: skip
        assert "20 points to 320: 16x in 2 passes" in capsys.readouterr().out
        cds.append(figures_of(path)["means"]["resampled"]["cd"])
    assert cds[0] == pytest.approx(2 * cds[1])


def test_predictions_of_other_programs_are_scored(
    shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not evaluate(
        "shapes", "--truth", shapes / "truth", "--predictions", shapes / "predictions",
        "--inputs", shapes / "inputs", "--json", shapes / "out.json",
    )  # fmt: skip
    means = figures_of(shapes / "out.json")["means"]
    assert list(means) == ["prediction", "midpoints"]
    assert means["prediction"]["cd"] == means["prediction"]["hausdorff"] == 0
    assert means["midpoints"]["cd"] > 0
    assert "p2f" not in means["midpoints"]
    assert "P2F" not in capsys.readouterr().out


def test_lidar_prints_prediction_baseline_and_source_against_the_reference(
    surveys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not evaluate(
        "lidar", "--reference", surveys / "dense.xyz", "--prediction", surveys / "raised.xyz",
        "--source", surveys / "sparse.xyz", "--json", surveys / "out.json",
        "--picture", surveys / "density.png",
    )  # fmt: skip
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) < 100 + 2 * len(str(surveys))
    content = figures_of(surveys / "out.json")
    assert list(content["rows"]) == ["prediction", "midpoints", *BASELINES, "source"]
    prediction, midpoints, *baselines, source = content["rows"].values()
    for baseline in baselines:
        assert baseline["num_points"] == pytest.approx(prediction["num_points"], rel=0.05)
    assert "unit: unknown, no file names a coordinate system" in text
    best = min(row["chamfer"] for row in (midpoints, *baselines))
    assert f"Chamfer of the prediction: {prediction['chamfer'] / best:.1%} of the best" in text
    # The lowest points are raised so much that a remark names them.
    (remark,) = content["remarks"]
    assert f"ground height RMSE {prediction['ground_rmse']:.4f} unit, not 0" in remark
    assert remark in " ".join(text.split())
    assert prediction["canopy_rmse"] == pytest.approx(0.2)
    assert prediction["density"] == pytest.approx(4 * source["density"], rel=0.1)
    assert midpoints["num_points"] == pytest.approx(prediction["num_points"], rel=0.05)
    # The source is part of the reference, but not all of it.
    assert source["to_reference"] == 0 < source["from_reference"]
    shown = {name for row in content["rows"].values() for name in row}
    for name in shown:
        assert content["metrics"][name]["convention"] in " ".join(text.split())
    assert (surveys / "density.png").stat().st_size > 1000


def test_a_second_survey_is_measured_and_the_gap_to_it_is_printed(
    surveys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_the_midpoints_of_a_survey_have_the_densities_of_their_source(surveys: Path) -> None:
    rng = np.random.default_rng(0)
    points = np.column_stack([20 * rng.random((4000, 2)), np.zeros(4000)]).round(6)
    # Four times as dense on the left.
    points = points[(points[:, 0] < 10) | (rng.random(4000) < 0.25)]
    path = surveys / "two_densities.xyz"
    np.savetxt(path, points, fmt="%.6f")
    assert not evaluate(
        "lidar", "--reference", path, "--source", path,
        "--ratio", 4, "--json", surveys / "out.json",
    )  # fmt: skip
    given = figures_of(surveys / "out.json")["rows"]["midpoints"]["chamfer"]

    def chamfer(exponent: float) -> float:
        made = upsample(points, 4.0, model=Upsampler(density_exponent=exponent))
        return chamfer_of(made, points, points)

    assert given == pytest.approx(chamfer(0.0), rel=1e-6)
    assert given != pytest.approx(chamfer(0.7), rel=1e-3)


def test_lidar_upsamples_the_source_with_a_model(surveys: Path, model: Path) -> None:
    for target, ratio in ((["--ratio", 2], 2), ([], 4)):
        assert not evaluate(
            "lidar", "--reference", surveys / "dense.xyz", "--source", surveys / "sparse.xyz",
            "--model", model, *target, "--json", surveys / "out.json",
        )  # fmt: skip
        rows = figures_of(surveys / "out.json")["rows"]
        assert list(rows) == ["model", "midpoints", *BASELINES, "source"]
        for row in ("model", "midpoints", *BASELINES):
            density = ratio * rows["source"]["density"]
            assert rows[row]["density"] == pytest.approx(density, rel=0.1)
    assert rows["model"]["to_reference"] != rows["midpoints"]["to_reference"]


def test_figures_are_in_feet_where_the_files_are(
    surveys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_thinned_survey_is_measured_against_its_other_points(
    surveys: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert list(rows) == ["model", "midpoints", *BASELINES, "source"]
    # A fourth of the points is the source, the others are the reference, and none is in both.
    reference = content["reference_figures"]["num_points"]
    assert reference == pytest.approx(3 * rows["source"]["num_points"], rel=0.05)
    assert rows["source"]["to_reference"] > 0.05
    assert rows["model"]["num_points"] == pytest.approx(reference, rel=0.05)
    assert figures(0)["rows"] == rows
    assert figures(1)["rows"]["jitter"] != rows["jitter"]


def write_las(path: Path, points: np.ndarray, classes: np.ndarray, epsg: int | None) -> None:
    header = laspy.LasHeader(point_format=6, version="1.4")
    header.scales, header.offsets = np.full(3, 0.001), np.floor(points.min(axis=0))
    if epsg:
        header.add_crs(pyproj.CRS.from_epsg(epsg))
    las = laspy.LasData(header)
    las.x, las.y, las.z = points.T
    las.classification = classes
    las.write(path)


def test_units_and_classes_come_from_las_files_and_noise_is_left_out(
    surveys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = np.loadtxt(surveys / "dense.xyz")
    classes = np.where(points[:, 2] < 101, 2, 5)
    noisy = np.concatenate([points, [[points[0, 0], points[0, 1], 900.0]]])
    # NAD83 / Oregon GIC Lambert, in feet.
    write_las(surveys / "dense.las", noisy, np.append(classes, 18), 2994)
    write_las(surveys / "sparse.las", points[::4], classes[::4], 2994)
    given = ["--reference", surveys / "dense.las", "--source", surveys / "sparse.las"]
    assert not evaluate("lidar", *given, "--json", surveys / "out.json")
    content, text = figures_of(surveys / "out.json"), capsys.readouterr().out
    assert content["unit"] == "ft" and "unit: ft" in text
    assert "1 points left out: noise" in text
    assert content["ground"] == "the reference's points of classes 2 and 9, triangulated"
    assert content["rows"]["source"]["hausdorff"] < 10
    write_las(surveys / "sparse.las", points[::4], classes[::4], 32618)
    assert evaluate("lidar", *given) == 1
    assert "sparse.las: is in m, " in capsys.readouterr().err
    write_las(surveys / "sparse.las", points[::4], classes[::4], 4326)
    assert evaluate("lidar", *given) == 1
    assert "its coordinates are in degrees" in capsys.readouterr().err


def test_a_survey_is_measured_as_pointup_upsample_writes_it(surveys: Path, model: Path) -> None:
    points = np.loadtxt(surveys / "dense.xyz")
    classes = np.where(points[:, 2] < 101, 2, 5)
    write_las(surveys / "dense.las", points, classes, None)
    write_las(surveys / "sparse.las", points[::4], classes[::4], None)
    assert not evaluate(
        "lidar", "--reference", surveys / "dense.las", "--source", surveys / "sparse.las",
        "--ratio", "3", "--model", model, "--json", surveys / "out.json",
    )  # fmt: skip
    found = figures_of(surveys / "out.json")["rows"]["model"]["chamfer"]
    # By default, surveys have heights.
    by_default = upsample(read_points(surveys / "sparse.las"), 3.0, model=model).positions
    without = upsample(points[::4], 3.0, model=model)
    source, reference = (read_points(surveys / f"{n}.las").positions for n in ("sparse", "dense"))
    figures = [chamfer_of(made, source, reference) for made in (by_default, without)]
    assert found == pytest.approx(figures[0], rel=1e-6)
    assert found != pytest.approx(figures[1], rel=1e-4)


def test_pairs_have_the_figures_that_training_validates_on(
    pair_directory: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate import Accelerator

    from pointup.evaluation.cloud_metrics import mean_rows
    from pointup.training.config import TrainConfig
    from pointup.training.datasets import open_training_data
    from pointup.training.evaluation import Evaluation

    path = tmp_path / "out.json"
    assert not evaluate("pairs", pair_directory, "--model", model, "--json", path)
    assert "validation pairs of" in capsys.readouterr().out
    content = figures_of(path)
    upsampler = Upsampler.from_pretrained(model).eval()
    config = TrainConfig(data=str(pair_directory), model=upsampler.config, num_pictures=0)
    accelerator = Accelerator(cpu=True)
    data = open_training_data(config, accelerator)
    evaluation = Evaluation(data, accelerator, config, token_budget=1000)
    records = [r for batch in evaluation.batches for r in evaluation.records_of(batch, upsampler)]
    means = mean_rows([r["rows"] for r in records])
    assert list(content["means"]) == ["model", "midpoints", *BASELINES, "source", "resampled"]
    for row, figures in means.items():
        found = {name: content["means"][row][name] for name in figures}
        assert found == pytest.approx(figures, rel=1e-5)
    rows = [r["rows"] for r in records]
    shares = [one["model"]["chamfer"] / one["midpoints"]["chamfer"] for one in rows]
    assert content["mean_chamfer_share_of_midpoints"] == pytest.approx(np.mean(shares), rel=1e-5)
    assert len(content["pairs"]) == 6


def test_the_headline_of_pairs_and_their_table_are_the_same_mean(
    pair_directory: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    assert not evaluate("pairs", pair_directory, "--model", model, "--json", path)
    text, content = capsys.readouterr().out, figures_of(path)
    head = text.index("mean of 6 pairs")
    columns = ["model", "midpoints", "random midpoints", "jitter", "plane", "source", "resampled"]
    (printed,) = [line for line in text[head:].splitlines() if line.startswith("Chamfer  ")]
    values = dict(zip(columns, map(float, printed.split()[1:8]), strict=True))
    baselines = {name: values[name] for name in columns[1:5]}
    best = min(baselines, key=lambda name: baselines[name])
    (headline,) = [
        line for line in text[:head].splitlines() if line.startswith("Chamfer of the model:")
    ]
    share = float(headline.split(":")[1].split("%")[0])
    assert share == pytest.approx(100 * values["model"] / values[best], abs=0.2)
    assert f"({best})" in headline
    for name, value in values.items():
        row = content["means"][name.replace(" ", "_")]
        assert value == pytest.approx(row["chamfer"], rel=1e-3)
        each = [pair["rows"][name.replace(" ", "_")]["chamfer"] for pair in content["pairs"]]
        assert row["chamfer"] == pytest.approx(np.mean(each))


def test_pairs_with_z_up_have_the_figures_of_surveys_and_shapes_have_not(tmp_path: Path) -> None:
    from conftest import wavy_pair

    from pointup.datasets.pair_writer import write_pairs

    rng = np.random.default_rng(0)
    sheets = [wavy_pair(f"sheet_{i}", 60, 3, rng) for i in range(3)]
    for sheet in sheets:
        for points in (sheet.source, sheet.target, sheet.resample):
            points *= 5
    sheets[2].vertical = False
    write_pairs(sheets[:1], sheets, tmp_path / "pairs", info={"recipe": 1})
    path = tmp_path / "out.json"
    assert not evaluate("pairs", tmp_path / "pairs", "--json", path)
    content = figures_of(path)
    assert content["unit"] == content["metrics"]["chamfer"]["unit"] == "m"
    for sheet, pair in zip(sheets, content["pairs"], strict=True):
        figures = pair["rows"]["resampled"]
        assert ("beyond_0.5" in figures) == ("f_score_0.25" in figures) == sheet.vertical
        if not sheet.vertical:
            continue
        distance = np.linalg.norm(sheet.resample[:, None] - sheet.target[None], axis=2)
        forward, backward = distance.min(axis=1), distance.min(axis=0)
        precision, recall = (forward <= 0.25).mean(), (backward <= 0.25).mean()
        f_score = 200 * precision * recall / (precision + recall)
        assert figures["f_score_0.25"] == pytest.approx(f_score)
        assert figures["beyond_0.5"] == pytest.approx(100 * (forward > 0.5).mean())
        assert figures["to_reference"] + figures["from_reference"] == pytest.approx(
            figures["chamfer"], rel=1e-5
        )


def test_pairs_are_measured_as_pointup_upsample_writes_them(model: Path, tmp_path: Path) -> None:
    from conftest import wavy_pair

    from pointup.datasets.pair_dataset import open_pairs, read_pair
    from pointup.datasets.pair_writer import write_pairs

    rng = np.random.default_rng(0)
    made = [wavy_pair(f"sheet_{i}", 200, 3, rng) for i in range(2)]
    for pair in made:
        pair.source[:, 2] = rng.random(len(pair.source))
    # Z is up in one of them.
    made[1].vertical = False
    write_pairs(made[:1], made, tmp_path / "pairs", info={"recipe": 1})
    path = tmp_path / "out.json"
    assert not evaluate(
        "pairs", tmp_path / "pairs", "--model", model, "--as-written", "--ratio", 3, "--json", path
    )
    for number, found in enumerate(figures_of(path)["pairs"]):
        pair = read_pair(open_pairs(tmp_path / "pairs", "validation"), number)
        assert found["name"] == pair.name and pair.vertical == (number == 0)
        expected = []
        for above_ground in (pair.vertical, not pair.vertical):
            cloud = upsample(
                pair.source.astype(np.float64), 3.0, model=model, above_ground=above_ground
            )
            distance = np.linalg.norm(cloud[:, None] - pair.target[None], axis=2)
            expected.append(distance.min(axis=0).mean() + distance.min(axis=1).mean())
        assert found["rows"]["model"]["chamfer"] == pytest.approx(expected[0], rel=1e-5)
        assert expected[1] != pytest.approx(expected[0], rel=1e-4)


def test_pairs_don_t_depend_on_the_token_budget(
    pair_directory: Path, model: Path, tmp_path: Path
) -> None:
    means = []
    for budget in (1, 24576):
        path = tmp_path / f"{budget}.json"
        assert not evaluate(
            "pairs", pair_directory, "--model", model, "--token-budget", budget, "--json", path
        )
        means.append(figures_of(path)["means"]["model"])
    assert means[0] == pytest.approx(means[1], rel=1e-4)


WRONG = [
    (["shapes"], "give --truth"),
    (["shapes", "--truth", "truth"], "--truth needs --inputs or --predictions"),
    (["shapes", "--inputs", "inputs"], "need --truth"),
    (["shapes", "--meshes", "inputs"], "inputs: no files of shapes in it"),
    (["shapes", "--truth", "truth", "--inputs", "gone"], "gone: no such folder"),
    (["shapes", "--truth", "truth", "--inputs", "inputs", "--ratio", 2], "--ratio"),
    (["shapes", "--truth", "truth", "--inputs", "broken"], "broken/one.xyz: "),
    (["shapes", "--truth", "inputs", "--inputs", "truth"], "are the folders swapped?"),
    (["shapes", "--truth", "truth", "--inputs", "inputs", "--model", "truth"], "truth: neither"),
    (["shapes", "--truth", "truth", "--predictions", "truth", "--model", "m"], "needs --inputs"),
    (["shapes", "--truth", "truth", "--inputs", "inputs", "--json", "no/x"], "no folder no"),
    (["shapes", "--truth", "truth", "--inputs", "inputs", "--oversampling", 2], "needs --model"),
    (
        [
            "lidar",
            "--reference",
            "gone",
            "--source",
            "gone",
            "--model",
            "lidar",
            "--oversampling",
            9,
        ],
        "oversampling 9: must be between 1 and 8",
    ),
    (["lidar", "--reference", "dense.xyz"], "give --prediction, or --source"),
    (["lidar", "--source", "dense.xyz"], "give --reference, or --thin"),
    (["lidar", "--thin", "dense.xyz", "--source", "dense.xyz"], "--thin splits one survey"),
    (["lidar", "--thin", "dense.xyz", "--density", 4], "--thin needs --ratio"),
    (["lidar", "--thin", "dense.xyz", "--metres-per-unit", 0], "greater than 0"),
    (["pairs", "inputs", "--metres-per-unit", 0], "--metres-per-unit 0"),
    (["lidar", "--reference", "gone.laz", "--source", "dense.xyz"], "gone.laz: no such file"),
    (["lidar", "--reference", "dense.xyz", "--prediction", "truth/one.xyz"], "don't overlap"),
    (["lidar", "--reference", "dense.xyz", "--source", "point.xyz"], "point.xyz: "),
    (["lidar", "--reference", "dense.xyz", "--source", "dense.xyz", "--ratio", 0.5], "ratio 0.5"),
    (["lidar", "--reference", "dense.xyz", "--source", "dense.xyz", "--cell", 0], "greater than"),
    (
        ["lidar", "--reference", "dense.xyz", "--source", "dense.xyz", "--picture", "a.gif"],
        "a.gif: pictures are written as",
    ),
    (["pairs", "gone/far/away"], "gone/far/away: no such directory"),
    (["pairs", "inputs"], "inputs: "),
    (["pairs", "inputs", "--ratio", 0], "--ratio 0"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[:60])
def test_errors_are_reported_in_one_line(
    arguments: list[str],
    message: str,
    shapes: Path,
    surveys: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(shapes)
    shutil.copytree("inputs", "broken")
    Path("broken/one.xyz").write_text("0 0 0\n1 nan 1\n")
    np.savetxt("point.xyz", np.loadtxt("dense.xyz")[:1])
    before = sorted(shapes.rglob("*"))
    assert evaluate(*arguments) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1 and printed.err.startswith("pointup: error: ")
    assert "0." not in printed.out
    assert sorted(shapes.rglob("*")) == before


def test_options_are_parsed_without_loading_torch() -> None:
    code = "import pointup.cli.evaluate.command, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
