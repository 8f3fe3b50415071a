"""`pointup evaluate` through the command line: its output and its errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from viewer_files import scenes_of

from pointup import Upsampler, upsample
from pointup.cli.main import main
from pointup.evaluation.common_extent import common_extent, find_ground
from pointup.evaluation.lidar import SurveyReference
from pointup.evaluation.pairs import ShownPair
from pointup.evaluation.pu_gcn import Shape, measure_shape

TETRAHEDRON = "OFF\n4 4 0\n0 0 0\n1 0 0\n0 1 0\n0 0 1\n3 0 2 1\n3 0 1 3\n3 0 3 2\n3 1 2 3\n"


@pytest.fixture
def surveys(tmp_path) -> Path:
    """`dense.xyz`, and of its points `sparse.xyz` (every fourth), `half.xyz` (in the west) and
    `raised.xyz` (0.2 m higher)."""
    rng = np.random.default_rng(1)
    dense = rng.uniform(0, [12, 8, 3], (1200, 3)) + np.array([5e5, 4e6, 100])
    np.savetxt(tmp_path / "dense.xyz", dense, fmt="%.3f")
    np.savetxt(tmp_path / "sparse.xyz", dense[::4], fmt="%.3f")
    np.savetxt(tmp_path / "half.xyz", dense[dense[:, 0] < 5e5 + 6])
    np.savetxt(tmp_path / "raised.xyz", dense + np.array([0, 0, 0.2]), fmt="%.3f")
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
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
def meshes(tmp_path) -> Path:
    folder = tmp_path / "meshes"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.off").write_text(TETRAHEDRON)
    return folder


@pytest.fixture
def shapes(tmp_path) -> Path:
    """Folders `truth`, `inputs` and `predictions` of two shapes; the predictions are the truth."""
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        truth = rng.normal(size=(80, 3))
        truth /= np.linalg.norm(truth, axis=1, keepdims=True)
        for folder, points in (("truth", truth), ("inputs", truth[::4]), ("predictions", truth)):
            (tmp_path / folder).mkdir(exist_ok=True)
            np.savetxt(tmp_path / folder / f"{name}.xyz", points)
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


def test_shapes_drawn_from_meshes_are_reported_in_three_forms(meshes, model, tmp_path, capsys):
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
    assert "mesh scaled to furthest distance 1" in content["metrics"]["p2f"]["convention"]
    assert content["means"]["model"]["cd"] != content["means"]["midpoints"]["cd"]
    cells = [line.split(" | ") for line in markdown_path.read_text().splitlines() if "|" in line]
    (row,) = [line for line in cells if line[0].startswith("| midpoints")]
    assert float(row[1]) == pytest.approx(content["means"]["midpoints"]["cd"], abs=5e-4)


def test_shapes_and_surveys_are_upsampled_with_the_requested_oversampling(
    shapes, surveys, model, capsys
):
    stored = "shapes", "--truth", shapes / "truth", "--inputs", shapes / "inputs"
    survey = "lidar", "--reference", surveys / "dense.xyz", "--source", surveys / "sparse.xyz"
    path, upsampler = surveys / "out.json", Upsampler.from_pretrained(model)
    for oversampling in (1, 2):
        options = ["--model", model, "--oversampling", oversampling, "--json", path]
        assert not evaluate(*stored, *options)
        assert figures_of(path)["oversampling"] == oversampling
        figures = figures_of(path)["shapes"][0]["rows"]["model"]
        points, truth = (np.loadtxt(shapes / name / "one.xyz") for name in ("inputs", "truth"))
        ratio = len(truth) / len(points)
        made = upsample(points, ratio, model=upsampler, oversampling=oversampling)
        expected = measure_shape(made, Shape("one", truth), "pu-gcn")
        assert figures["cd"] == pytest.approx(expected["cd"], rel=1e-5)
        assert not evaluate(*survey, "--ratio", 3, "--ground-density", 0, *options)
        content = figures_of(path)
        assert (content["oversampling"], content["ground_density"]) == (oversampling, 0)
        points, dense = (np.loadtxt(surveys / f"{name}.xyz") for name in ("sparse", "dense"))
        made = upsample(points, 3, model=upsampler, above_ground=True, oversampling=oversampling)
        chamfer = content["rows"]["model"]["chamfer"]
        assert chamfer == pytest.approx(chamfer_of(made, points, dense), rel=1e-5)
        text = f"oversampling {oversampling}"
        assert capsys.readouterr().out.count(text) == (2 if oversampling > 1 else 0)


@pytest.mark.parametrize("folder", ["meshes", "truth", "inputs", "predictions"])
def test_a_damaged_file_is_refused_before_any_shape_is_measured(
    folder, meshes, tmp_path, capsys, monkeypatch
):
    measured = []
    monkeypatch.setattr(
        "pointup.cli.evaluate.shapes.evaluate_shape", lambda *of: measured.append(of) or {}
    )
    words = ["evaluate", "shapes", "--meshes", str(meshes)]
    for kind in () if folder == "meshes" else ("truth", "inputs", "predictions"):
        (tmp_path / kind).mkdir()
        words += [f"--{kind}", str(tmp_path / kind)]
        for name in ("one", "two"):
            np.savetxt(tmp_path / kind / f"{name}.xyz", np.eye(3))
    (damaged,) = (tmp_path / folder).glob("two.*")
    damaged.write_text("damaged")
    assert main(words) == 1
    assert str(damaged) in capsys.readouterr().err
    assert not measured


def test_16x_passes_and_both_protocols_are_reported(meshes, tmp_path, capsys):
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


def test_the_passes_of_a_model_that_needs_fewer_are_reported(meshes, tmp_path, capsys):
    upsampler = Upsampler(feature_dim=8, heads=2, child_heads=2, k=6, max_pass_ratio=16.0)
    upsampler.save_pretrained(tmp_path / "model")
    options = ["--meshes", meshes, "--num-source", 20, "--ratio", 16]
    assert not evaluate("shapes", *options, "--model", tmp_path / "model")
    text = capsys.readouterr().out
    assert "20 points to 320: 16x, model in 1 pass, midpoints in 2\n" in text


def test_predictions_of_other_programs_are_scored(shapes, capsys):
    assert not evaluate(
        "shapes", "--truth", shapes / "truth", "--predictions", shapes / "predictions",
        "--inputs", shapes / "inputs", "--json", shapes / "out.json",
    )  # fmt: skip
    means = figures_of(shapes / "out.json")["means"]
    assert list(means) == ["prediction", "midpoints"]
    assert "inputs that are subsets of their truths: 2" in capsys.readouterr().out
    assert means["prediction"]["cd"] == means["prediction"]["hausdorff"] == 0
    assert means["midpoints"]["cd"] > 0
    assert "p2f" not in means["midpoints"]
    assert "P2F" not in capsys.readouterr().out


def test_reports_say_which_clouds_were_measured(shapes, capsys):
    truth = np.loadtxt(shapes / "truth" / "two.xyz")
    np.savetxt(shapes / "predictions" / "two.xyz", truth[:-5])
    (shapes / "truth" / "._two.xyz").write_text("left by macOS")
    given = {name: str(shapes / name) for name in ("truth", "predictions")}
    options = [word for name, path in given.items() for word in (f"--{name}", path)]
    assert not evaluate("shapes", *options, "--json", shapes / "out.json")
    text = capsys.readouterr().out
    assert f"2 shapes of {shapes / 'truth'}, predictions of {shapes / 'predictions'}" in text
    assert "predictions with another number of points than their truth: 1" in text
    content = figures_of(shapes / "out.json")
    assert {name: content[name] for name in given} == given
    assert "inputs" not in content and content["denoise"] is False


def test_predictions_and_inputs_in_another_frame_than_the_truth_are_named(shapes, capsys):
    words = "--truth", "--inputs", "--predictions"
    options = [word for name in words for word in (name, shapes / name.strip("-"))]
    assert not evaluate("shapes", *options)
    assert "in another frame" not in capsys.readouterr().out
    for folder, names in (("predictions", ("one", "two")), ("inputs", ("two",))):
        for name in names:
            path = shapes / folder / f"{name}.xyz"
            np.savetxt(path, 5 * np.loadtxt(path))
    assert not evaluate("shapes", *options)
    text = capsys.readouterr().out
    assert "inputs in another frame than their truth: 1, the first two; P2F, CD target" in text
    assert "predictions in another frame than their truth: 2, the first one; P2F, CD target" in text


def test_predictions_and_inputs_without_a_truth_are_named(shapes, capsys):
    words = "--truth", "--inputs", "--predictions"
    options = [word for name in words for word in (name, shapes / name.strip("-"))]
    assert not evaluate("shapes", *options)
    assert "left out" not in capsys.readouterr().out
    (shapes / "truth" / "one.xyz").unlink()
    shutil.copy(shapes / "inputs" / "two.xyz", shapes / "inputs" / "three.xyz")
    assert not evaluate("shapes", *options)
    text = capsys.readouterr().out
    for folder, names in (("inputs", "2, the first one.xyz"), ("predictions", "1, the first one")):
        assert (
            f"files of {shapes / folder} without a truth of their name, left out: {names}" in text
        )


def test_drawn_shapes_are_described_in_the_json_file(meshes, tmp_path):
    drawn = {"num_source": 20, "ratio": 2.0, "pattern": "random", "noise": 0.01, "seeds": 2}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in drawn.items()]
    path = tmp_path / "out.json"
    assert not evaluate("shapes", "--meshes", meshes, *options, "--json", path)
    content = figures_of(path)
    assert {name: content[name] for name in drawn} == drawn
    assert content["meshes"] == str(meshes)


def test_shapes_without_a_mesh_are_named_and_have_no_distance_to_the_surface(shapes, capsys):
    (shapes / "meshes").mkdir()
    (shapes / "meshes" / "two.off").write_text(TETRAHEDRON)
    rng = np.random.default_rng(0)
    on_a_face = rng.dirichlet(np.ones(3), 80) @ np.eye(3)
    np.savetxt(shapes / "truth" / "two.xyz", on_a_face)
    np.savetxt(shapes / "inputs" / "two.txt", on_a_face[:20])
    (shapes / "inputs" / "two.xyz").unlink()
    assert not evaluate(
        "shapes", "--truth", shapes / "truth", "--inputs", shapes / "inputs",
        "--meshes", shapes / "meshes", "--json", shapes / "out.json",
    )  # fmt: skip
    text = capsys.readouterr().out
    assert "P2F and resampled ground truth of 1 shapes; no mesh of one" in text
    assert "resampled ground truth (1 shapes)" in text
    rows = {shape["name"]: shape["rows"] for shape in figures_of(shapes / "out.json")["shapes"]}
    assert "p2f" not in rows["one"]["midpoints"] and "p2f" in rows["two"]["midpoints"]


@pytest.mark.usefixtures("small_panels")
def test_the_shapes_with_the_highest_median_and_lowest_cd_are_shown(tmp_path, model):
    rng = np.random.default_rng(0)
    for name, noise in (("good", 0.0), ("bad", 0.1), ("fair", 0.02)):
        truth = rng.normal(size=(80, 3))
        truth /= np.linalg.norm(truth, axis=1, keepdims=True)
        source = truth[::4] + noise * rng.normal(size=(20, 3))
        for folder, points in (("truth", truth), ("inputs", source)):
            (tmp_path / folder).mkdir(exist_ok=True)
            np.savetxt(tmp_path / folder / f"{name}.xyz", points)
    picture, page, out = (tmp_path / name for name in ("a.png", "a.html", "a.json"))
    assert not evaluate(
        "shapes", "--truth", tmp_path / "truth", "--inputs", tmp_path / "inputs", "--model", model,
        "--picture", picture, "--view", page, "--json", out,
    )  # fmt: skip
    cd = {shape["name"]: shape["rows"]["model"]["cd"] for shape in figures_of(out)["shapes"]}
    in_order = sorted(cd, key=lambda name: -cd[name])
    scenes = scenes_of(page)
    assert [scene["name"] for scene in scenes] == [
        f"{place}: {name}"
        for place, name in zip(("worst", "median", "best"), in_order, strict=True)
    ]
    layers = [layer["name"] for layer in scenes[0]["layers"]]
    assert layers == ["source", "midpoint baseline", "model", "ground truth"]
    assert scenes[0]["up"] == "y"
    assert f"CD {cd[in_order[0]]:.3g} x1e-3" in scenes[0]["note"]
    assert imread(picture).shape[1] == 16 + 4 * 256


def test_the_ground_truth_shows_its_distance_to_the_model_beside_a_second_sampling():
    truth = np.random.default_rng(0).random((20, 3))
    model = truth + np.array([0, 0, 0.001])
    clouds = {"source": truth[:5], "model": model, "resampled": truth[::2]}
    *_, second, made, reference = ShownPair("", clouds, truth, vertical=False).scene().layers
    assert [second.name, made.name] == ["resampled ground truth", "model"]
    error = reference.channels["error"]
    assert error.note == "to model"
    assert error.values == pytest.approx(0.001, rel=1e-5)


WRONG = [
    ("shapes --truth truth --predictions truth --json .", ".: is a folder"),
    ("shapes", "give --truth"),
    ("shapes --truth truth", "--truth needs --inputs or --predictions"),
    ("shapes --inputs inputs", "need --truth"),
    ("shapes --truth truth --inputs inputs --ratio 2", "--ratio"),
    ("shapes --truth truth --predictions truth --model m", "needs --inputs"),
    ("shapes --truth truth --inputs inputs --json no/x", "no folder no"),
    ("shapes --truth truth --inputs inputs --oversampling 2", "needs --model"),
    ("shapes --truth truth --inputs inputs --denoise", "--denoise needs --model"),
    ("lidar --reference dense.xyz", "give --prediction, or --source"),
    ("lidar --source dense.xyz", "give --reference, or --thin"),
    ("lidar --thin dense.xyz --source dense.xyz", "--thin splits one survey"),
    ("lidar --thin dense.xyz --density 4", "--thin needs --ratio"),
    ("lidar --passes dense.xyz --pattern poisson", "--pattern poisson: needs --thin"),
    ("lidar --thin dense.xyz --ground-density 0", "--ground-density 0.0 needs --model"),
    ("lidar --thin dense.xyz --metres-per-unit 0", "greater than 0"),
    ("lidar --reference dense.xyz --source point.xyz", "point.xyz: "),
    ("lidar --reference dense.xyz --source dense.xyz --cell 0", "greater than"),
    (
        "lidar --reference dense.xyz --source dense.xyz --picture a.gif",
        "a.gif: pictures are written as",
    ),
    ("pairs gone/far/away", "gone/far/away: no such directory"),
    ("pairs inputs", "inputs: "),
    ("pairs inputs --ratio 0", "--ratio 0"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: value[:60])
def test_errors_are_reported_in_one_line(arguments, message, shapes, surveys, monkeypatch, capsys):
    monkeypatch.chdir(shapes)
    np.savetxt("point.xyz", np.loadtxt("dense.xyz")[:1])
    before = sorted(shapes.rglob("*"))
    assert evaluate(*arguments.split()) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1 and printed.err.startswith("pointup: error: ")
    assert "0." not in printed.out
    assert sorted(shapes.rglob("*")) == before
