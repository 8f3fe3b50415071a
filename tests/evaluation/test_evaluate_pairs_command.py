"""pointup evaluate pairs: the figures of validation, of surveys, and of what is written."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_pictures, wavy_pair, write_small_pairs
from matplotlib.image import imread
from test_evaluate_command import evaluate, figures_of
from test_evaluate_command import model as model
from test_pu_gcn import torus
from viewer_files import scenes_of

from pointup import Upsampler, upsample
from pointup.cli.evaluate.pairs import remarks_on_pairs
from pointup.cli.main import main
from pointup.datasets.pair_writer import write_pairs
from pointup.evaluation.baselines import BASELINES, FITTED
from pointup.evaluation.cloud_metrics import METRICS, mean_rows
from pointup.evaluation.lidar_metrics import FAR, worse_than_source
from pointup.evaluation.pairs import measure_to_surface, surface_metrics
from pointup.geometry.midpoints import midpoint_upsample
from pointup.geometry.surfaces import Surface
from pointup.io.length_unit import METRE, unit_of


@pytest.fixture(scope="module")
def pair_directory(tmp_path_factory) -> Path:
    """With three pairs for validation: the worst, the median and the best one are shown."""
    return write_small_pairs(tmp_path_factory.mktemp("data") / "pairs", num_validation=3)


def test_pairs_have_the_figures_that_training_validates_on(pair_directory, model, tmp_path, capsys):
    from accelerate import Accelerator

    from pointup.training.config import TrainConfig
    from pointup.training.datasets import open_training_data
    from pointup.training.evaluation import Evaluation

    path = tmp_path / "out.json"
    assert not evaluate("pairs", pair_directory, "--model", model, "--as-written", "--json", path)
    assert "validation pairs of" in capsys.readouterr().out
    content = figures_of(path)
    upsampler = Upsampler.from_pretrained(model).eval()
    assert content["oversampling"] == upsampler.config.oversampling
    config = TrainConfig(data=(str(pair_directory),), model=upsampler.config, num_pictures=0)
    accelerator = Accelerator(cpu=True)
    data = open_training_data(config, accelerator)
    evaluation = Evaluation(data, accelerator, config)
    records = [r for batch in evaluation.batches for r in evaluation.records_of(batch, upsampler)]
    means = mean_rows([r["rows"] for r in records])
    others = [*BASELINES, *FITTED, "source", "resampled"]
    assert list(content["means"]) == ["model", "midpoints", *others]
    for row, figures in means.items():
        found = {name: content["means"][row][name] for name in figures}
        assert found == pytest.approx(figures, rel=1e-5)
    rows = [r["rows"] for r in records]
    shares = [one["model"]["chamfer"] / one["midpoints"]["chamfer"] for one in rows]
    assert content["mean_chamfer_share_of_midpoints"] == pytest.approx(np.mean(shares), rel=1e-5)
    assert len(content["pairs"]) == 3


@pytest.fixture(scope="module")
def evaluated(pair_directory, model, tmp_path_factory) -> tuple[Path, str]:
    """A folder with pairs.png, pairs.html and out.json of an evaluation, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("evaluated"), StringIO()
    words = ("--picture", folder / "pairs.png", "--view", folder / "pairs.html")
    with redirect_stdout(printed), small_pictures():
        words = ("--model", model, *words, "--json", folder / "out.json")
        assert not evaluate("pairs", pair_directory, *words)
    return folder, printed.getvalue()


def test_the_headline_of_pairs_and_their_table_are_the_same_mean(evaluated):
    text, content = evaluated[1], figures_of(evaluated[0] / "out.json")
    head = text.index("mean of 3 pairs")
    columns = ["model", "midpoints", "random midpoints", "jitter", "plane", "source", "resampled"]
    printed, fitted = [line for line in text[head:].splitlines() if line.startswith("Chamfer  ")]
    values = dict(zip(columns, map(float, printed.split()[1:8]), strict=True))
    baselines = {name: values[name] for name in columns[1:5]}
    best = min(baselines, key=lambda name: baselines[name])
    (headline,) = [
        line for line in text[:head].splitlines() if line.startswith("Chamfer of the model:")
    ]
    share = float(headline.split(":")[1].split("%")[0])
    assert share == pytest.approx(100 * values["model"] / values[best], abs=0.2)
    assert f"({best})" in headline
    values |= dict(
        zip(["jitter fitted", "plane fitted"], map(float, fitted.split()[1:3]), strict=True)
    )
    for name, value in values.items():
        row = content["means"][name.replace(" ", "_")]
        assert value == pytest.approx(row["chamfer"], rel=1e-3)
        each = [pair["rows"][name.replace(" ", "_")]["chamfer"] for pair in content["pairs"]]
        assert row["chamfer"] == pytest.approx(np.mean(each))


