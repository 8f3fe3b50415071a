"""Tables of the benchmark: printed line by line, stored as JSON, compared with an earlier run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pointup.benchmark.timing import Effort
from pointup.disk import os_errors, write_text
from pointup.errors import FileError

Row = dict[str, Any]
Better = Literal["higher", "lower"]
CHANGED = 0.05


@dataclass(frozen=True)
class Column:
    """A column of a table: a figure, or a part of the row's key."""

    name: str
    """Name in the JSON."""
    title: str
    format: str = ""
    better: Better | None = None
    """Direction in which a figure improves; None for columns that are not compared."""
    is_key: bool = False
    """Whether the column identifies the row."""
    width: int = 8

    def show(self, value: Any) -> str:
        return "-" if value is None else format(value, self.format)


@dataclass(frozen=True)
class Section:
    """One table of the benchmark: its measurement and its columns."""

    name: str
    title: str
    columns: Sequence[Column]
    measure: Callable[[Effort], Iterator[Row]]
    """Yields the rows, each as soon as it is measured."""
    note: str = ""

    def widths(self) -> list[int]:
        return [max(len(column.title), column.width) for column in self.columns]

    def head(self) -> str:
        return _line([column.title for column in self.columns], self.columns, self.widths())

    def line(self, row: Row) -> str:
        cells = [column.show(row.get(column.name)) for column in self.columns]
        line = _line(cells, self.columns, self.widths())
        return f"{line}  left out: {row['left_out']}" if "left_out" in row else line

    def key(self, row: Row) -> tuple[str, ...]:
        """Identifies a row within its table, in this run and in an earlier one."""
        return tuple(column.show(row.get(column.name)) for column in self.columns if column.is_key)

    def changes(self, before: Sequence[Row], after: Sequence[Row]) -> list[str]:
        """One line per figure that changed by more than 5 %, and per row that is new or missing."""
        old = {self.key(row): row for row in before}
        lines = []
        for row in after:
            key = self.key(row)
            name = ", ".join(key)
            if key not in old:
                lines.append(f"{name}: new")
                continue
            for column in self.columns:
                was, now = old[key].get(column.name), row.get(column.name)
                if column.better is None or not was or now is None:
                    continue
                factor = now / was
                if abs(factor - 1) > CHANGED:
                    verdict = "better" if (factor > 1) == (column.better == "higher") else "worse"
                    lines.append(
                        f"{name}: {column.title} {column.show(was)} -> {column.show(now)}, "
                        f"{factor:.2f}x, {verdict}"
                    )
        gone = old.keys() - {self.key(row) for row in after}
        return lines + [f"{', '.join(key)}: not measured now" for key in old if key in gone]


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    return "  ".join(
        f"{cell:{'<' if column.is_key else '>'}{width}}"
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ).rstrip()


def read_results(path: Path) -> Mapping[str, Any]:
    """Read a file of `write_results`. Raises FileError for a missing file or other content."""
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: can't be read ({error}); name a file of bench --json") from error
    if not isinstance(results, dict) or not all(
        isinstance(results.get(name), dict) for name in ("machine", "sections")
    ):
        raise FileError(f"{path}: not written by pointup bench; name a file of bench --json")
    return results


def check_results_path(path: Path) -> None:
    """Raise FileError where `write_results` can't write. Call it before measuring."""
    if not path.parent.is_dir():
        raise FileError(f"{path}: there is no folder {path.parent}; make it")
    with os_errors(path, "written"):
        if path.is_dir():
            raise FileError(f"{path}: is a folder; name a file in it")
        tempfile.TemporaryFile(dir=path.parent).close()


def write_results(path: Path, machine: Mapping[str, Any], sections: Mapping[str, Any]) -> None:
    """Write the measurements as JSON, atomically. Raises FileError where that fails."""
    write_text(path, json.dumps({"machine": machine, "sections": sections}, indent=2) + "\n")
