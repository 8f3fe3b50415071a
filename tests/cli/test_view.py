"""`pointup view`, and `--view` of other commands: which clouds, colours and numbers a page has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from viewer_files import scenes_of

from pointup.cli.main import main
from pointup.io.cloud import PointCloud
from pointup.io.files import write_points


def write_landscape(path: Path, num_points: int, seed: int, east: float = 0.0) -> Path:
    x, y = np.random.default_rng(seed).random((2, num_points)) * 60
    points = np.column_stack([x + 1000 + east, y + 2000, np.sin(x / 9)])
    classes = np.full(num_points, 2, dtype=np.uint8)
    write_points(path, PointCloud(points, {"classification": classes}))
    return path


def test_view_shows_files_and_folders_beside_a_reference(tmp_path, capsys):
    (tmp_path / "tiles").mkdir()
    for part in range(2):
        write_landscape(tmp_path / "tiles" / f"{part}.laz", 600, part)
    dense = write_landscape(tmp_path / "dense.laz", 2000, 5)
    page = tmp_path / "page.html"
    words = ["view", str(tmp_path / "tiles"), "--reference", str(dense), "-o", str(page)]
    assert main([*words, "--max-points", "1500", "--names", "before"]) == 0
    (scene,) = scenes_of(page)
    assert scene["up"] == "z" and scene["color"] == "error"
    numbers = {layer["name"]: (layer["count"], layer["total"]) for layer in scene["layers"]}
    assert numbers == {"before": (1200, 1200), "reference": (1500, 2000)}
    assert {"error", "class", "density"} <= scene["channels"].keys()
    assert "reference: 2,000 points, 1,500 of them shown" in capsys.readouterr().out


def test_upsample_writes_a_page_of_before_and_after_with_new_points_marked(tmp_path):
    source = write_landscape(tmp_path / "a.laz", 500, 0)
    page = tmp_path / "page.html"
    words = ["upsample", str(source), "-o", str(tmp_path / "b.laz"), "--view", str(page)]
    assert main([*words, "--ratio", "2", "--oversampling", "1"]) == 0
    (scene,) = scenes_of(page)
    assert [layer["count"] for layer in scene["layers"]] == [500, 1000]
    assert scene["color"] == "height"
    assert scene["channels"]["origin"]["categories"] == [[0, "measured"], [1, "new"]]
    assert scene["channels"]["distance"]["high"] > 0


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path, capsys):
    source = write_landscape(tmp_path / "a.laz", 500, 0)
    words = ["upsample", str(source), "-o", str(tmp_path / "b.laz"), "--view", "page.pdf"]
    assert main(words) == 1
    assert "page.pdf: the viewer is an HTML file" in capsys.readouterr().err
    assert not (tmp_path / "b.laz").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("one", "--names: give 2 different names"),
        ("one one", "--names: give 2 different names"),
        ("one reference", "--names: reference is the name of the --reference"),
        ("", "--names: reference is the name of the --reference"),
    ],
)
def test_names_are_different_ones_of_each_input(names, message, tmp_path, capsys):
    paths = [str(write_landscape(tmp_path / f"{n}.laz", 50, 0)) for n in ("a", "reference", "c")]
    words = ["view", *paths[:2], "--reference", paths[2], "-o", str(tmp_path / "p.html")]
    assert main([*words, *(["--names", *names.split()] if names else [])]) == 1
    assert message in capsys.readouterr().err
    assert main(["view", *paths[:2], *words[-2:], "--names", "one", " "]) == 1
    assert "--names: a name is empty" in capsys.readouterr().err


def test_the_reference_is_named_so_with_and_without_names(tmp_path):
    paths = [str(write_landscape(tmp_path / f"{name}.laz", 50, 0)) for name in ("a", "drone")]
    page = tmp_path / "p.html"
    words = ["view", paths[0], "--reference", paths[1], "-o", str(page)]
    for options, names in (([], ["a", "reference"]), (["--names", "x"], ["x", "reference"])):
        assert main([*words, *options]) == 0
        assert [layer["name"] for layer in scenes_of(page)[0]["layers"]] == names


def test_folders_keep_what_follows_a_dot(tmp_path):
    for name in ("survey.2019", "survey.2021"):
        (tmp_path / name).mkdir()
        write_landscape(tmp_path / name / "a.laz", 50, 0)
    page = tmp_path / "page.html"
    words = [str(tmp_path / name) for name in ("survey.2019", "survey.2021")]
    assert main(["view", *words, "-o", str(page)]) == 0
    (scene,) = scenes_of(page)
    assert [layer["name"] for layer in scene["layers"]] == ["survey.2019", "survey.2021"]


def test_a_survey_without_a_survey_format_opens_with_its_heights(tmp_path):
    # A plot that is higher than it is wide.
    points = np.random.default_rng(0).random((400, 3)) * [8, 5, 25]
    write_points(tmp_path / "plot.ply", PointCloud(points))
    for model, up in (("forest", "z"), ("shapes", "y")):
        page, dense = tmp_path / f"{model}.html", tmp_path / f"{model}.ply"
        words = ["upsample", str(tmp_path / "plot.ply"), "-o", str(dense), "--model", model]
        assert main([*words, "--ratio", "2", "--oversampling", "1", "--view", str(page)]) == 0
        (scene,) = scenes_of(page)
        assert scene["up"] == up


def test_clouds_that_do_not_overlap_are_named_with_their_distance(tmp_path, capsys):
    paths = {
        name: str(write_landscape(tmp_path / f"{name}.laz", 900, seed, east))
        for seed, (name, east) in enumerate({"a": 0, "b": 30, "next": 90.2, "far": 5060}.items())
    }
    page = ["-o", str(tmp_path / "p.html")]

    def notes(*words: str) -> list[str]:
        assert main(["view", *words, *page]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "overlap" in line]

    assert notes(paths["a"], paths["b"], paths["next"]) == []
    (note,) = notes(paths["a"], paths["far"])
    assert note.startswith("note: a and far do not overlap: they are 5,00")
    assert "same coordinate system" in note
    (note,) = notes(paths["b"], paths["a"], "--reference", paths["far"])
    assert note.startswith("note: b and reference do not overlap") and " 4,97" in note