def test_the_gap_is_that_of_the_pairs_with_a_second_sampling(model, tmp_path, capsys):
    rng = np.random.default_rng(0)
    pairs = [wavy_pair(f"sheet_{i}", 60, 3, rng) for i in range(5)]
    pairs = [replace(pair, resample=pair.target if i < 2 else None) for i, pair in enumerate(pairs)]
    for name, chosen in (("all", pairs), ("two", pairs[:2])):
        write_pairs(pairs, chosen, tmp_path / name, {})
        assert not evaluate("pairs", tmp_path / name, "--model", model)
    mixed, alone = capsys.readouterr().out.split("validation pairs of")[1:]
    line = re.search(r"the model closes .* resampled ground truth", alone)
    assert line is not None
    assert f"{line[0]}, in the 2 pairs that have one" in mixed
    assert "(2 pairs)" in mixed
    assert "(2 pairs)" not in alone


def test_pairs_of_another_ratio_than_their_own_are_counted_and_have_no_gap(model, tmp_path, capsys):
    rng = np.random.default_rng(0)
    pairs = [wavy_pair(f"sheet_{i}", 60, ratio, rng) for i, ratio in enumerate((2, 3, 3, 4))]
    for pair in pairs:
        pair.resample = pair.target
    write_pairs(pairs, pairs, tmp_path / "all", {})
    write_pairs(pairs, pairs[:1], tmp_path / "1", {})
    gap, texts = re.compile(r"the model closes .* ground truth.*"), []
    for name, *options in (
        ("all",), ("all", "--max-ratio", 2.5), ("all", "--ratio", 5), ("1", "--ratio", 2), ("1",),
    ):  # fmt: skip
        assert not evaluate("pairs", tmp_path / name, "--model", model, *options)
        texts.append(capsys.readouterr().out)
    of_own_ratio, clamped, fivefold, same, alone = texts
    for text in (of_own_ratio, same, alone):
        assert "instead of" not in text and gap.search(text)
    assert "3 of 4 pairs were upsampled by 2.5x instead of their own 3x to 4x" in clamped
    (line,) = gap.findall(alone)
    assert gap.findall(clamped) == [f"{line}, in the 1 pairs that have one and their own ratio"]
    assert "4 of 4 pairs were upsampled by 5x instead of their own 2x to 4x" in fivefold
    assert not gap.search(fivefold)


def test_the_figures_of_a_pair_name_its_ratio(pair_directory, tmp_path):
    path = tmp_path / "out.json"
    for ratio in (2, 3):
        options = "--ratio", ratio, "--max-ratio", 8, "--json", path
        assert not evaluate("pairs", pair_directory, *options)
        assert {pair["ratio"] for pair in figures_of(path)["pairs"]} == {ratio}
        assert figures_of(path)["max_ratio"] == 8


def test_only_pairs_with_heights_take_a_unit_that_is_unknown_for_metres(tmp_path, capsys):
    for vertical in (True, False):
        pair = wavy_pair("sheet", 60, 3, np.random.default_rng(0))
        pair.vertical = vertical
        write_pairs([pair], [pair], tmp_path / str(vertical), {})
        assert not evaluate("pairs", tmp_path / str(vertical))
        assert ("metres" in capsys.readouterr().out) == vertical
        assert not main(["inspect", str(tmp_path / str(vertical))])
        assert (" of the area" in capsys.readouterr().out) == vertical


def test_only_what_is_measured_as_written_is_said_to_select_the_best_model(
    pair_directory, model, capsys
):
    for words in ((), ("--as-written",)):
        assert not evaluate("pairs", pair_directory, "--model", model, *words)
        selects = "train.py selects the best model" in " ".join(capsys.readouterr().out.split())
        assert selects == bool(words)


