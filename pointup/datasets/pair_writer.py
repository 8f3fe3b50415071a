"""Writes pair datasets from iterators of pairs, whole or in parts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pyarrow as pa

from pointup.datasets.checks import index_part, index_parts, parts_of
from pointup.datasets.columns import FEATURES, pack_points, rounded_mean
from pointup.datasets.pair import POINT_COLUMNS, Pair
from pointup.datasets.samples import PLACE, SampleTable, write_sample_table
from pointup.disk import written_whole
from pointup.errors import DataError, FileError

if TYPE_CHECKING:
    from pointup.geometry.surfaces import Surface

BYTES_PER_BATCH = 1 << 25
BYTES_PER_FILE = 1 << 29
FOLDER = "samples"
"""Folder of the sample tables in a dataset."""
MAX_ROUNDING = 1e-3
"""Largest part of the point spacing by which the conversion to float32 may move a point."""


def write_pairs(
    train: Iterable[Pair],
    validation: Iterable[Pair],
    directory: str | Path,
    info: dict[str, Any],
    surfaces: Mapping[str, Surface] | None = None,
) -> None:
    """Write a pair dataset that `open_samples` and `datasets.load_from_disk` can read.

    Pairs are consumed one by one, so that the dataset may be larger than memory. `info` describes
    how the pairs were made. It is written to `pointup.json`, together with `contents`, a digest of
    each split, by which a resumed run recognizes its data. What training must know of each sample
    is written to `samples/SPLIT.arrow` (`pointup.datasets.samples`). `surfaces` are written to
    `surfaces/NAME`; their vertices are relative to the origin of the pair, as its points. Without
    validation pairs there is no validation split. The directory appears when it is complete.

    Points are stored as float32. Where that would move float64 points by more than a thousandth of
    their spacing, such as map coordinates, the points of the pair are stored relative to the
    rounded mean of its source, which is added to its origin.

    Raises FileError if the directory exists and is not empty. Raises DataError for a pair of a
    wrong shape, for a pair with a surface whose points float32 would move, for values of `info`
    that are not JSON, and if there are no training pairs.
    """
    directory = Path(directory)
    _check_info(info)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileError(f"{directory}: exists already; delete it or write to another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(directory, is_sole_writer=True) as staging:
        staging.mkdir()
        contents = {}
        for split, pairs in (("train", train), ("validation", validation)):
            if digest := _write_split(pairs, staging, split):
                contents[split] = digest
        if "train" not in contents:
            raise DataError(f"{directory}: there are no training pairs to write")
        for name, surface in (surfaces or {}).items():
            (staging / "surfaces").mkdir(exist_ok=True)
            surface.save(staging / "surfaces" / name)
        write_description(staging, contents, info)


def _check_info(info: dict[str, Any]) -> None:
    """Raise DataError for values that JSON does not have, before any pair is made."""
    for key, value in info.items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError) as error:
            raise DataError(
                f"info: the value of {key!r} can't be written as JSON ({error}): convert it with "
                "str(), int(), float() or .tolist()"
            ) from error


def write_description(directory: Path, contents: dict[str, str], info: dict[str, Any]) -> None:
    """Write pointup.json, and the names of the splits for `datasets`."""
    info = {**info, "contents": contents}
    (directory / "pointup.json").write_text(json.dumps(info, indent=2) + "\n")
    (directory / "dataset_dict.json").write_text(json.dumps({"splits": list(contents)}))


def _write_split(pairs: Iterable[Pair], directory: Path, split: str) -> str:
    """Write the pairs of a split and return their digest; "" and no folder without pairs."""
    digest = hashlib.blake2b(digest_size=16)
    (directory / split).mkdir()
    files = write_files(pairs, directory / split, digest)
    if not files:
        (directory / split).rmdir()
        return ""
    rows = index_parts(parts_of(files), num_workers=1)
    store_rows(directory, split, files, digest.hexdigest(), rows)
    return digest.hexdigest()


def write_files(
    pairs: Iterable[Pair], folder: Path, digest: hashlib.blake2b, prefix: str = "data-"
) -> list[Path]:
    """Write pairs to Arrow stream files of about `BYTES_PER_FILE`, and add them to the digest.

    The names of the files begin with `prefix`. `write_pairs` says how points are stored.
    """
    schema = FEATURES.arrow_schema
    files: list[Path] = []
    groups = _groups(map(_with_float32_digits, pairs))
    group = next(groups, None)
    while group is not None:
        files.append(folder / f"{prefix}{len(files):05}.arrow")
        with pa.OSFile(str(files[-1]), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            while group is not None and file.tell() < BYTES_PER_FILE:
                stream.write_batch(pa.record_batch(_columns(group), schema=schema))
                for pair in group:
                    _digest_pair(pair, digest)
                group = next(groups, None)
    return files


def store_rows(
    directory: Path, split: str, files: Sequence[Path], digest: str, rows: Iterable[pa.Table]
) -> None:
    """Write the sample table of the files of a split, and their description for `datasets`.

    The description is that of `save_to_disk`. It is written here, because `save_to_disk` would copy
    all points once more.
    """
    folder = directory / split
    state: dict[str, Any] = {
        "_data_files": [{"filename": str(file.relative_to(folder))} for file in files],
        "_fingerprint": digest,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    datasets.DatasetInfo(features=FEATURES).write_to_directory(str(folder))
    description = {
        "fingerprint": digest,
        "files": [[str(file.relative_to(directory)), file.stat().st_size] for file in files],
    }
    (directory / FOLDER).mkdir(exist_ok=True)
    write_sample_table(directory / FOLDER / f"{split}.arrow", rows, description)


def _digest_pair(pair: Pair, digest: hashlib.blake2b) -> None:
    clouds = pair.clouds()
    texts = [pair.name, pair.surface, bool(pair.vertical), [len(clouds[c]) for c in POINT_COLUMNS]]
    digest.update(json.dumps(texts).encode())
    if pair.core is not None:
        digest.update(np.asarray(pair.core, np.float64).tobytes())
    digest.update(np.asarray(pair.origin, np.float64).tobytes())
    for column in POINT_COLUMNS:
        digest.update(np.asarray(clouds[column], np.float32).tobytes())


def _with_float32_digits(pair: Pair) -> Pair:
    """The pair, or the same pair relative to the mean of its source if float32 moved its points."""
    clouds = pair.clouds()
    places = {name: clouds[name] for name in POINT_COLUMNS if name != "target_normals"}
    moved = max(map(_rounding, places.values()))
    if moved == 0 or moved <= MAX_ROUNDING * _spacing(clouds["target"]):
        return pair
    centre = rounded_mean(np.asarray(clouds["source"], np.float64))
    if pair.surface and centre.any():
        raise DataError(
            f"{pair.name}: as float32, its points would move by up to {moved:.2g}: subtract "
            f"{centre.tolist()} from its points and its surface, and add it to its origin"
        )
    centred: dict[str, Any] = {
        name: points - centre for name, points in places.items() if len(points)
    }
    return replace(pair, origin=np.asarray(pair.origin, np.float64) + centre, **centred)


def _rounding(points: np.ndarray) -> float:
    """The largest distance on an axis by which float32 moves a finite point of a cloud (N, 3)."""
    if points.dtype == np.float32:
        return 0.0
    points = _finite(points)
    with np.errstate(over="ignore"):
        return float(np.abs(points - points.astype(np.float32)).max(initial=0.0))


def _spacing(points: np.ndarray) -> float:
    """About the point spacing of a cloud (N, 3) on a surface; 0 without points."""
    points = _finite(points)
    return float(np.ptp(points, axis=0).max() / np.sqrt(len(points))) if len(points) else 0.0


def _finite(points: np.ndarray) -> np.ndarray:
    points = np.asarray(points, np.float64)
    return points[np.isfinite(points).all(axis=1)]


def _groups(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    group: list[Pair] = []
    num_bytes = 0
    for pair in pairs:
        group.append(pair)
        num_bytes += 12 * sum(len(points) for points in pair.clouds().values())
        if num_bytes >= BYTES_PER_BATCH:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _columns(group: Sequence[Pair]) -> list[pa.Array]:
    clouds = [pair.clouds() for pair in group]
    columns: dict[str, pa.Array] = {
        column: pack_points([c[column] for c in clouds]) for column in POINT_COLUMNS
    }
    origins = np.stack([np.asarray(pair.origin, np.float64).reshape(3) for pair in group])
    columns |= {
        "name": pa.array([pair.name for pair in group], pa.string()),
        "origin": pa.FixedSizeListArray.from_arrays(pa.array(origins.reshape(-1)), 3),
        "num_source": pa.array([len(pair.source) for pair in group], pa.int32()),
        "num_target": pa.array([len(pair.target) for pair in group], pa.int32()),
        "vertical": pa.array([bool(pair.vertical) for pair in group], pa.bool_()),
        "surface": pa.array([pair.surface for pair in group], pa.string()),
        "core": pa.array(
            [[] if pair.core is None else pair.core.reshape(-1).tolist() for pair in group],
            pa.list_(pa.float64()),
        ),
    }
    return [columns[name] for name in FEATURES]


# Parts of a dataset that are written one by one, and made into a dataset without copying them.
#
# Each part holds its own Arrow files and its own rows of the sample tables. The dataset links the
# files (hard links), so that it is complete in itself: the parts can be deleted, `datasets` can
# open it, and no bytes are copied. A directory that only lists its parts would break when one is
# moved.

PARTS = "parts.json"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class DatasetPart:
    """A part of a dataset.

    Attributes:
        number: position of the part in the dataset; None for the only part of one.
        files: the names of its Arrow files by split, relative to the folder of the part or dataset.
        num_rows: number of pairs by split.
        digests: digest of its pairs by split.
        facts: numbers and texts about it for the summary.
    """

    number: int | None
    files: dict[str, list[str]]
    num_rows: dict[str, int]
    digests: dict[str, str]
    facts: dict[str, Any]


def write_part(
    folder: Path, number: int | None, splits: Mapping[str, Iterable[Pair]], facts: dict[str, Any]
) -> None:
    """Write a part into the new directory `folder`, which appears when it is complete.

    `facts` may be filled while the pairs are made.
    """
    prefix = "data-" if number is None else f"data-{number:07}-"
    files: dict[str, list[str]] = {}
    num_rows, digests = {}, {}
    with written_whole(folder) as staging:
        for split, pairs in splits.items():
            (staging / split).mkdir(parents=True)
            digest = hashlib.blake2b(digest_size=16)
            written = write_files(pairs, staging / split, digest, prefix)
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
        sources.append(PartSource(part, folder, dict(rows), dict(files)))
        for split in part.files:
            rows[split] += part.num_rows[split]
            files[split] += len(part.files[split])
    return sources


def assemble(sources: Sequence[PartSource], directory: Path, info: dict[str, Any]) -> bool:
    """Make a dataset of parts, in the order of their numbers, in the new directory `directory`.

    Links the files of the parts; returns whether it copied some instead, from another file system.
    A split without pairs is not stored. A dataset of an only part is as if `write_pairs` wrote it.
    Raises DataError if a part occurs twice.
    """
    sources = sorted(sources, key=lambda source: source.part.number or 0)
    numbers = [source.part.number for source in sources]
    for before, number in pairwise(numbers):
        if before == number:
            raise DataError(f"part {number} of the survey is in two of the inputs; give each once")
    is_only = numbers == [None]
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

        contents[split] = sources[0].part.digests[split] if is_only else digest.hexdigest()
        store_rows(directory, split, files, contents[split], rows())
    if not is_only:
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
