"""A dataset in the making: its options, its scratch space, its progress, and its closing line."""

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
# With fewer source points than this in the middle pair, a network sees little of a place.
FEW_POINTS = 100


@dataclass(frozen=True, kw_only=True)
class NewDataset:
    """Where the dataset goes and how it is split."""

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="DIR")]
    """Directory of the new dataset; nothing is there until all of it is."""
    overwrite: bool = False
    """Replace the dataset that is there."""
    validation: float = 0.1
    """Share of the pairs set aside to validate on, by whole places or shapes; 0 for none."""
    seed: int = 0
    """Everything random follows from it, whatever the number of workers."""
    num_workers: int = min(8, os.cpu_count() or 1)
    """Processes that work at the same time."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ConfigError(f"--validation {self.validation}: must be at least 0 and below 1")
        if self.seed < 0 or self.num_workers < 1:
            raise ConfigError(
                f"--seed {self.seed} --num-workers {self.num_workers}: a seed is at least 0, "
                "and at least one worker is needed"
            )

    @contextmanager
    def making(self) -> Iterator[Making]:
        """Scratch space beside the output, gone at the end, and what to write the dataset with."""
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
                    # What they write would come back after it was removed.
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
    """What there is while a dataset is made."""

    options: NewDataset
    scratch: Path
    left_out: list[str] = field(default_factory=list)
    strip: str = ""
    """What to tell about the ground that is left out around held-out pairs."""
    remedy: str = ""
    """What to do where no pairs to train on are left."""
    started: float = field(default_factory=time.monotonic)

    @property
    def draft(self) -> Path:
        """Where the dataset is written before it takes its place."""
        return self.scratch / "dataset"

    def each(
        self, calls: Iterable[Callable[[], Result]], num_calls: int, title: str
    ) -> Iterator[Result]:
        """The results of calls in the workers, with a progress bar; errors go to `left_out`."""
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
        """Write the pairs as the draft, and publish it."""
        from pointup.datasets.pair_writer import write_pairs

        info = {"made_by": f"pointup {pointup.__version__} {info.pop('command')}", **info}
        info.setdefault("validation", self.options.validation)
        info["seed"] = self.options.seed
        # Paths become text, and tuples lists.
        info = json.loads(json.dumps(info, default=str))
        # Filled while the pairs are written.
        info["left_out"] = self.left_out
        write_pairs(self._some(train), validation, self.draft, info, surfaces)
        return self.publish()

    def publish(self) -> int:
        """Put the draft into its place, say so and what was left out; the exit status."""
        output = self.options.output
        with interrupts_held_back():
            if output.exists():
                output.rename(self.scratch / "old")
            self.draft.rename(output)
        self._tell()
        for reason in self.left_out:
            print(f"pointup: left out: {reason}", file=sys.stderr)
        return int(bool(self.left_out))

    def nothing_usable(self, remedy: str) -> DataError:
        """The error to raise when no pair is left."""
        return DataError(": ".join([remedy, *self.left_out[:1]]))

    def _some(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        any_pair = False
        for pair in pairs:
            any_pair = True
            yield pair
        if not any_pair:
            remedy = f"; {self.remedy}" if self.remedy else ""
            raise self.nothing_usable(f"no pairs to train on are left{remedy}")

    def _tell(self) -> None:
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
            print(f"held out to validate on: {share:.0%} of the points{strip}")
            print(f"details: pointup inspect {shlex.quote(str(output))}")
        if len(sizes) == 1:
            print("next: prepare more than this one pair, which can't be split; see the note")
        else:
            print(f"next: {training_command(output)}")
        if source < FEW_POINTS:
            note(f"the median pair has {source:.0f} source points, which is little")
        if ratio < 1:
            note("the target is sparser than the source in half of the pairs; are they swapped?")
        if self.options.validation and "validation" not in splits:
            note(
                "too little to set pairs aside to validate on; more pairs, as smaller tiles give, "
                "can be split"
            )


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