def test_no_remark_compares_with_the_distance_of_a_source_on_the_surface(model, tmp_path, capsys):
    rng, surface, path = np.random.default_rng(0), torus(), tmp_path / "out.json"
    source, target = (surface.sample(n, rng)[0].astype(np.float32) for n in (60, 180))
    made = replace(wavy_pair("torus", 60, 3, rng), resample=None, vertical=False)
    pair = replace(made, source=source, target=target, surface="torus.npz")
    write_pairs([pair], [pair], tmp_path / "pairs", {}, surfaces={"torus.npz": surface})
    assert not evaluate("pairs", tmp_path / "pairs", "--model", model, "--json", path)
    content = figures_of(path)
    assert content["means"]["model"]["p2f"] > content["means"]["source"]["p2f"]
    assert len(content["remarks"]) == 1 and "P2F" not in content["remarks"][0]


def test_pairs_with_z_up_have_the_figures_of_surveys_and_shapes_have_not(tmp_path):
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


def test_pairs_are_measured_as_pointup_upsample_writes_them(model, tmp_path):
    from pointup.datasets.opening import open_samples

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
        pair = open_samples(tmp_path / "pairs", "validation").pair(number)
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


def test_pairs_don_t_depend_on_the_token_budget(evaluated, pair_directory, model, tmp_path):
    words = ("--model", model, "--token-budget", 1, "--json", tmp_path / "out.json")
    assert not evaluate("pairs", pair_directory, *words)
    small, default = (figures_of(folder / "out.json") for folder in (tmp_path, evaluated[0]))
    assert small["means"]["model"] == pytest.approx(default["means"]["model"], rel=1e-4)


def test_the_worst_median_and_best_pair_are_shown(evaluated):
    path, page, out = (evaluated[0] / name for name in ("pairs.png", "pairs.html", "out.json"))
    assert imread(path).shape[1] == 16 + 4 * 256
    pairs = figures_of(out)["pairs"]
    shares = {p["name"]: p["rows"]["model"]["chamfer"] / p["rows"]["midpoints"]["chamfer"]
              for p in pairs}  # fmt: skip
    in_order = sorted(shares, key=lambda name: shares[name])
    scenes = scenes_of(page)
    assert [scene["name"] for scene in scenes] == [
        f"worst: {in_order[-1]}", f"median: {in_order[1]}", f"best: {in_order[0]}"
    ]  # fmt: skip
    assert f"{shares[in_order[0]]:.1%} of the midpoint baseline's" in scenes[2]["note"]
    names = [layer["name"] for layer in scenes[0]["layers"]]
    assert names == ["source", "midpoint baseline", "model", "target"]


@pytest.mark.usefixtures("small_panels")
def test_pairs_whose_midpoints_equal_their_target_are_not_shown(model, tmp_path, capsys):
    rng = np.random.default_rng(0)
    other, same = (wavy_pair(name, 60, 3, rng) for name in ("other", "same"))
    source = torch.from_numpy(same.source)
    same.target = midpoint_upsample(source, torch.tensor([0, 60]), 3)[0].numpy()
    picture, page = (tmp_path / name for name in ("pairs.png", "pairs.html"))
    words = ("--picture", picture, "--view", page)
    for name, pairs in (("one", [same]), ("both", [same, other])):
        write_pairs(pairs, pairs, tmp_path / name, {})
    assert not evaluate("pairs", tmp_path / "one", "--model", model, *words)
    assert "no picture and no viewer: the midpoints equal" in capsys.readouterr().out
    assert not picture.exists() and not page.exists()
    assert not evaluate("pairs", tmp_path / "both", "--model", model, *words)
    assert [scene["name"] for scene in scenes_of(page)] == ["only: other"]
    assert picture.exists()
    assert not evaluate("pairs", tmp_path / "one", *words)
    assert [scene["name"] for scene in scenes_of(page)] == ["only: same"]


def pair(p2f_of_source: float, p2f_of_model: float, cv: float = 0.2) -> dict[str, dict[str, float]]:
    return {
        "model": {"chamfer": 0.06, "p2f": p2f_of_model, "spacing_cv": cv},
        "source": {"chamfer": 0.09, "p2f": p2f_of_source, "spacing_cv": 0.3},
    }


def test_the_distance_to_the_surface_is_not_compared_with_that_of_a_source_on_it():
    (remark,) = remarks_on_pairs([pair(7e-6, 5.2), pair(8e-6, 5.4)], METRICS)
    assert remark == "model: no figure is much worse than the source's"
    (remark,) = remarks_on_pairs([pair(7e-6, 5.2, cv=0.6)], METRICS)
    assert remark == "model, much worse than the source: Spacing CV 0.6000, not 0.3000 (+100%)"


