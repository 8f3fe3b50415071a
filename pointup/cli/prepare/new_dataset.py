"""Common part of all `pointup prepare` commands: options, scratch directory, summary."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

import pointup
from pointup.datasets.interrupts import interrupts_held_back, stopping_as_interrupts
from pointup.datasets.workers import call_each, end_workers_except
from pointup.errors import ConfigError, DataError, FileError, PointupError

if TYPE_CHECKING:
    from pointup.datasets.pair import Pair
    from pointup.geometry.surfaces import Surface

Result = TypeVar("Result")
# A note is printed if the median pair has fewer source points than this.
FEW_POINTS = 100


@dataclass(frozen=True, kw_only=True)
class NewDataset:
    """Output directory and split of the new dataset."""

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="DIR")]
    """Directory of the new dataset. It appears when the dataset is complete."""
    overwrite: bool = False
    """Replace an existing dataset."""
    validation: float = 0.1
    """Share of the pairs for validation, from 0 (none) to below 1. Whole blocks of tiles or whole
    shapes are held out."""
    seed: int = 0
    """Seed of all random numbers. The dataset does not depend on the number of workers."""
    num_workers: int = min(8, os.cpu_count() or 1)
    """Number of worker processes. By default the number of cores, at most 8."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ConfigError(f"--validation {self.validation}: must be at least 0 and below 1")
        if self.seed < 0 or self.num_workers < 1:
            raise ConfigError(
                f"--seed {self.seed} --num-workers {self.num_workers}: the seed must be at "
                "least 0, the number of workers at least 1"
            )

    @contextmanager
    def making(self) -> Iterator[Making]:
        """Create a scratch directory beside the output, removed at the end; yields the writer."""
        import datasets

        self._check_output()
        # pointup shows its own progress.
        datasets.disable_progress_bars()
        self.output.parent.mkdir(parents=True, exist_ok=True)
        others = active_children()
        with stopping_as_interrupts():
            with interrupts_held_back():
                scratch = Path(mkdtemp(prefix=f".{self.output.name}-", dir=self.output.parent))
            try:
                yield Making(self, scratch)
            finally:
                with interrupts_held_back():
                    # Workers that still write would create the removed directory again.
                    end_workers_except(others)
                    shutil.rmtree(scratch)

    def _check_output(self) -> None:
        if not self.output.exists():
            return
        if not self.output.is_dir():
            raise FileError(f"{self.output}: is a file; name a directory")
        if not any(self.output.iterdir()):
            return
        if not self.overwrite:
            raise FileError(f"{self.output}: is there already; add --overwrite to replace it")
        if not (self.output / "pointup.json").exists():
            raise FileError(f"{self.output}: holds something else than a pair dataset; delete it")


@dataclass
class Making:
    """A dataset that is being made: scratch directory, left-out inputs, workers, writer."""

    options: NewDataset
    scratch: Path
    left_out: list[str] = field(default_factory=list)
    strip: str = ""
    """Remark for the summary on the strip that is left out around validation tiles."""
    remedy: str = ""
    """Remedy for the error if no training pairs are left."""
    started: float = field(default_factory=time.monotonic)

    @property
    def unfinished(self) -> Path:
        """Directory of the incomplete dataset; `publish` moves it to the output directory."""
        return self.scratch / "dataset"

    def each(
        self, calls: Iterable[Callable[[], Result]], num_calls: int, title: str
    ) -> Iterator[Result]:
        """Results of calls in worker processes, with a progress bar; errors go to `left_out`."""
        for result in self.progress(
            call_each(calls, min(self.options.num_workers, num_calls)), num_calls, title
        ):
            if isinstance(result, PointupError):
                self.left_out.append(str(result))
            else:
                yield result

    def progress(self, items: Iterable[Result], total: int, title: str) -> Iterator[Result]:
        from tqdm import tqdm

        yield from tqdm(items, desc=title, total=total, leave=False, disable=None, mininterval=0.5)

    def write(
        self,
        train: Iterable[Pair],
        validation: Iterable[Pair],
        info: dict[str, Any],
        surfaces: Mapping[str, Surface] | None = None,
    ) -> int:
        """Write the pairs and publish the dataset. Returns the exit status."""
        from pointup.datasets.pair_writer import write_pairs

        info = {"made_by": f"pointup {pointup.__version__} {info.pop('command')}", **info}
        info.setdefault("validation", self.options.validation)
        info["seed"] = self.options.seed
        # Paths become text, and tuples lists.
        info = json.loads(json.dumps(info, default=str))
        # Inputs are left out while the pairs are written, so that the list is filled later.
        info["left_out"] = self.left_out
        write_pairs(self._some(train), validation, self.unfinished, info, surfaces)
        return self.publish()

    def publish(self) -> int:
        """Move the dataset to the output directory, and print the summary and what was left out.

        Returns the exit status: 1 if anything was left out.
        """
        output = self.options.output
        with interrupts_held_back():
            if output.exists():
                output.rename(self.scratch / "old")
            self.unfinished.rename(output)
        self._print_summary()
        for reason in self.left_out:
            print(f"pointup: left out: {reason}", file=sys.stderr)
        return int(bool(self.left_out))

    def nothing_usable(self, remedy: str) -> DataError:
        """The error for a dataset without pairs, with the reason of the first left-out input."""
        return DataError(": ".join([remedy, *self.left_out[:1]]))

    def _some(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        any_pair = False
        for pair in pairs:
            any_pair = True
            yield pair
        if not any_pair:
            remedy = f"; {self.remedy}" if self.remedy else ""
            raise self.nothing_usable(f"no training pairs are left{remedy}")

    def _print_summary(self) -> None:
        import datasets
        import numpy as np

        from pointup.training.next_commands import training_command

        output, seconds = self.options.output, time.monotonic() - self.started
        splits = datasets.load_from_disk(str(output))
        sizes_of = {
            name: np.column_stack([split["num_source"][:], split["num_target"][:]])
            for name, split in splits.items()
        }
        sizes = np.concatenate(list(sizes_of.values()))
        numbers = ", ".join(f"{len(split):,} {name}" for name, split in sizes_of.items())
        print(
            f"{output}: {len(sizes):,} pairs ({numbers}), {sizes.sum():,} points, {seconds:,.1f} s"
        )
        source, target = np.median(sizes, axis=0)
        ratio = np.median(sizes[:, 1] / sizes[:, 0].clip(min=1))
        print(
            f"median pair: {source:,.0f} source points, {target:,.0f} target points, {ratio:.2g}x"
        )
        if "validation" in sizes_of:
            share = sizes_of["validation"].sum() / sizes.sum()
            strip = f", {self.strip}" if self.strip else ""
            print(f"held out for validation: {share:.0%} of the points{strip}")
            print(f"details: pointup inspect {shlex.quote(str(output))}")
        if len(sizes) == 1:
            print("next: prepare more than one pair, so that some can be held out for validation")
        else:
            print(f"next: {training_command(output)}")
        if source < FEW_POINTS:
            note(f"the median pair has only {source:.0f} source points")
        if ratio < 1:
            note("the target is sparser than the source in half of the pairs; are they swapped?")
        if self.options.validation and "validation" not in splits:
            note(
                "too few pairs to hold some out for validation; make more pairs, for "
                "example with a smaller --tile"
            )


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
