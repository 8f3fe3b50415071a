"""The picture of `pointup upsample`: the part of a large cloud that is shown, and its captions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from survey_files import write_las

from pointup.cli.upsample import files
from pointup.io.bounds import Bounds
from pointup.io.cloud import PointCloud
from pointup.upsampling.store.point_store import build_store


def drawn(
    tmp_path: Path,
    source: Path,
    with_originals: bool,
    monkeypatch: pytest.MonkeyPatch,
    bounds: Bounds | None = None,
) -> tuple[np.ndarray, np.ndarray, dict[str, object]]:
    """The arguments of the picture for a window of 30,000 points and as many new ones."""
    rng = np.random.default_rng(0)
    points, made = (rng.random((30_000, 3)) * (3000, 300, 9) + (5e5, 4e6, 0) for _ in range(2))
    directory = tmp_path / "store"
    directory.mkdir()
    store = build_store([PointCloud(points)], directory)
    seen: list[tuple[np.ndarray, np.ndarray, dict[str, object]]] = []

    def note(before: np.ndarray, after: np.ndarray, path: Path, **options: object) -> None:
        seen.append((before, after, options))

    monkeypatch.setattr("pointup.visualization.before_after.before_after_picture", note)
    view = files.Window(store, bounds)
    for part in np.array_split(made, 3):
        view.add(part)
    view.draw(source, 30_000, with_originals, tmp_path / "out.png", has_heights=True)
    return seen[0]


@pytest.mark.parametrize("with_originals", [True, False])
@pytest.mark.parametrize("most", [10_000, 1_000_000])
def test_the_counts_are_those_of_the_whole_cloud(with_originals, most, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_POINTS_OF_WINDOW", most)
    before, after, options = drawn(tmp_path, Path("in.ply"), with_originals, monkeypatch)
    assert options["totals"] == (30_000, 60_000 if with_originals else 30_000)
    assert options["unit"] == ""
    shown = len(before) / 30_000
    assert (shown == 1) == (most > 30_000)
    assert len(after) == pytest.approx((1 + with_originals) * 30_000 * shown, rel=0.1)


def test_the_unit_is_that_of_the_file(tmp_path, monkeypatch):
    write_las(tmp_path / "in.las", np.empty((0, 3)), system=2994)
    _, _, options = drawn(tmp_path, tmp_path / "in.las", True, monkeypatch)
    assert options["unit"] == "ft" and options["vertical"]


@pytest.mark.parametrize("most", [10_000, 1_000_000])
def test_with_bounds_only_points_within_them_are_shown(most, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_POINTS_OF_WINDOW", most)
    bounds = Bounds((5e5 + 1000, 4e6 + 50), (5e5 + 2000, 4e6 + 200))
    before, after, _ = drawn(tmp_path, Path("in.ply"), True, monkeypatch, bounds)
    assert 100 < len(before) < len(after)
    assert bounds.inside(before).all() and bounds.inside(after).all()
