"""Sample tables: what training knows of a dataset without reading its points."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset

from pointup.datasets import opening, pair_writer, samples
from pointup.datasets.opening import open_samples
from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import write_pairs
from pointup.datasets.samples import Samples, SampleTable, UnreadableSample, damaged_samples
from pointup.errors import DataError

UTM = np.array([500_000.0, 4_500_000.0, 100.0])


def cloud(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, number]).random((number, 3)).astype(np.float32)


def pairs(number: int, seed: int = 0) -> Iterator[Pair]:
    rng = np.random.default_rng(seed)
    for i in range(number):
        target = cloud(int(rng.integers(5, 90)), i)
        yield Pair(
            f"p\u00e4r {i}",
            cloud(int(rng.integers(5, 30)), 1000 + i),
            target,
            origin=UTM + i,
            target_normals=target[::-1] if i % 3 else None,
            resample=cloud(7 + i, 2000 + i) if i % 2 else None,
            vertical=i % 5 != 0,
        )


@pytest.fixture
def small_files(monkeypatch) -> None:
    """Batches, files and tables of a few samples, and fewer open files than there are."""
    monkeypatch.setattr(pair_writer, "BYTES_PER_BATCH", 3_000)
    monkeypatch.setattr(pair_writer, "BYTES_PER_FILE", 9_000)
    monkeypatch.setattr(samples, "ROWS_PER_BATCH", 7)
    monkeypatch.setattr(samples, "MAX_OPEN", 2)


def no_points(*_: Any) -> Any:
    raise AssertionError("points were read")


def damage(samples: Samples, index: int, column: str = "target") -> Path:
    """Flip one bit of the points of a sample on disk; returns the file."""
    file, *places = samples.value("place", index)
    path, _ = samples.table.files[file]
    with path.open("r+b") as opened:
        opened.seek(places[("source", "target").index(column)] + 5)
        (byte,) = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 8]))
    return path


def test_a_table_has_what_a_loop_over_the_pairs_finds(tmp_path, small_files):
    written = list(pairs(50))
    write_pairs(written, pairs(4, 1), tmp_path / "d", {})
    assert len(list((tmp_path / "d" / "train").glob("*.arrow"))) > 5
    samples = open_samples(tmp_path / "d", "train")
    assert list(samples.names) == [pair.name for pair in written]
    for index in np.random.default_rng(0).permutation(50).tolist():
        pair, read = written[index], samples.pair(index)
        clouds = pair.clouds()
        for column, points in read.clouds().items():
            assert np.array_equal(points, clouds[column]), (index, column)
        assert (read.vertical, read.origin.tolist()) == (pair.vertical, pair.origin.tolist())
        both = np.concatenate([pair.source, pair.target])
        assert np.array_equal(samples.array("low")[index], both.min(axis=0))
        assert np.array_equal(samples.array("high")[index], both.max(axis=0))
        assert samples.array("source_extent")[index] == np.ptp(pair.source, axis=0).max()
        stored = b"".join(np.ascontiguousarray(points).tobytes() for points in clouds.values())
        assert samples.value("checksum", index) == zlib.crc32(stored)
    assert samples.array("num_source").tolist() == [len(pair.source) for pair in written]
    text = "\n".join(pair.name for pair in written)
    assert samples.names_checksum() == zlib.crc32(text.encode())
    some = samples.select(np.array([30, 2])).select(np.array([1]))
    assert (list(some.names), some.names_checksum()) == (
        [written[2].name], zlib.crc32(written[2].name.encode())
    )  # fmt: skip


def test_datasets_reads_what_was_written(tmp_path, small_files):
    write_pairs(pairs(30), pairs(4, 1), tmp_path / "d", {})
    loaded = datasets.load_from_disk(tmp_path / "d")
    assert {split: len(part) for split, part in loaded.items()} == {"train": 30, "validation": 4}
    for row, pair in zip(loaded["train"], pairs(30), strict=True):
        assert np.array_equal(np.array(row["target"], np.float32), pair.target)


def test_opening_a_prepared_dataset_reads_no_points(tmp_path, monkeypatch):
    write_pairs(pairs(20), pairs(4, 1), tmp_path / "d", {})
    monkeypatch.setattr(SampleTable, "points", no_points)
    monkeypatch.setattr(opening, "index_parts", no_points)
    monkeypatch.setattr(opening, "load_splits", no_points)
    for split in ("train", "validation"):
        samples = open_samples(tmp_path / "d", split)
        assert not samples.bad_samples(min_points=3)
        assert samples.array("num_target").sum() > 0


def test_a_dataset_without_tables_is_read_once_and_gives_the_same_table(tmp_path, monkeypatch):
    write_pairs(pairs(20), pairs(4, 1), tmp_path / "d", {})
    given = open_samples(tmp_path / "d", "train").table.path.read_bytes()
    shutil.rmtree(tmp_path / "d" / "samples")
    made = open_samples(tmp_path / "d", "train")
    assert made.table.path == tmp_path / "d" / "samples" / "train.arrow"
    assert made.table.path.read_bytes() == given
    monkeypatch.setattr(opening, "index_parts", no_points)
    assert list(open_samples(tmp_path / "d", "train").names) == [pair.name for pair in pairs(20)]


def test_a_table_is_kept_in_the_cache_if_the_dataset_can_not_be_written(tmp_path, monkeypatch):
    write_pairs(pairs(20), pairs(4, 1), tmp_path / "d", {})
    shutil.rmtree(tmp_path / "d" / "samples")
    monkeypatch.setenv("POINTUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(opening.os, "access", lambda *_: False)
    assert open_samples(tmp_path / "d", "train").table.path.is_relative_to(tmp_path / "cache")
    assert not (tmp_path / "d" / "samples").exists()
    monkeypatch.setattr(opening, "index_parts", no_points)
    assert len(open_samples(tmp_path / "d", "validation")) == 4


@pytest.mark.parametrize("is_relative", [False, True])
def test_the_table_of_another_tools_dataset_serves_the_next_start(
    is_relative, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = foreign(Path("d") if is_relative else tmp_path / "d", 12)
    made = open_samples(folder, "train")
    monkeypatch.setattr(opening, "index_parts", no_points)
    assert list(open_samples(folder, "train").names) == list(made.names)


def foreign(directory: Path, number: int, seed: int = 0) -> Path:
    columns = {
        "source": [cloud(6 + i, seed).astype(float) + UTM for i in range(number)],
        "target": [cloud(9 + i, seed + 1).astype(float) + UTM for i in range(number)],
    }
    Dataset.from_dict(columns).save_to_disk(directory)
    return directory


def test_a_dataset_that_is_stored_anew_gets_a_new_table(tmp_path):
    path = foreign(tmp_path / "d", 20)
    before = open_samples(path, "train").array("checksum")
    assert open_samples(path, "train").names[0].startswith("sample_")
    assert np.abs(open_samples(path, "train").points(3)["target"]).max() < 2
    shutil.rmtree(path)
    foreign(path, 20, seed=5)
    after = open_samples(path, "train").array("checksum")
    assert len(before) == len(after) and not np.array_equal(before, after)


def test_without_a_validation_split_the_splits_share_a_table(tmp_path):
    write_pairs(pairs(30), [], tmp_path / "d", {})
    train, validation = (open_samples(tmp_path / "d", s) for s in ("train", "validation"))
    assert sorted([*train.names, *validation.names]) == sorted(pair.name for pair in pairs(30))
    assert len(validation) == 3
    by_name = {pair.name: pair for pair in pairs(30)}
    for index, name in enumerate(validation.names):
        assert np.array_equal(validation.points(index)["source"], by_name[name].source)


@pytest.mark.parametrize("change", ["cut", "missing"])
def test_a_file_of_points_that_is_not_as_it_was_written_is_named_at_the_start(tmp_path, change):
    write_pairs(pairs(20), pairs(4, 1), tmp_path / "d", {})
    (path,) = (tmp_path / "d" / "train").glob("*.arrow")
    os.truncate(path, 100) if change == "cut" else path.unlink()
    with pytest.raises(DataError, match=r"d: can't be opened: .*data-00000.arrow.*restore it"):
        open_samples(tmp_path / "d", "train")


def test_a_damaged_sample_is_found_when_it_is_read_and_by_a_deep_check(tmp_path, small_files):
    write_pairs(pairs(7), pairs(4, 1), tmp_path / "d", {})
    samples = open_samples(tmp_path / "d", "train")
    path = damage(samples, 4)
    for index, pair in enumerate(pairs(7)):
        if index == 4:
            with pytest.raises(UnreadableSample, match=f"{path} has been damaged"):
                samples.points(index)
        else:
            assert np.array_equal(samples.points(index)["target"], pair.target)
    (found,) = [sample for part in damaged_samples(samples) for sample in part]
    assert (found.index, found.name) == (4, "p\u00e4r 4")
    assert not open_samples(tmp_path / "d", "train").bad_samples(min_points=1)


def test_forked_processes_read_files_that_were_open_before(tmp_path):
    write_pairs(pairs(200), pairs(1, 1), tmp_path / "d", {})
    samples = open_samples(tmp_path / "d", "train")
    expected = [samples.points(index)["target"] for index in range(200)]
    with get_context("fork").Pool(2) as pool:
        read = pool.map(samples.points, range(200), chunksize=1)
    for points, clouds in zip(expected, read, strict=True):
        assert np.array_equal(points, clouds["target"])


def test_a_file_cut_short_after_the_start_concerns_only_the_samples_beyond_its_end(
    tmp_path, small_files
):
    write_pairs(pairs(30), pairs(4, 1), tmp_path / "d", {})
    samples = open_samples(tmp_path / "d", "train")
    os.truncate(samples.table.files[-1][0], 1000)
    assert len(samples.points(0)["source"])
    with pytest.raises(UnreadableSample, match=r"can't be read: .* has only 1,000 bytes"):
        samples.points(29)


@pytest.mark.slow
def test_one_of_several_processes_reads_the_points_and_the_others_wait(tmp_path):
    path = foreign(tmp_path / "d", 3000)
    code = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from pointup.datasets.opening import open_samples
print(len(open_samples(sys.argv[1], "train")), open_samples(sys.argv[1], "train").table.path)
"""
    words = [sys.executable, "-c", code, str(path)]
    processes = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = [process.communicate(timeout=120) for process in processes]
    assert len({out for out, _ in printed}) == 1 and printed[0][0]
    assert sum("reading all 3,000 samples once" in err for _, err in printed) == 1


def test_the_description_for_datasets_does_not_depend_on_when_it_was_written(tmp_path):
    for name in ("a", "b"):
        write_pairs(pairs(9), pairs(2, 1), tmp_path / name, {})
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    assert [(tmp_path / "a" / f).read_bytes() for f in files] == [
        (tmp_path / "b" / f).read_bytes() for f in files
    ]
    assert json.loads((tmp_path / "a" / "dataset_dict.json").read_text())["splits"]
