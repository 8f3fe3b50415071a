"""The default dataset: created once, reproducible, with independent samplings."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk
from scipy.spatial import cKDTree

from pointup.datasets.opening import open_samples
from pointup.datasets.pair_dataset import PairDataset
from pointup.errors import FileError
from pointup.geometry.surfaces import Surface
from pointup.synthetic.default_dataset import (
    NUM_TRAIN,
    NUM_VALIDATION,
    RECIPE,
    default_dataset,
    default_sample,
    scene_pair,
    shape_pair,
)


def small(cache: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POINTUP_CACHE", str(cache))
        patch.setattr("pointup.synthetic.default_dataset.NUM_TRAIN", 3)
        patch.setattr("pointup.synthetic.default_dataset.NUM_VALIDATION", 2)
        return default_dataset()


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    small(folder)
    return folder


def test_the_default_dataset_has_normals_second_samplings_and_surfaces(cache):
    directory = small(cache)
    train, validation = (load_from_disk(directory)[split] for split in ("train", "validation"))
    assert (len(train), len(validation)) == (3, 2)
    assert set(train["surface"]) == {""}
    for index, (row, sample) in enumerate(
        zip(validation, PairDataset(open_samples(directory, "validation")), strict=True)
    ):
        surface = Surface.load(directory / "surfaces" / row["surface"])
        assert len(sample.target_normals) == len(sample.target)
        assert sample.index == index
        for points in (sample.target, sample.resample):
            assert np.median(surface.distance(points.numpy())) < 0.01
        assert cKDTree(sample.target).query(sample.resample)[0].min() > 0


def test_the_default_dataset_is_created_once(cache, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in small(cache).rglob("*")}
    monkeypatch.setattr("pointup.synthetic.default_dataset.default_pairs", pytest.fail)
    assert {path: path.stat().st_mtime_ns for path in small(cache).rglob("*")} == before


def test_environment_variables_select_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pointup.synthetic.default_dataset.default_pairs", lambda directory, *_: directory.mkdir()
    )
    name = f"default-{RECIPE}-seed0-{NUM_TRAIN}-{NUM_VALIDATION}"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("POINTUP_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_dataset() == tmp_path / "home" / ".cache" / "pointup" / name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_dataset() == tmp_path / "xdg" / "pointup" / name
    monkeypatch.setenv("POINTUP_CACHE", str(tmp_path / "own"))
    assert default_dataset() == tmp_path / "own" / name


def test_simultaneous_calls_create_one_dataset(tmp_path, monkeypatch):
    monkeypatch.setenv("POINTUP_CACHE", str(tmp_path))
    monkeypatch.setattr("pointup.synthetic.default_dataset.NUM_TRAIN", 3)
    monkeypatch.setattr("pointup.synthetic.default_dataset.NUM_VALIDATION", 2)
    with ThreadPoolExecutor(3) as threads:
        (directory,) = {
            call.result() for call in [threads.submit(default_dataset) for _ in range(3)]
        }
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [directory]


def test_a_dataset_that_another_process_finished_first_is_kept(tmp_path, monkeypatch):
    # As on a network file system where locks don't work.
    def make(staging: Path, *_: object) -> None:
        for directory in (staging, tmp_path / f"default-{RECIPE}-seed0-3-2"):
            directory.mkdir()
            (directory / directory.name).touch()

    monkeypatch.setattr("pointup.synthetic.default_dataset.default_pairs", make)
    directory = small(tmp_path)
    assert (directory / directory.name).exists()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [directory]


def test_a_full_disk_is_an_error_with_the_remedy_and_leaves_nothing(tmp_path, monkeypatch):
    def make(staging: Path, *_: object) -> None:
        staging.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pointup.synthetic.default_dataset.default_pairs", make)
    with pytest.raises(FileError, match=r"No space left.*POINTUP_CACHE"):
        small(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_sample_depends_on_seed_split_and_number():
    arguments = [(0, "train", 0), (1, "train", 0), (0, "validation", 0), (0, "train", 1)]
    sources = [default_sample(*a)[0].source for a in [*arguments, arguments[0]]]
    np.testing.assert_array_equal(sources[0], sources[-1])
    assert len({source.tobytes() for source in sources}) == len(arguments)


def test_shapes_are_sampled_independently_and_in_many_sizes():
    sizes = []
    for seed in range(8):
        pair, surface = shape_pair(np.random.default_rng(seed), resample=seed == 0)
        assert pair.target_normals is not None
        assert pair.target_normals.shape == pair.target.shape
        for points in (pair.source, pair.target):
            assert surface.distance(points[::20]).max() < 1e-6
        nearest = cKDTree(pair.target).query(pair.source)[0]
        assert np.count_nonzero(nearest == 0) == 0
        sizes.append((len(pair.source), len(pair.target)))
    num_source, num_target = np.array(sizes).T
    assert num_source.min() >= 200
    assert num_source.max() > 3 * num_source.min()
    assert (num_target / num_source).min() > 1.9
    assert np.isclose(num_target / num_source, 4, atol=0.01).sum() >= 4


def test_landscapes_have_a_denser_target():
    pair, _ = scene_pair(np.random.default_rng(2), resample=True)
    assert pair.vertical
    assert pair.resample is not None
    assert len(pair.target) > 1.3 * len(pair.source)
    assert 0.7 < len(pair.resample) / len(pair.target) < 1.4
