"""Reads points from text tables: XYZ, TXT and CSV, with or without column names.

pyarrow parses the numbers. The layout is detected here, because CSV readers don't know the variants
of point files: column names in a comment, # and // as comment marks, decimal commas.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from pointup.disk import os_errors
from pointup.errors import FileError
from pointup.io.cloud import ColumnWriter, PointCloud, as_positions, storable, warn_once


@dataclass(frozen=True)
class TextHeader:
    """The layout of a table: its delimiter, its columns in order, and where their names are.

    `mark` begins a comment: "#" or "//". `decimal` is the decimal mark. `texts` are the columns of
    words, which are left out.
    """

    delimiter: str = " "
    names_in: Literal["first line", "comment", "nowhere"] = "nowhere"
    names: tuple[str, ...] = ()
    mark: str = "#"
    decimal: Literal[".", ","] = "."
    texts: tuple[str, ...] = ()


# Names of columns that surveyors give.
_AXES = {"easting": "x", "northing": "y", "elevation": "z"}
# Columns of files without names, by their extension: Open3D and benchmarks of shapes write them.
COLUMNS_OF = {".xyzn": ("nx", "ny", "nz"), ".xyzrgb": ("red", "green", "blue")}
# What R writes for a missing value.
_MISSING = "NA"
_MISSING_IN_BYTES = re.compile(rb"(?<![^ \t,;])NA(?![^ \t\r\n,;])")
COMMENT = re.compile("#|//")
DECIMAL_COMMA = re.compile(r"[+-]?\d+(,\d+)?([eE][+-]?\d+)?")
COMMENT_IN_BYTES = re.compile(rb"[ \t]*(?:#|//)[^\n]*")


def read_text(path: Path) -> PointCloud:
    """Read a table of numbers with columns x, y and z; other columns become attributes.

    Delimiters are commas, semicolons, tabs or blanks. Column names come from a first line without
    numbers, or from the comment above the first row if it has a name for each column, including x,
    y and z, or easting, northing and elevation. Without names, the first three columns are x, y, z
    and the others `column_4`, `column_5`, ..., or as in `COLUMNS_OF`. Columns of integers are
    int64, above it uint64, others float64. Named columns of words are left out with a warning.
    # and // begin a comment. With semicolons as delimiters, the decimal mark may be a comma. A
    delimiter at the end of the rows adds no column. A line before them may have their number.
    """
    text = read_bytes(path)
    header, start, number = _read_layout(path, text)
    if header.texts:
        warn_once(f"{path}: columns of words are left out: {', '.join(header.texts)}")
    if header.delimiter != "," and re.search(rb",\d", _without_comments(text[start:])):
        header = replace(header, decimal=",")
    columns = read_columns(path, text, start, header)
    if header.names_in == "nowhere" and len(header.names) > 3 and _counts(columns):
        first, second = columns["x"][:2]
        raise FileError(
            f"{path}: its first column counts {first:.0f}, {second:.0f}, ...; name the columns in "
            f"a first line, such as {','.join(['number', *'yxz', *header.names[4:]])}"
        )
    positions = as_positions([columns.pop(axis) for axis in "xyz"])
    # A string, since int() of thousands of digits is an error.
    if number and number.lstrip("0") != f"{len(positions)}":
        raise FileError(
            f"{path}: the line above its rows counts {number[:20]} points, but it has "
            f"{len(positions)}; export it again"
        )
    return PointCloud(positions, columns, header, path)


def _counts(columns: Mapping[str, np.ndarray]) -> bool:
    """Whether the first column, x, has numbers of points: 1, 2, 3 or 0, 1, 2, or any rising ones
    beside others with fractions."""
    x, y, z = (columns[axis] for axis in "xyz")
    step = np.diff(x)
    if len(x) < 3 or (x % 1).any() or not (step > 0).all():
        return False
    return bool((x[0] in (0, 1) and (step == 1).all()) or (y % 1).any() or (z % 1).any())


def read_bytes(path: Path) -> bytes:
    """Read a text file, without its byte order mark; UTF-16, of Windows, becomes UTF-8."""
    with os_errors(path, "read"):
        text = path.read_bytes()
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return text.decode("utf-16", errors="replace").encode()
    return text.removeprefix(codecs.BOM_UTF8)


def read_columns(path: Path, text: bytes, start: int, header: TextHeader) -> dict[str, np.ndarray]:
    """Parse the rows from byte `start` on; returns columns by the names of the header.

    x, y and z have lower-case names in the result. Raises FileError that names the line of an
    invalid row.
    """
    body = _without_comments(text[start:])
    if header.delimiter == " ":
        body = _single_blanks(body)
    if _MISSING.encode() in body:
        body = _MISSING_IN_BYTES.sub(b"nan", body)
    if not body.strip():
        raise FileError(f"{path}: no points in it; leave it out")
    columns = _parse(body, header)
    if columns is None and header.delimiter != " ":
        ends = re.compile(rb"[ ]*%b[ \t]*\r?$" % header.delimiter.encode(), re.MULTILINE)
        columns = _parse(ends.sub(b"", body), header)
    if columns is None:
        raise _row_error(path, text, start, header)
    return columns


def _without_comments(body: bytes) -> bytes:
    return COMMENT_IN_BYTES.sub(b"", body) if b"#" in body or b"//" in body else body


def _single_blanks(body: bytes) -> bytes:
    # Repeated replacement is twenty times as fast as a regular expression.
    body = body.replace(b"\r\n", b"\n").replace(b"\t", b" ")
    while b"  " in body:
        body = body.replace(b"  ", b" ")
    return body.replace(b"\n ", b"\n").replace(b" \n", b"\n").strip(b" ")


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line.decode("latin-1")


def _read_layout(path: Path, text: bytes) -> tuple[TextHeader, int, str]:
    """The header, where the rows start, and the number of rows, if a line before them has it."""
    start, comment, mark, first, number = 0, "", "#", "", ""
    for raw in io.BytesIO(text):
        line = _decoded(raw).strip()
        first = without_comment(line)
        if first and (number or not first.isdecimal()):
            break
        start += len(raw)
        if first:
            number, first = first, ""
            continue
        mark = "//" if line.startswith("//") else "#"
        comment = line.lstrip("#/ ")
    if not first:
        raise FileError(f"{path}: no points in it; leave it out")
    delimiter = _find_delimiter(first)
    fields = _split(first, delimiter)
    if not any(is_number(field, delimiter) for field in fields):
        names, start = [field.strip('"') for field in fields], start + len(raw)
        row = _first_row(text, start, delimiter)
        # R quotes the names of rows, and writes no name for their column.
        if len(row) == len(names) + 1 and row[0].startswith('"'):
            names.insert(0, "")
        if not names[-1] and not any(row[len(names) - 1 :]):
            names.pop()
        titles, texts = _checked_names(path, names, row, delimiter)
        return TextHeader(delimiter, "first line", titles, texts=texts), start, number
    if not fields[-1]:
        fields.pop()
    if len(fields) < 3:
        is_raster = first.lower().startswith("ncols")
        hint = ": it is a raster; give the points it was made of" if is_raster else ""
        raise FileError(
            f"{path}: {len(fields)} columns in {first[:40]!r}; at least x, y and z are needed{hint}"
        )
    for names in (_split(comment, delimiter), comment.split()):
        names = names if any(names[len(fields) :]) else names[: len(fields)]
        if len(names) == len(fields) and set("xyz") <= set(column_names(names)):
            titles, texts = _checked_names(path, names, fields, delimiter)
            return TextHeader(delimiter, "comment", titles, mark, texts=texts), start, number
    known = COLUMNS_OF.get(path.suffix.lower()) if len(fields) == 6 else None
    titles = _with_default_names([*"xyz", *(known or [""] * (len(fields) - 3))])
    return TextHeader(delimiter, "nowhere", titles), start, number


def _first_row(text: bytes, start: int, delimiter: str) -> list[str]:
    lines = io.BytesIO(text)
    lines.seek(start)
    rows = (without_comment(_decoded(line)) for line in lines)
    return _split(next(filter(None, rows), ""), delimiter)


def without_comment(line: str) -> str:
    """The part of a line before a comment, stripped."""
    return COMMENT.split(line, maxsplit=1)[0].strip()


def _find_delimiter(line: str) -> str:
    # Blanks between numbers with a decimal comma, which has a digit behind it.
    if len(line.split()) > 2 and all(DECIMAL_COMMA.fullmatch(word) for word in line.split()):
        return " "
    delimiter = next((mark for mark in ";,\t" if mark in line), " ")
    # Tabs and blanks may be mixed, but names between tabs may contain blanks.
    if delimiter == "\t" and len({is_number(field, "\t") for field in line.split("\t")}) > 1:
        return " "
    return delimiter


def _checked_names(
    path: Path, names: Sequence[str], row: Sequence[str], delimiter: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of all columns, and of those with a word in the first row."""
    lower = [name.lower() for name in names]
    axes = column_names(names)
    if not set("xyz") <= set(axes):
        raise FileError(
            f"{path}: the first line {' '.join(names)[:60]!r} holds neither numbers nor the column "
            "names x, y and z; add these names"
        )
    for name in lower:
        if name and lower.count(name) > 1:
            raise FileError(f"{path}: two columns are named {name!r}; rename one")
    titles = _with_default_names(names)
    texts = [
        title
        for title, axis, field in zip(titles, axes, row, strict=False)
        if axis not in set("xyz")
        and field not in ("", _MISSING)
        and not is_number(field, delimiter)
    ]
    return titles, tuple(texts)


