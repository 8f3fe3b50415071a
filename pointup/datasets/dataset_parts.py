"""Parts of a dataset that are written one by one, and made into a dataset without copying them.

Each part holds its own Arrow files and its own rows of the sample tables. The dataset links the
files (hard links), so that it is complete in itself: the parts can be deleted, `datasets` can open
it, and no bytes are copied. A directory that only lists its parts would break when one is moved.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pointup.datasets.indexing import index_part, parts_of
from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import FOLDER, store_rows, write_description, write_files
from pointup.datasets.sample_table import PLACE, SampleTable
from pointup.errors import DataError

PARTS = "parts.json"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class DatasetPart:
    """A part of a dataset.

    Attributes:
        number: position of the part in the dataset.
        files: the names of its Arrow files by split, relative to the folder of the part or dataset.
        num_rows: number of pairs by split.
        digests: digest of its pairs by split.
        facts: numbers and texts about it for the summary.
    """

    number: int
    files: dict[str, list[str]]
    num_rows: dict[str, int]
    digests: dict[str, str]
    facts: dict[str, Any]


def write_part(
    folder: Path, number: int, splits: Mapping[str, Iterable[Pair]], facts: dict[str, Any]
) -> None:
    """Write a part into the new directory `folder`, which appears when it is complete.

    `facts` may be filled while the pairs are made.
    """
    staging = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    files: dict[str, list[str]] = {}
    num_rows, digests = {}, {}
    for split, pairs in splits.items():
        (staging / split).mkdir(parents=True)
        digest = hashlib.blake2b(digest_size=16)
        written = write_files(pairs, staging / split, digest, prefix=f"data-{number:07}-")
        files[split] = [str(file.relative_to(staging)) for file in written]
        tables = [index_part(each) for each in parts_of(written)]
        num_rows[split] = sum(map(len, tables))
        digests[split] = digest.hexdigest()
        if tables:
            rows = pa.concat_tables(tables)
            with pa.ipc.new_file(str(staging / f"{split}.rows"), rows.schema) as writer:
                writer.write_table(rows)
    part = DatasetPart(number, files, num_rows, digests, facts)
    (staging / "part.json").write_text(json.dumps(asdict(part)))
    staging.rename(folder)


def read_part(folder: Path) -> DatasetPart:
    """The description of a part that `write_part` wrote."""
    return DatasetPart(**json.loads((folder / "part.json").read_text()))


@dataclass(frozen=True)
class PartSource:
    """Where the files and rows of a part are: in its own folder, or in a dataset of several parts.

    `first_rows` and `first_files` count the rows and files of the parts before it in the dataset.
    """

    part: DatasetPart
    folder: Path
    table_folder: Path | None = None
    first_rows: Mapping[str, int] | None = None
    first_files: Mapping[str, int] | None = None

    def rows(self, split: str, first_file: int) -> pa.Table | None:
        """Its rows of the sample table, with files numbered from `first_file`; None without any."""
        if not self.part.num_rows.get(split):
            return None
        shift = first_file
        if self.first_rows is None or self.first_files is None:
            with pa.memory_map(str(self.folder / f"{split}.rows")) as file:
                rows = pa.ipc.open_file(file).read_all()
        else:
            table = SampleTable(self.folder / FOLDER / f"{split}.arrow", self.folder)
            rows = table.rows(self.first_rows[split], self.part.num_rows[split])
            shift -= self.first_files[split]
        places = rows["place"].combine_chunks()
        values = places.flatten().to_numpy().reshape(-1, len(PLACE)).copy()
        values[:, 0] += shift
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), len(PLACE))
        return rows.set_column(rows.schema.get_field_index("place"), "place", column)


def parts_of_dataset(folder: Path) -> list[PartSource]:
    """The parts of a dataset that `assemble` made; none for other datasets."""
    if not (folder / PARTS).exists():
        return []
    sources = []
    rows, files = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    for values in json.loads((folder / PARTS).read_text()):
        part = DatasetPart(**values)
        sources.append(PartSource(part, folder, folder, dict(rows), dict(files)))
        for split in part.files:
            rows[split] += part.num_rows[split]
            files[split] += len(part.files[split])
    return sources


def assemble(sources: Sequence[PartSource], directory: Path, info: dict[str, Any]) -> bool:
    """Make a dataset of parts, in the order of their numbers, in the new directory `directory`.

    Links the files of the parts; returns whether it copied some instead, from another file system.
    A split without pairs is not stored. Raises DataError if a part occurs twice.
    """
    sources = sorted(sources, key=lambda source: source.part.number)
    numbers = [source.part.number for source in sources]
    for before, number in pairwise(numbers):
        if before == number:
            raise DataError(f"part {number} of the survey is in two of the inputs; give each once")
    contents: dict[str, str] = {}
    is_copied = False
    for split in SPLITS:
        digest = hashlib.blake2b(digest_size=16)
        (directory / split).mkdir(parents=True)
        files: list[Path] = []
        counts: list[int] = []
        for source in sources:
            digest.update(bytes.fromhex(source.part.digests[split]))
            counts.append(len(files))
            for name in source.part.files[split]:
                files.append(directory / name)
                is_copied |= _link(source.folder / name, files[-1])
        if not files:
            (directory / split).rmdir()
            continue

        def rows(split: str = split, counts: Sequence[int] = counts) -> Iterator[pa.Table]:
            for source, first_file in zip(sources, counts, strict=True):
                found = source.rows(split, first_file)
                if found is not None:
                    yield found

        contents[split] = digest.hexdigest()
        store_rows(directory, split, files, contents[split], rows())
    (directory / PARTS).write_text(json.dumps([asdict(source.part) for source in sources]))
    write_description(directory, contents, info)
    return is_copied


def _link(source: Path, target: Path) -> bool:
    """Link a file, or copy it where links are impossible; returns whether it was copied."""
    try:
        os.link(source, target)
        return False
    except OSError:
        shutil.copyfile(source, target)
        return True


def total(parts: Iterable[DatasetPart], fact: str) -> int:
    """The sum of a fact over parts."""
    return int(np.sum([part.facts[fact] for part in parts]))


def total_rows(parts: Iterable[DatasetPart], split: str) -> int:
    """The number of pairs of a split in parts."""
    return sum(part.num_rows[split] for part in parts)
