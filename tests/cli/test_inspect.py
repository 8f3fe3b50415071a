from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from survey_files import UTM_CORNER, write_las
from viewer_files import scenes_of

from pointup.cli import file_statistics
from pointup.cli.dataset_statistics import inspect_dataset
from pointup.cli.main import main
from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import write_pairs
from pointup.io.cloud import PointCloud


def cloud(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, number]).random((number, 3)).astype(np.float32)


def dataset(path: Path, train: list[Pair], validation: list[Pair] | None = None) -> Path:
    write_pairs(
        train,
        validation or [Pair("v", cloud(10), cloud(40))],
        path,
        {"made_by": "tests", "num_source": 10},
    )
    return path


def test_pairs_are_shown_in_the_coordinates_of_their_files(tmp_path):
    place = np.array([500_000.0, 4_100_000, 900])
    pair = Pair.centred("hill", place + cloud(10), place + cloud(40))
    path = dataset(tmp_path / "pairs", [pair], [pair])
    assert main(["inspect", str(path), "--view", str(tmp_path / "page.html")]) == 0
    origin = scenes_of(tmp_path / "page.html")[0]["origin"]
    assert origin == pytest.approx(place + 0.5, abs=0.5)


@pytest.fixture
def with_bad(tmp_path) -> Path:
    hurt = cloud(20)
    hurt[3] = np.nan
    pairs = [Pair(f"p{i}", cloud(10 + i), cloud(40, seed=1)) for i in range(9)]
    return dataset(
        tmp_path / "d", [*pairs, Pair("hurt", hurt, cloud(40)), Pair("no", hurt[:0], hurt)]
    )


def test_columns_are_what_a_loop_over_the_pairs_finds(tmp_path):
    pairs = [Pair(f"p{i}", cloud(10 + i), cloud(30 + i, seed=1)) for i in range(5)]
    train, validation = inspect_dataset(dataset(tmp_path / "d", pairs))
    assert (train.name, train.num_samples, validation.num_samples) == ("train", 5, 1)
    assert train.columns["source points"].tolist() == [10, 11, 12, 13, 14]
    assert train.columns["tokens"].tolist() == [40, 42, 44, 46, 48]
    for i, pair in enumerate(pairs):
        source, target = pair.source, pair.target
        assert train.columns["ratio"][i] == pytest.approx((30 + i) / (10 + i))
        assert train.columns["longest side"][i] == pytest.approx(np.ptp(source, axis=0).max())
        own = np.linalg.norm(source[:, None] - source, axis=2) + np.diag([np.inf] * len(source))
        gap = np.linalg.norm(source[:, None] - target, axis=2)
        assert train.columns["source spacing"][i] == pytest.approx(np.median(own.min(axis=1)))
        assert train.columns["source to target"][i] == pytest.approx(np.median(gap.min(axis=1)))


def test_options_of_the_value_zero_are_shown_and_those_without_a_value_are_not(tmp_path, capsys):
    pair = Pair("a", cloud(100), cloud(400))
    info = {"made_by": "pointup", "seed": 0, "strip": 0.0, "separate": False, "left_out": [],
            "surveys": {}}  # fmt: skip
    write_pairs([pair], [pair], tmp_path / "pairs", info)
    assert main(["inspect", str(tmp_path / "pairs")]) == 0
    entries = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert ["seed", "0"] in entries and ["strip", "0.0"] in entries
    assert not {"separate", "left", "surveys"} & {entry[0] for entry in entries if entry}


def test_a_source_that_is_part_of_its_target_is_reported(tmp_path, capsys):
    target = cloud(40)
    path = dataset(tmp_path / "d", [Pair("subset", target[::4], target)] * 3)
    assert inspect_dataset(path)[0].share_in_target == 1
    assert main(["inspect", str(path), "--strict"]) == 0
    report = capsys.readouterr().out
    assert "no bad samples" in report
    assert "100%  scores look better" in report and "contents" not in report


def test_bad_samples_are_listed_by_name_and_reason(with_bad, capsys):
    for words, status in (([], 0), (["--strict"], 1)):
        assert main(["inspect", str(with_bad), *words]) == status
        text = capsys.readouterr().out
    assert text.startswith(f"{with_bad}: 12 pairs,")
    # The description of the dataset, its values one below the other.
    assert re.search(r"^  made by     tests\n  num source  10$", text, re.MULTILINE)
    assert "bad samples in train: 2" in text
    assert "  hurt: source has 1 points that are not finite" in text
    assert "  no: source is empty" in text


def test_pairs_that_can_not_be_pairs_are_told(tmp_path, capsys):
    apart = Pair("apart", cloud(40), cloud(10) + np.float32(9))
    path = dataset(tmp_path / "d", [Pair("swapped", cloud(40), cloud(10)), apart])
    assert main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("note: train: the target is sparser than the source in half of")
    assert [line for line in lines if "apart: source and target lie 8" in line]