def _with_default_names(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name or f"column_{i}" for i, name in enumerate(names, start=1))


def _split(line: str, delimiter: str) -> list[str]:
    if delimiter == " ":
        return line.split()
    try:
        fields = next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        fields = line.split(delimiter)
    return [field.strip() for field in fields]


def is_number(field: str, delimiter: str) -> bool:
    try:
        float(field if delimiter == "," else field.replace(",", "."))
    except ValueError:
        return False
    return True


def _parse(body: bytes, header: TextHeader) -> dict[str, np.ndarray] | None:
    """Columns by name, with lower-case x, y and z; None if a row is invalid."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    names = column_names(header.names)
    kept = [name for name in names if name not in header.texts]
    options = {
        # pyarrow infers a column's type from the first block, so one block should hold the table.
        "read_options": arrow_csv.ReadOptions(
            column_names=names, block_size=min(len(body) + 1, 1 << 30)
        ),
        "parse_options": arrow_csv.ParseOptions(delimiter=header.delimiter),
    }
    words: dict[str, list[str]] = {"null_values": [""], "true_values": [], "false_values": []}

    def parsed(types: Mapping[str, pa.DataType]) -> pa.Table | None:
        convert = arrow_csv.ConvertOptions(
            column_types=types, decimal_point=header.decimal, include_columns=kept, **words
        )
        with suppress(pa.ArrowException):
            return arrow_csv.read_csv(pa.BufferReader(body), convert_options=convert, **options)
        return None

    table = parsed({})
    if table is None or not {column.type for column in table.columns} <= {pa.int64(), pa.float64()}:
        table = parsed(dict.fromkeys(kept, pa.float64()))
    if table is None or any(column.null_count for column in table.columns):
        return None
    columns = {name: table[name].to_numpy() for name in kept}
    for name in columns.keys() - set("xyz"):
        # pyarrow takes integers of more than 63 bits for floats.
        if columns[name].dtype == np.float64 and 2.0**63 <= columns[name].max() <= 2.0**64:
            integers = parsed({name: pa.uint64()})
            columns[name] = columns[name] if integers is None else integers[name].to_numpy()
    return columns


def axis_or_name(name: str) -> str:
    return name.lower() if name.lower() in ("x", "y", "z") else name


def column_names(titles: Sequence[str]) -> list[str]:
    """Names of columns with these titles: x, y, z for the coordinates."""
    names = [axis_or_name(title) for title in titles]
    if set("xyz") <= set(names):
        return names
    return [_AXES.get(name.lower(), name) for name in names]


def _row_error(path: Path, text: bytes, start: int, header: TextHeader) -> FileError:
    first_line = text[:start].count(b"\n") + 1
    for number, raw in enumerate(io.BytesIO(text[start:]), start=first_line):
        line = without_comment(_decoded(raw))
        fields = _split(line, header.delimiter)
        if len(fields) == len(header.names) + 1 and not fields[-1]:
            fields.pop()
        if line and len(fields) != len(header.names):
            return FileError(
                f"{path}: line {number} has {len(fields)} columns, the lines before it "
                f"{len(header.names)}; correct or remove it"
            )
        for name, field in zip(header.names, fields, strict=False) if line else []:
            is_known = name in header.texts or field == _MISSING
            if not is_known and not is_number(field, header.delimiter):
                return FileError(
                    f"{path}: line {number}: {field[:40]!r} is not a number; correct it"
                )
    return FileError(f"{path}: can't be read as a table of numbers; export it again")


def write_rows(
    stream: BinaryIO,
    columns: Mapping[str, np.ndarray],
    delimiter: str,
    decimal: Literal[".", ","] = ".",
) -> None:
    """Append rows of text; each number has enough digits to be read back exactly."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    table = pa.table({name: np.ascontiguousarray(values) for name, values in columns.items()})
    options = arrow_csv.WriteOptions(include_header=False, delimiter=delimiter)
    if decimal == ".":
        arrow_csv.write_csv(table, stream, options)
        return
    rows = io.BytesIO()
    arrow_csv.write_csv(table, rows, options)
    # All columns are numbers, so that every point is a decimal mark.
    stream.write(rows.getvalue().replace(b".", b","))


