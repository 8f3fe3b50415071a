"""Tables of the benchmark: printed line by line, stored as JSON, compared with an earlier run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pointup.benchmark.timing import Effort
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
        return _line(cells, self.columns, self.widths())

    def key(self, row: Row) -> tuple[str, ...]:
        """Identifies a row within its table, in this run and in an earlier one."""
        return tuple(column.show(row.get(column.name)) for column in self.columns if column.is_key)

    def changes(self, before: Sequence[Row], after: Sequence[Row]) -> list[str]:
        """One line for each figure that changed by more than 5 %."""
        old = {self.key(row): row for row in before}
        lines = []
        for row in after:
            key = self.key(row)
            for column in self.columns:
                was, now = old.get(key, {}).get(column.name), row.get(column.name)
                if column.better is None or not was or now is None:
                    continue
                factor = now / was
                if abs(factor - 1) > CHANGED:
                    verdict = "better" if (factor > 1) == (column.better == "higher") else "worse"
                    lines.append(
                        f"{', '.join(key)}: {column.title} {column.show(was)} -> "
                        f"{column.show(now)}, {factor:.2f}x, {verdict}"
                    )
        return lines


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    return "  ".join(
        f"{cell:{'<' if column.is_key else '>'}{width}}"
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ).rstrip()


def read_results(path: Path) -> Mapping[str, Any]:
    """Read a file of `bench --json`. Raises FileError for a missing file or other content."""
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: can't be read ({error}); name a file of bench --json") from error
    if not isinstance(results, dict) or not results.keys() >= {"machine", "sections"}:
        raise FileError(f"{path}: not written by pointup bench; name a file of bench --json")
    return results