@pytest.mark.parametrize("noise", [0.8, 8.0, 22.0])
def test_the_distance_to_the_surface_of_noisy_sources_is_compared(noise):
    noisy = [pair(noise, 4 * noise)] * 2
    remarks = remarks_on_pairs(noisy, METRICS)
    assert remarks == worse_than_source(mean_rows(noisy), METRICS, ["model"])
    assert "P2F" in remarks[0] and "(4 times)" in remarks[0]


def test_of_mixed_pairs_only_those_with_noise_are_compared_and_counted():
    mixed = [pair(7e-6, 40.0), pair(8.0, 10.0), pair(8.0, 10.0)]
    (remark,) = remarks_on_pairs(mixed, METRICS)
    assert remark == (
        "model, much worse than the source: P2F in the 2 pairs whose source is not on the surface: "
        "10 x1e-3, not 8 x1e-3 (+25%)"
    )


# Two triangles: the unit square of x and y, 100 times as wide, at z = 0.
SQUARE = Surface.from_triangles(
    np.array([[0, 0, 0], [100, 0, 0], [100, 100, 0], [0, 100, 0]], float),
    np.array([[0, 1, 2], [0, 2, 3]]),
)


def test_shares_are_those_of_new_points_by_their_height_above_a_plane():
    rng = np.random.default_rng(0)
    source = rng.uniform([10, 10, -3], [90, 90, 3], (50, 3))
    new = rng.uniform([10, 10, -2], [90, 90, 2], (400, 3))
    figures = measure_to_surface(
        {"source": source, "model": np.concatenate([source, new])}, SQUARE, METRE
    )
    for far in FAR:
        assert figures["model"][f"off_surface_{far:g}"] == pytest.approx(
            100 * np.mean(np.abs(new[:, 2]) > far)
        )
        # The source has no new points: all of it counts.
        assert figures["source"][f"off_surface_{far:g}"] == pytest.approx(
            100 * np.mean(np.abs(source[:, 2]) > far)
        )
    everything = np.concatenate([source, new])
    assert figures["model"]["p2f"] == pytest.approx(1e3 * np.abs(everything[:, 2]).mean())
    assert figures["model"].keys() == {"p2f", *surface_metrics(METRE)}


def test_limits_are_in_metres_whatever_the_unit():
    source = np.array([[50.0, 50, 0]])
    cloud = np.array([[50.0, 50, 1], [50, 50, 2], [50, 50, 4]])
    figures = measure_to_surface({"source": source, "model": cloud}, SQUARE, unit_of(0.3048))
    assert figures["model"]["off_surface_0.5"] == pytest.approx(200 / 3)
    assert figures["model"]["off_surface_1"] == pytest.approx(100 / 3)


def test_shapes_have_no_shares_and_empty_clouds_no_figures():
    clouds = {"source": np.array([[50.0, 50, 2]]), "model": np.empty((0, 3))}
    assert measure_to_surface(clouds, SQUARE, None) == {"source": {"p2f": 2000.0}}


def test_a_pair_with_points_around_its_core_is_upsampled_with_them_and_measured_on_the_core(
    model, tmp_path
):
    rng = np.random.default_rng(0)
    pair = wavy_pair("wide", 400, 4, rng)
    # As large as a cell of a metre.
    box = np.array([[0.25, 0.25], [0.75, 0.75]])
    wide = replace(pair, core=box + pair.origin[:2], vertical=True)
    assert wide.num_points < 0.4 * pair.num_points
    write_pairs([pair], [wide], tmp_path / "pairs", {})
    path = tmp_path / "out.json"
    words = ["--ratio", 4, "--metres-per-unit", 2]
    assert not evaluate(
        "pairs", tmp_path / "pairs", "--model", model, "--as-written", "--json", path, *words
    )
    rows = figures_of(path)["pairs"][0]["rows"]
    upsampler = Upsampler.from_pretrained(model).eval()
    made = upsample(wide.source.astype(np.float64), 4, model=upsampler, above_ground=True)
    target = wide.target.astype(np.float64)
    inside = [((p[:, :2] >= 0.25) & (p[:, :2] < 0.75)).all(axis=1) for p in (made, target)]
    distance = np.linalg.norm(made[:, None] - target, axis=2)
    ways = distance[inside[0]].min(axis=1), distance[:, inside[1]].min(axis=0)
    assert rows["model"]["chamfer"] == pytest.approx(sum(way.mean() for way in ways), rel=1e-4)
    assert rows["model"]["hausdorff"] == pytest.approx(max(way.max() for way in ways), rel=1e-4)
