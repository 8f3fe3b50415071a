"""Writes points as text tables: XYZ, TXT and CSV, in the layout of the table that was read."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from pointup.io.cloud import ColumnWriter, ExtraDimension, PointCloud
from pointup.io.text_tables import TextHeader, axis_or_name


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
    attributes, the names in a comment.
    """

    def __init__(
        self, path: Path, like: PointCloud, extra_dimensions: Sequence[ExtraDimension] = ()
    ) -> None:
        super().__init__(path, like, extra_dimensions)
        suffix = path.suffix.lower()
        same_kind = like.path is not None and like.path.suffix.lower() == suffix
        if isinstance(like.header, TextHeader) and same_kind:
            self.header = like.header
        elif suffix == ".csv":
            self.header = TextHeader(",", "first line")
        else:
            self.header = TextHeader(" ", "comment" if len(self.columns) > 3 else "nowhere")
        written = {axis_or_name(name): name for name in self.header.names}
        kept = [name for name in written if name in self.columns]
        order = dict.fromkeys([*kept, *self.columns])
        self._titles = [written.get(name, name) for name in order]
        self.columns = {name: _text_type(self.columns[name]) for name in order}

    def _begin(self) -> None:
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

    def _end(self) -> None:
        pass


def _text_type(dtype: np.dtype) -> np.dtype:
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    # Arrow can't write 16-bit floats.
    return np.dtype(np.float32) if dtype == np.float16 else dtype
