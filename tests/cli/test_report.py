"""`pointup report`: one page about runs, from what their directories hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from browser import open_browser
from sheets import SMALL

from pointup import Upsampler
from pointup.cli.main import main
from pointup.cli.report.runs import differing_options, read_run, read_runs
from pointup.datasets.pair import Pair
from pointup.datasets.pair_dataset import write_pairs
from pointup.training.config import TrainConfig, as_dict


def wavy(num_points: int, seed: int) -> np.ndarray:
    x, y = np.random.default_rng(seed).random((2, num_points)) * 4
    return np.column_stack([x, y, np.sin(2 * x)]).astype(np.float32)


def pair(number: int) -> Pair:
    return Pair(f"sheet {number}", wavy(200, number), wavy(800, 100 + number), np.zeros(3))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        lines.append({"step": 10 * number, "share_of_midpoints": share, "validation": rows})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text + '{"step": 41, "lo')
    (path / "plan.txt").write_text("device  cpu <1>\n")
    Upsampler(**SMALL).save_pretrained(path / "model")
    return path


def cells_of(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]


@pytest.mark.usefixtures("small_panels")
def test_a_report_has_best_evaluations_options_that_differ_and_samples(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        make_run(tmp_path / "first", data, 0.003, [0.9, 0.7, 0.8]),
        make_run(tmp_path / "second", data, 0.001, [0.95, 0.6]),
    ]
    out = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "-o", str(out)]) == 0
    html = out.read_text(encoding="utf-8")
    cells = cells_of(html.split("<iframe")[0])
    assert ["first", "40", "20", "0.35", "70.0%", str(data)] in cells
    assert ["second", "40", "20", "0.3", "60.0%", str(data)] in cells
    after = cells_of(html.rpartition("</iframe>")[2])
    assert ["learning_rate", "0.003", "0.001"] in after
    assert ["first", "1,000", "0.5", "10%", "1.00 GiB"] in after
    assert "device  cpu &lt;1&gt;" in html
    assert html.count("<svg") == 5
    # An untrained model equals the midpoint baseline in positions, not in density.
    assert "4 of 4 validation pairs" in html
    assert html.count("data:image/png") == 3 and html.count("srcdoc=") == 1
    assert "open it in a browser" in capsys.readouterr().out


def test_a_report_without_its_dataset_says_what_is_missing(data: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tmp_path / "gone", 0.003, [0.9])
    assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "gone: no such directory" in html and "<iframe" not in html and "<svg" in html


def test_one_run_is_compared_with_the_defaults(data: Path, tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", data, 0.02, [0.9]), "run")
    assert differing_options([run]) == {"data": [[str(data)], []], "learning_rate": [0.02, 0.003]}
    assert run.best and run.best["step"] == 10
    assert len(run.steps) == 40, "the incomplete last line is left out"


@pytest.mark.usefixtures("small_panels")
def test_runs_may_have_the_names_of_clouds(data: Path, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, data, 0.02, [0.9]) for name in ("target", "source")]
    out = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "-o", str(out)]) == 0
    assert [run.name for run in read_runs(runs)] == [f"run {path}" for path in runs]


def test_the_best_evaluation_is_that_of_the_saved_model(data: Path, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", data, 0.02, [0.9, 0.8])
    lines = (path / "metrics.jsonl").read_text().splitlines()[:-1]
    # The model failed on a cloud, so that it was not saved.
    last = {**json.loads(lines[-1]), "step": 40, "share_of_midpoints": 0.2, "is_complete": False}
    (path / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(last)]) + "\n")
    run = read_run(path, "run")
    assert run.best and run.best["step"] == 20


def test_a_directory_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "a.html")]) == 1
    assert "no run of train.py" in capsys.readouterr().err


@pytest.mark.slow
def test_the_viewer_within_a_report_opens_without_an_error(data: Path, tmp_path: Path) -> None:
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
