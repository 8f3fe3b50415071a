"""A dataset is opened as it is stored; it reads and writes no files out of its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict

from pointup.datasets.opening import open_samples
from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import FOLDER, write_pairs
from pointup.errors import DataError


def cloud(number: int) -> np.ndarray:
    return np.random.default_rng(number).random((number, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("POINTUP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A dataset, beside another one of the same form, `other`."""
    for name, size in (("pairs", 10), ("other", 15)):
        pairs = [Pair(f"{name}{i}", cloud(size + i), cloud(40)) for i in range(3)]
        write_pairs(pairs, pairs[:1], tmp_path / name, {})
    return tmp_path / "pairs"


def named_elsewhere(folder: Path, file: str, keys: list[str | int], value: str) -> None:
    """Replace a value of a JSON file of the dataset."""
    entry = info = json.loads((folder / file).read_text())
    for key in keys[:-1]:
        entry = entry[key]
    entry[keys[-1]] = value
    (folder / file).write_text(json.dumps(info))


@pytest.mark.parametrize("is_absolute", [False, True])
@pytest.mark.parametrize("what", ["split", "data", "patterns"])
def test_files_that_a_dataset_names_out_of_its_folder_are_refused(what, is_absolute, folder):
    other = folder.parent / "other"
    outside = str(other) if is_absolute else "../other"
    if what == "split":
        named_elsewhere(folder, "dataset_dict.json", ["splits", 0], f"{outside}/train")
    elif what == "data":
        outside = outside if is_absolute else f"../{outside}"
        (file,) = (other / "train").glob("*.arrow")
        keys = ["_data_files", 0, "filename"]
        named_elsewhere(folder, "train/state.json", keys, f"{outside}/train/{file.name}")
    else:
        shutil.rmtree(folder)
        folder.mkdir()
        table = pa.table({"source": [cloud(9).tolist()], "target": [cloud(9).tolist()]})
        for path in (folder, other):
            pa.parquet.write_table(table, path / "train.parquet")
        pattern = f"configs:\n- config_name: default\n  data_files: {outside}/*.parquet\n"
        (folder / "README.md").write_text(f"---\n{pattern}---\n")
    with pytest.raises(DataError, match=r"names the file .*other.*, which is not in"):
        open_samples(folder, "train")


def test_an_empty_split_is_named(tmp_path):
    rows = Dataset.from_dict({"source": [cloud(9).tolist()] * 2, "target": [cloud(9).tolist()] * 2})
    stored = DatasetDict(train=rows, validation=rows.select([]))
    stored.save_to_disk(tmp_path / "own")
    with pytest.raises(DataError, match=r"own: its split 'validation' is empty; store it without"):
        open_samples(tmp_path / "own", "train")


def test_a_sample_table_of_files_elsewhere_is_not_used(folder):
    path = folder / FOLDER / "train.arrow"
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    description = json.loads(table.schema.metadata[b"pointup"])
    (file,) = (folder.parent / "other" / "train").glob("*.arrow")
    description["files"] = [[f"../other/train/{file.name}", file.stat().st_size]]
    metadata = {"pointup": json.dumps(description)}
    rows = table.replace_schema_metadata(metadata).combine_chunks()
    path.unlink()
    with pa.ipc.new_file(str(path), rows.schema) as writer:
        writer.write_table(rows)
    samples = open_samples(folder, "train")
    assert all(file.parent == folder / "train" for file, _ in samples.table.files)
    assert samples.pair(1).source.tolist() == cloud(11).tolist()


@pytest.mark.parametrize("what", [FOLDER, f"{FOLDER}/train.arrow", f"{FOLDER}/train.lock"])
def test_nothing_is_written_through_links_in_a_dataset(what, folder, cache):
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    for name in ("train.arrow", "train.lock"):
        (elsewhere / name).write_text("precious")
    shutil.rmtree(folder / FOLDER)
    if what != FOLDER:
        (folder / FOLDER).mkdir()
    (folder / what).symlink_to(elsewhere if what == FOLDER else elsewhere / Path(what).name)
    assert len(open_samples(folder, "train")) == 3
    assert {file.read_text() for file in elsewhere.iterdir()} == {"precious"}
    assert len(list(elsewhere.iterdir())) == 2
    assert list((cache / FOLDER).glob("*-train.arrow"))