def test_json_says_the_same(with_bad, capsys):
    assert main(["inspect", str(with_bad), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["info"]["made_by"] == "tests"
    train = found["splits"]["train"]
    assert train["num_samples"] == 11
    assert train["source_points"]["max"] == 20
    assert [sample["name"] for sample in train["bad_samples"]] == ["hurt", "no"]


def test_a_picture_has_histograms_and_pairs_that_are_not_bad(with_bad, tmp_path):
    path = tmp_path / "sizes.png"
    assert main(["inspect", str(with_bad), "--picture", str(path)]) == 0
    # Two pairs of two columns beside each other; more than histograms below each other.
    height, width, _ = imread(path).shape
    assert width == 2 * (2 * 408 + 16) and height > 1500
    assert main(["inspect", str(with_bad), "--picture", str(tmp_path / "sizes.pdf")]) == 1


def test_bars_follow_the_counts(tmp_path, capsys, monkeypatch):
    sizes = [10] * 8 + [20]
    path = dataset(
        tmp_path / "d", [Pair(f"p{i}", cloud(n), cloud(40)) for i, n in enumerate(sizes)]
    )
    main(["inspect", str(path)])
    (line, *_) = [x for x in capsys.readouterr().out.splitlines() if "source points" in x]
    assert line.split() == ["source", "points", "10", "10", "20", "█", "▁"]


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_a_directory_that_is_not_a_dataset_is_named(make, tmp_path, capsys):
    path = tmp_path / "nothing"
    make(path)
    assert main(["inspect", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_new_points_of_a_file_are_told_by_class_with_their_uncertainty(tmp_path, capsys):
    rng = np.random.default_rng(0)
    classes, is_new = rng.choice([1, 2, 31], 900), rng.random(900) < 0.6
    uncertainty = np.where(is_new, rng.exponential(classes), 0)
    path = tmp_path / "dense.npz"
    np.savez(path, positions=rng.random((900, 3)), classification=classes, synthetic=is_new,
             uncertainty=uncertainty)  # fmt: skip
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_points"], found["num_new"]) == (900, is_new.sum())
    assert list(found["uncertainty"]) == ["all", "1", "2", "31"]
    for of, row in found["uncertainty"].items():
        own = uncertainty[is_new & ((classes == int(of)) if of != "all" else True)]
        expected = [len(own), *np.percentile(own, [50, 90], method="inverted_cdf")]
        assert list(row.values()) == pytest.approx(expected, rel=0.01)
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^class 2, ground +[\d,]+ ", text, re.MULTILINE)
    assert text.splitlines()[-1].startswith("class 31, other ")
    assert main(["inspect", str(path), "--deep"]) == 1
    assert "--deep need a dataset" in capsys.readouterr().err
    (tmp_path / "same.npz").write_bytes(path.read_bytes())
    items = [{"assets": {"data": {"href": name}}} for name in ("dense.npz", "same.npz")]
    (tmp_path / "both.vpc").write_text(json.dumps({"features": items}))
    assert main(["inspect", str(tmp_path / "both.vpc"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["num_points"], listed["num_new"]) == (1800, 2 * is_new.sum())
    assert listed["uncertainty"]["2"]["num_points"] == 2 * found["uncertainty"]["2"]["num_points"]
    np.savez(path, positions=rng.random((9, 3)), uncertainty=[-1, np.nan, 1e40] * 3,
             synthetic=np.ones(9))  # fmt: skip
    assert main(["inspect", str(path)]) == 0
    assert "9 points, 9 of them new, no uncertainty" in capsys.readouterr().out


def test_large_figures_of_a_file_have_no_exponent(tmp_path, capsys):
    corners = np.array([[0, 0, 0], [1, 1, 0]])
    for side in (0.5, 12_345.6):
        np.save(tmp_path / "a.npy", side * np.concatenate([cloud(1000) * (1, 1, 0), corners]))
        assert main(["inspect", str(tmp_path / "a.npy")]) == 0
    dense, wide = capsys.readouterr().out.split("a.npy")[1:]
    (density,) = re.findall(r"density +(.*) points per", dense)
    assert float(density.replace(",", "")) == pytest.approx(4008, rel=0.2) and "," in density
    assert "12,346 x 12,346 x 0, from" in wide


def test_a_survey_is_told_with_system_extent_density_and_classes(tmp_path, capsys):
    rng = np.random.default_rng(0)
    points = UTM_CORNER + rng.random((20_000, 3)) * (50, 40, 12.3)
    points[0], points[1] = UTM_CORNER, UTM_CORNER + np.array([50, 40, 12.3])
    classes = np.repeat([2, 5], [8_000, 12_000])
    write_las(tmp_path / "a.las", points, system=32632, classification=classes,
              number_of_returns=np.repeat([1, 3], [5_000, 15_000]))  # fmt: skip
    assert main(["inspect", str(tmp_path / "a.las")]) == 0
    lines = [re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines()[1:]]
    density = dict(lines).pop("density").split(" ", 1)
    assert (float(density[0]), density[1]) == (
        pytest.approx(10, rel=0.03),
        "points per square m, seen from above",
    )
    assert [line for line in lines if line[0] != "density"] == [
        ["coordinate system", "WGS 84 / UTM zone 32N"],
        ["unit", "m"],
        ["extent", "50 x 40 x 12.3, from 500000, 4000000, 0"],
        ["several returns", "75%"],
        ["vegetation", "60%: try upsample --model forest"],
        ["class 2, ground", "8,000 points, 40%"],
        ["class 5, high vegetation", "12,000 points, 60%"],
    ]
    # No model is named for points that one has made.
    np.savez(tmp_path / "a.npz", positions=points, classification=classes,
             synthetic=np.ones(20_000, dtype=bool))  # fmt: skip
    assert main(["inspect", str(tmp_path / "a.npz")]) == 0
    assert "--model forest" not in capsys.readouterr().out
    # Of a corridor that fills a small part of its box, and of points on a line.
    corridor = np.sort(rng.random((20_000, 1)) * 1_000, axis=0) + rng.random((20_000, 3)) * 4
    np.savez(tmp_path / "b.npz", positions=corridor, classification=np.full(20_000, 2.0))
    np.savez(tmp_path / "c.npz", positions=np.linspace([0, 0, 0], [9, 0, 0], 10))
    for name, density in (("b.npz", pytest.approx(20_000 / 8_000, rel=0.3)), ("c.npz", None)):
        assert main(["inspect", str(tmp_path / name), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["density"] == density
    write_las(tmp_path / "degrees.las", points, system=4326)
    for name in ("c.npz", "degrees.las"):
        assert main(["inspect", str(tmp_path / name)]) == 0
        assert "density" not in capsys.readouterr().out


@pytest.mark.parametrize("most", [1_000_000, 3_000])
def test_the_density_counts_a_point_in_the_buffers_of_several_tiles_once(
    most, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(file_statistics, "_MOST_PLACES", most)
    monkeypatch.setattr(file_statistics, "_MOST_KEYS", most)
    points = UTM_CORNER + np.random.default_rng(0).random((30_000, 3)) * (60, 50, 9)
    for i in range(3):
        kept = np.abs(points[:, 0] - UTM_CORNER[0] - 20 * i - 10) < 20
        write_las(tmp_path / "tiles" / f"{i}.las", points[kept], system=32632)
    assert main(["inspect", str(tmp_path / "tiles"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_points"] > 45_000 and found["density"] == pytest.approx(10, rel=0.03)


def test_a_larger_survey_is_inspected_in_no_more_memory(tmp_path, monkeypatch):
    square, peaks = np.random.default_rng(0).random((10_000, 3)), []
    for name in ("0.las", "1.las"):
        write_las(tmp_path / name, UTM_CORNER + cloud(40))
    monkeypatch.setattr(file_statistics, "_MOST_PLACES", 4_000)
    monkeypatch.setattr(file_statistics, "_MOST_KEYS", 4_000)
    for number in (5, 100):

        def a_row_of_squares(path: Path, number: int = number) -> Iterator[PointCloud]:
            return (PointCloud(square + np.array([x, int(path.stem), 0])) for x in range(number))

        monkeypatch.setattr(file_statistics, "iter_points", a_row_of_squares)
        tracemalloc.start()
        found = file_statistics.inspect_files([tmp_path])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found["num_points"] == 20_000 * number
        assert found["density"] == pytest.approx(10_000, rel=0.1)
    assert peaks[1] < 1.3 * peaks[0]


def test_a_folder_of_tiles_is_inspected_as_one(tmp_path, capsys):
    points = UTM_CORNER + cloud(40)
    for name in ("a.las", "b.LAS"):
        write_las(tmp_path / "tiles" / name, points, synthetic=np.arange(40) % 2)
    assert main(["inspect", str(tmp_path / "tiles")]) == 0
    assert "tiles: 80 points, 40 of them new, no uncertainty" in capsys.readouterr().out
    assert main(["inspect", *(str(tmp_path / "tiles" / name) for name in ("a.las", "b.LAS"))]) == 0
    assert "a.las and 1 more: 80 points, 40 of them new" in capsys.readouterr().out
    (tmp_path / "pairs").mkdir()
    assert main(["inspect", str(tmp_path / "tiles"), str(tmp_path / "pairs")]) == 1
    assert "not a folder of points; inspect it by itself" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "tiles"), "--deep"]) == 1
    assert "holds points; --picture, --view, --deep need a dataset" in capsys.readouterr().err
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "here").symlink_to(tmp_path / "tiles")
    assert main(["inspect", str(tmp_path / "linked")]) == 0
    assert "linked: 80 points, 40 of them new" in capsys.readouterr().out


def test_a_dataset_in_whose_directory_a_survey_lies_is_inspected_as_a_dataset(tmp_path, capsys):
    dataset(tmp_path / "pairs", [Pair("t", cloud(10), cloud(40))])
    write_las(tmp_path / "pairs" / "raw" / "a.las", UTM_CORNER + cloud(40))
    assert main(["inspect", str(tmp_path / "pairs")]) == 0
    assert "pairs: 2 pairs, 100 points" in capsys.readouterr().out
