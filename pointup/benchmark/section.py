"""A section of the benchmark: how long it measures, its table, its changes since an earlier run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from pointup.errors import FileError
from pointup.evaluation.report import aligned

Row = dict[str, Any]
Result = TypeVar("Result")
MOST_ROUNDS = 7
CHANGED = 0.05


@dataclass(frozen=True)
class Effort:
    """Extent and device of the measurements."""

    quick: bool
    """Small sizes and few rounds: all sections together take less than a minute."""
    device: torch.device

    def repeat(self, work: Callable[[], Result]) -> list[Result]:
        """Results of up to `MOST_ROUNDS` calls of `work`, of which the last begins within 1 s, or
        10 s if not `quick`."""
        end = time.perf_counter() + (1.0 if self.quick else 10.0)
        results = [work()]
        while len(results) < MOST_ROUNDS and time.perf_counter() < end:
            results.append(work())
        return results


@dataclass(frozen=True)
class Column:
    """A column of a table, which shows `name` of each row."""

    name: str
    title: str
    format: str = ""
    better: Literal["higher", "lower"] | None = None
    """Direction in which a figure improves; None for columns that are not compared."""
    is_key: bool = False
    """Whether the column identifies the row, in this run and in an earlier one."""

    def show(self, row: Row) -> str:
        value = row.get(self.name)
        return "-" if value is None else format(value, self.format)


@dataclass(frozen=True)
class Section:
    """One table of the benchmark: its measurement and its columns."""

    name: str
    title: str
    columns: Sequence[Column]
    measure: Callable[[Effort], Iterator[Row]]
    note: str = ""

    def table(self, rows: Sequence[Row]) -> str:
        lines = [[column.title for column in self.columns]]
        lines += [[column.show(row) for column in self.columns] for row in rows]
        return "\n".join(aligned(lines, ["<" if c.is_key else ">" for c in self.columns]))

    def changes(self, before: Sequence[Row], after: Sequence[Row]) -> list[str]:
        """One line for each figure that changed by more than 5 %."""

        def key(row: Row) -> str:
            return ", ".join(column.show(row) for column in self.columns if column.is_key)

        old = {key(row): row for row in before}
        lines = []
        for row in after:
            earlier = old.get(key(row), {})
            for column in self.columns:
                was, is_now = earlier.get(column.name), row.get(column.name)
                if column.better is None or not was or is_now is None:
                    continue
                factor = is_now / was
                if abs(factor - 1) > CHANGED:
                    verdict = "better" if (factor > 1) == (column.better == "higher") else "worse"
                    lines.append(
                        f"{key(row)}: {column.title} {column.show(earlier)} -> "
                        f"{column.show(row)}, {factor:.2f}x, {verdict}"
                    )
        return lines


def read_results(path: Path) -> Mapping[str, Any]:
    """Read a file of `bench --json`. Raises FileError for a missing file or other content."""
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: can't be read ({error}); name a file of bench --json") from error
    if not isinstance(results, dict) or not results.keys() >= {"machine", "sections"}:
        raise FileError(f"{path}: not written by pointup bench; name a file of bench --json")
    return results