class TextWriter(ColumnWriter):
    """Writes a table with the layout of the file of `like`, if that has the same extension.

    Otherwise CSV has commas and a line of names. XYZ and TXT have blanks, and if there are
    attributes, the names in a comment. If columns are added to a table without names, all get one.
    """

    def _lay_out(self, like: PointCloud) -> None:
        super()._lay_out(like)
        suffix = self.path.suffix.lower()
        same_kind = like.path is not None and like.path.suffix.lower() == suffix
        if isinstance(like.header, TextHeader) and same_kind:
            self.header = like.header
        elif suffix == ".csv":
            self.header = TextHeader(",", "first line")
        else:
            self.header = TextHeader(" ", "comment" if len(self.columns) > 3 else "nowhere")
        names = self.header.names
        written = dict(zip(column_names(names), names, strict=True))
        kept = [name for name in written if name in self.columns]
        order = dict.fromkeys([*kept, *self.columns])
        if self.header.names_in == "nowhere" and len(order) > max(3, len(kept)):
            self.header = replace(self.header, names_in="comment")
        self._titles = [written.get(name, name) for name in order]
        self.columns = {name: storable(self.columns[name]) for name in order}

    def _write_header(self) -> None:
        if self.header.names_in == "nowhere":
            return
        titles = self._titles
        if self.header.delimiter == " ":
            titles = ["_".join(title.split()) for title in titles]
        line = io.StringIO()
        csv.writer(line, delimiter=self.header.delimiter, lineterminator="\n").writerow(titles)
        mark = {"#": "# ", "//": "//"}[self.header.mark]
        comment = mark if self.header.names_in == "comment" else ""
        self._stream.write((comment + line.getvalue()).encode())

    def _append_columns(self, columns: dict[str, np.ndarray]) -> None:
        write_rows(self._stream, columns, self.header.delimiter, self.header.decimal)
