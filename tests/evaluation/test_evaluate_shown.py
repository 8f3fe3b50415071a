"""`pointup evaluate shapes --picture --view`: the worst, the median and the best shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from test_evaluate_command import evaluate, figures_of
from test_evaluate_command import model as model
from viewer_files import scenes_of


@pytest.mark.usefixtures("small_panels")
def test_the_shapes_with_the_highest_median_and_lowest_cd_are_shown(
    tmp_path: Path, model: Path
) -> None:
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


def test_pictures_and_pages_of_other_extensions_are_refused_before_the_work(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, path in (("--view", "a.pdf"), ("--picture", "a.gif")):
        for kind in ("shapes", "pairs"):
            words = [str(tmp_path)] if kind == "pairs" else ["--meshes", tmp_path]
            assert evaluate(kind, *words, option, tmp_path / path) == 1
            assert path in capsys.readouterr().err
