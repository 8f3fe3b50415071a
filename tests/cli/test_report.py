"""`pointup report`: one page about runs, from what their directories hold."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from browser import open_browser
from scipy.spatial import cKDTree
from sheets import SMALL

from pointup import Upsampler
from pointup.cli.main import main
from pointup.cli.report.page import curve_charts, report_html, samples_of_runs
from pointup.cli.report.runs import differing_options, read_run, read_runs
from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import write_pairs
from pointup.training.config import TrainConfig, as_dict


def wavy(num_points: int, seed: int) -> np.ndarray:
    x, y = np.random.default_rng(seed).random((2, num_points)) * 4
    return np.column_stack([x, y, np.sin(2 * x)]).astype(np.float32)


def pair(number: int) -> Pair:
    return Pair(f"sheet {number}", wavy(200, number), wavy(800, 100 + number), np.zeros(3))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "pairs"
    write_pairs([pair(0)], [pair(n) for n in range(1, 5)], path, info={"made_by": "tests"})
    return path


def make_run(path: Path, data: Path, learning_rate: float, shares: list[float]) -> Path:
    """A run directory as train.py leaves it, with an untrained model."""
    path.mkdir()
    config = as_dict(TrainConfig(data=(str(data),), learning_rate=learning_rate))
    (path / "config.json").write_text(json.dumps(config))
    lines: list[dict] = [
        {"step": step, "loss": 1 / step, "learning_rate": learning_rate, "step_seconds": 0.5,
         "tokens_per_second": 1000.0, "idle_fraction": 0.1, "peak_memory_bytes": 2**30}
        for step in range(1, 41)
    ]  # fmt: skip
    for number, share in enumerate(shares, 1):
        rows = {"model": {"chamfer": share * 0.5}, "midpoints": {"chamfer": 0.5}}
        is_kept = share == min(shares[:number])
        lines.append({"step": 10 * number, "share_of_midpoints": share, "validation": rows,
                      "is_kept": is_kept})  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text + '{"step": 41, "lo')
    (path / "plan.txt").write_text("device  cpu <1>\n")
    torch.manual_seed(0)  # Equal weights are calibrated once, see tests/conftest.py.
    Upsampler(**SMALL).save_pretrained(path / "model")
    return path


@pytest.fixture
def no_charts() -> Iterator[None]:
    with mock.patch("pointup.cli.report.page.curve_charts", return_value={}):
        yield


def cells_of(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]


@pytest.mark.usefixtures("small_panels")
def test_a_report_has_best_evaluations_options_that_differ_and_samples(data, tmp_path, capsys):
    # Names of clouds, too.
    first, second = names = [f"run {tmp_path / name}" for name in ("target", "source")]
    runs = [
        make_run(tmp_path / "target", data, 0.003, [0.9, 0.7, 0.8]),
        make_run(tmp_path / "source", data, 0.001, [0.95, 0.6]),
    ]
    assert [run.name for run in read_runs(runs)] == names
    out = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "-o", str(out)]) == 0
    html = out.read_text(encoding="utf-8")
    cells = cells_of(html.split("<iframe")[0])
    assert [first, "40", "20", "0.35", "70.0%", str(data)] in cells
    assert [second, "40", "20", "0.3", "60.0%", str(data)] in cells
    after = cells_of(html.rpartition("</iframe>")[2])
    assert ["learning_rate", "0.003", "0.001"] in after
    assert [first, "1,000", "0.5", "10%", "1.00 GiB"] in after
    assert "device  cpu &lt;1&gt;" in html
    assert html.count("<svg") == 5
    # An untrained model equals the midpoint baseline in positions, not in density.
    assert "4 of 4 validation pairs, upsampled with the model of" in html
    assert "The share is the mean of the ratios of the pairs, not the ratio of the means." in html
    assert html.count("The figures are those of the output of <code>pointup upsample</code>") == 1
    assert html.count("data:image/png") == 3 and html.count("srcdoc=") == 1
    assert "open it in a browser" in capsys.readouterr().out


@pytest.mark.usefixtures("small_panels")
def test_a_run_without_a_model_yet_leaves_the_samples_of_the_others(data, tmp_path):
    runs = [make_run(tmp_path / "run", data, 0.003, [0.9]), make_run(tmp_path / "new", data, 1, [])]
    shutil.rmtree(tmp_path / "new" / "model")
    scenes = samples_of_runs(read_runs(runs), 1).scenes
    names = [layer.name for layer in scenes[0].layers]
    assert names == ["source", "midpoint baseline", "run", "target"]


def test_a_report_without_its_dataset_says_what_is_missing(data, tmp_path):
    run = make_run(tmp_path / "run", tmp_path / "gone", 0.003, [0.9])
    assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "gone: no such directory" in html and "<iframe" not in html and "<svg" in html


@pytest.mark.usefixtures("small_panels")
def test_data_relative_to_the_folder_of_training_is_named_so_elsewhere(
    data, tmp_path, monkeypatch, capsys
):
    for name in ("pairs", "own/pairs"):
        # The second one could be a name on the Hub.
        run = make_run(tmp_path / name.replace("/", "_"), Path(name), 0.003, [0.9])
        with mock.patch("pointup.cli.report.page.curve_charts", return_value={}):
            assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
        printed = capsys.readouterr().out
        assert f"directory {name} is relative to the folder in which {run} was trained" in printed
    monkeypatch.chdir(data.parent)
    run = make_run(tmp_path / "beside", Path("pairs"), 0.003, [0.9])
    samples = samples_of_runs(read_runs([run]), 4)
    assert len(samples.scenes) == 3


@pytest.mark.usefixtures("small_panels")
def test_a_run_with_noise_replaces_the_points_of_noisy_samples(data, tmp_path):
    is_kept = {}
    for noise in (0.0, 0.5):
        path = make_run(tmp_path / f"run {noise}", data, 0.003, [0.9])
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"noise_spacings": noise}))
        (scene,) = samples_of_runs(read_runs([path]), 1).scenes
        number = int(scene.name.split()[-1])
        source, _, made, _ = (layer.positions for layer in scene.layers)
        is_kept[noise] = [
            float((cKDTree(found).query(points)[0] < 1e-6).mean())
            for points, found in ((wavy(200, number), source), (source, made))
        ]
    assert is_kept == {0.0: [1.0, 1.0], 0.5: [0.0, 0.0]}


def test_one_run_is_compared_with_the_defaults(data, tmp_path):
    run = read_run(make_run(tmp_path / "run", data, 0.02, [0.9]), "run")
    assert differing_options([run]) == {"data": [[str(data)], []], "learning_rate": [0.02, 0.003]}
    assert run.best and run.best["step"] == 10
    assert len(run.steps) == 40, "the incomplete last line is left out"


def test_curves_are_named_by_their_runs_whatever_the_names(data, tmp_path):
    names = ["_first", "cost $\\foo$", "$1e-3$ <&>"]
    runs = read_runs([make_run(tmp_path / name, data, 0.003, [0.9]) for name in names])
    charts = curve_charts(runs)
    assert len(charts) == 5
    for svg in charts.values():
        texts = [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]
        assert [text for text in texts if text in names] == names


@pytest.mark.filterwarnings("error")
def test_long_names_of_runs_leave_room_for_the_curves(data, tmp_path):
    names = [f"lr-{rate}-" + "w" * 120 + f"-seed-{rate}" for rate in (1, 2)]
    runs = read_runs([make_run(tmp_path / name, data, 0.003, [0.9]) for name in names])
    for svg in curve_charts(runs).values():
        for rate in (1, 2):
            assert re.search(f">lr-{rate}-w+…w+-seed-{rate}<", svg)


def test_of_one_evaluation_the_axis_has_whole_steps_only(data, tmp_path):
    charts = curve_charts(read_runs([make_run(tmp_path / "run", data, 0.02, [0.9])]))
    axis = charts["Share of the midpoint baseline"].partition('id="matplotlib.axis_2"')[0]
    assert re.findall(r"<text[^>]*>([^<]*)</text>", axis) == ["10", "step"]


@pytest.mark.usefixtures("no_charts")
def test_what_stands_between_backticks_is_code_on_the_page(data, tmp_path):
    run = make_run(tmp_path / "run", data, 0.02, [0.9])
    html = report_html(read_runs([run]), None, "`a<b` is missing", "")
    assert "<p><code>a&lt;b</code> is missing</p>" in html


@pytest.mark.usefixtures("no_charts")
def test_the_length_of_a_run_is_its_last_known_step(data, tmp_path):
    path = make_run(tmp_path / "run", data, 0.02, [])
    record = {"step": 45, "share_of_midpoints": 0.9, "validation": {"model": {"chamfer": 0.1}},
              "is_kept": True}  # fmt: skip
    lines = (path / "metrics.jsonl").read_text().splitlines()[:-1]
    (path / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(record)]) + "\n")
    run = read_run(path, "run")
    assert run.last_step == 45
    assert ["run", "45", "45", "0.1", "90.0%", str(data)] in cells_of(
        report_html([run], None, "", "")
    )
    (path / "metrics.jsonl").write_text("")
    assert read_run(path, "run").last_step == 0


@pytest.mark.usefixtures("no_charts")
def test_peak_memory_is_the_largest_of_the_run(data, tmp_path):
    path = make_run(tmp_path / "run", data, 0.02, [0.9])
    lines = (path / "metrics.jsonl").read_text().splitlines()[:40]
    records = [json.loads(line) for line in lines]
    for number, record in enumerate(records, 1):
        record["peak_memory_bytes"] = number * 2**30
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    html = report_html([read_run(path, "run")], None, "", "")
    assert ["run", "1,000", "0.5", "10%", "40.00 GiB"] in cells_of(html)


def rows_of_validation(runs: list[Path]) -> tuple[str, list[str]]:
    """The sentence above the table of the validation, and the names of its rows."""
    with mock.patch("pointup.cli.report.page.curve_charts", return_value={}):
        html = report_html(read_runs(runs), None, "", "")
    section = html.partition("<h2>Validation</h2>")[2].partition("<section>")[0]
    note = re.match(r"<p>(.*?)</p>", section)
    return note[1] if note else "", [row[0] for row in cells_of(section)[1:]]


@pytest.mark.usefixtures("no_charts")
def test_the_unit_of_the_surveys_is_named_where_the_runs_have_the_same(data, tmp_path):
    metres = tmp_path / "scenes"
    write_pairs([pair(0)], [pair(1)], metres, info={"made_by": "tests", "recipe": 1})
    first, second, unknown = (
        make_run(tmp_path / name, pairs, 0.003, [0.9])
        for name, pairs in (("a", metres), ("b", metres), ("c", data))
    )
    for runs, summary, table in (
        ([first, second], "Chamfer, m", "Chamfer, m"),
        ([first, unknown], "Chamfer", "Chamfer, data unit"),
    ):
        cells = cells_of(report_html(read_runs(runs), None, "", ""))
        assert summary in cells[0] and ["", table] in cells


@pytest.mark.usefixtures("small_panels")
def test_each_sample_has_the_unit_of_its_own_dataset(data, tmp_path):
    write_pairs([pair(0)], [pair(n) for n in range(5, 7)], tmp_path / "metres", {"recipe": 1})
    run = make_run(tmp_path / "run", data, 0.003, [0.9])
    options = json.loads((run / "config.json").read_text())
    options["data"] = [str(tmp_path / "metres"), str(data)]
    (run / "config.json").write_text(json.dumps(options))
    scenes = samples_of_runs(read_runs([run]), 64).scenes
    found = {scene.name.split(": ")[1].split("/")[0]: scene.unit for scene in scenes}
    assert found == {"metres": "m", data.name: ""}


@pytest.mark.usefixtures("small_panels")
def test_runs_and_datasets_may_have_names_that_are_not_utf8(data, tmp_path):
    folder = tmp_path / "caf\udce9"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("the file system has names in UTF-8 only")
    own = folder / "pairs\udce9"
    shutil.copytree(data, own)
    run = make_run(folder / "run\udce9", own, 0.003, [0.9])
    (tmp_path / "run").mkdir()
    for names in ([run], [run, make_run(tmp_path / "run" / "run\udce9", own, 0.001, [0.9])]):
        assert main(["report", *map(str, names), "-o", str(tmp_path / "report.html")]) == 0
        html = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert "run\\xe9" in html and "pairs\\xe9" in html


def test_references_that_differ_are_those_of_each_run(data, tmp_path):
    runs = [make_run(tmp_path / name, data, 0.003, [0.9]) for name in ("city", "forest", "hill")]
    not_yet = make_run(tmp_path / "not yet", data, 0.003, [])
    baseline = "midpoints (no network)"
    assert rows_of_validation(runs) == ("", ["city", "forest", "hill", baseline])
    other = (runs[1] / "metrics.jsonl").read_text().replace('{"chamfer": 0.5}', '{"chamfer": 0.7}')
    (runs[1] / "metrics.jsonl").write_text(other)
    note, rows = rows_of_validation([not_yet, *runs[:2]])
    assert "validated on different data" in note
    assert rows == ["city", "forest", f"{baseline}, city", f"{baseline}, forest"]
    # The first run that has an evaluation gives the lines of the chart.
    chart = curve_charts(read_runs([not_yet, *runs[:2]]))["Chamfer distance on validation pairs"]
    assert ">midpoint baseline, city<" in chart
    chart = curve_charts(read_runs([not_yet, runs[0]]))["Chamfer distance on validation pairs"]
    assert ">midpoint baseline<" in chart


def test_references_of_another_device_or_with_fewer_metrics_are_the_same(data, tmp_path):
    runs = [make_run(tmp_path / name, data, 0.003, [0.9]) for name in ("a", "b")]
    lines = (runs[1] / "metrics.jsonl").read_text()
    for figures in ('{"chamfer": 0.50001}', '{"hausdorff": 1.0, "chamfer": 0.5}', "{}"):
        (runs[1] / "metrics.jsonl").write_text(lines.replace('{"chamfer": 0.5}', figures))
        assert rows_of_validation(runs) == ("", ["a", "b", "midpoints (no network)"])


def test_a_run_that_is_named_twice_counts_once(data, tmp_path):
    run = make_run(tmp_path / "run", data, 0.003, [0.9])
    (tmp_path / "link").symlink_to(run)
    assert [r.name for r in read_runs([run, tmp_path / "link", run])] == ["run"]


def test_the_best_evaluation_is_that_of_the_saved_model(data, tmp_path):
    path = make_run(tmp_path / "run", data, 0.02, [0.9, 0.8])
    lines = (path / "metrics.jsonl").read_text().splitlines()[:-1]
    # The model failed on a cloud, so that it was not saved.
    last = {**json.loads(lines[-1]), "step": 40, "share_of_midpoints": 0.2, "is_kept": False}
    (path / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(last)]) + "\n")
    run = read_run(path, "run")
    assert run.best and run.best["step"] == 20


def test_a_directory_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "a.html")]) == 1
    assert "no run of train.py" in capsys.readouterr().err


@pytest.mark.slow
def test_the_viewer_within_a_report_opens_without_an_error(data, tmp_path):
    run = make_run(tmp_path / "run", data, 0.003, [0.9])
    out = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    with open_browser() as browser:
        page = browser.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.goto(out.as_uri())
        page.frame_locator("iframe").locator("body[data-ready]").wait_for(timeout=60_000)
        page.wait_for_timeout(1000)
        assert complaints == []
