"""Common part of all `pointup prepare` commands: options, scratch directory, summary."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

import pointup
from pointup.cli.prepare.summary import print_summary
from pointup.disk import (
    acquire_lock,
    check_output_folder,
    remove,
    replace_directory,
    scratch_errors,
    write_text,
)
from pointup.errors import ConfigError, DataError, FileError, PointupError
from pointup.processes import call_each, end_workers_except, interrupts_held_back
from pointup.progress import tracked
from pointup.terminal import note, print_error

if TYPE_CHECKING:
    from pointup.datasets.pair import Pair
    from pointup.geometry.surfaces import Surface

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class OutputDirectory:
    """Output directory of the new dataset."""

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="DIR")]
    """Directory of the new dataset. It appears when the dataset is complete."""
    overwrite: bool = False
    """Replace an existing dataset."""

    @contextmanager
    def making(self, is_resumable: bool = False) -> Iterator[Making]:
        """Create a scratch directory beside the output, removed at the end; yields the writer.

        With `is_resumable` finished parts are kept if the block is interrupted or killed, and found
        by the next call. Raises FileError if another process works in the directory, ConfigError if
        it holds the parts of a command that can be continued.
        """
        import datasets

        self._check_output()
        # pointup shows its own progress.
        datasets.disable_progress_bars()
        scratch = self.output.parent / f".{self.output.name}-unfinished"
        scratch.mkdir(parents=True, exist_ok=True)
        refusal = f"{self.output}: another process prepares it; wait for it"
        others = active_children()
        with acquire_lock(scratch / "lock", refusal):
            split = {key: value for key, value in vars(self).items() if key != "overwrite"}
            making = Making(scratch=scratch, **split)
            making.remove_stale(is_resumable)
            try:
                yield making
            except BaseException as error:
                with interrupts_held_back():
                    # Workers that still write would create the removed directory again.
                    end_workers_except(others)
                    if not (is_resumable and making.has_parts()):
                        shutil.rmtree(scratch)
                    elif isinstance(error, KeyboardInterrupt):
                        note(f"interrupted; the same command continues from {scratch}")
                if isinstance(error, OSError) and error.errno and not error.filename:
                    # Those of Arrow name no file.
                    with scratch_errors(self.output):
                        raise
                raise
            with interrupts_held_back():
                shutil.rmtree(scratch)

    def _check_output(self) -> None:
        check_output_folder(self.output.parent)
        if not self.output.exists():
            return
        if not self.output.is_dir():
            raise FileError(f"{self.output}: is a file; name a directory")
        if self.output.is_mount() or Path.cwd().is_relative_to(self.output.resolve()):
            raise FileError(f"{self.output}: can't be replaced as a whole; name a folder in it")
        if not any(self.output.iterdir()):
            return
        if not self.overwrite:
            raise FileError(f"{self.output}: is there already; add --overwrite to replace it")
        if not (self.output / "pointup.json").exists():
            raise FileError(f"{self.output}: holds something else than a pair dataset; delete it")


@dataclass(frozen=True, kw_only=True)
class NewDataset(OutputDirectory):
    """Output directory and split of the new dataset."""

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


@dataclass
class Making:
    """A dataset that is being made: scratch directory, left-out inputs, workers, writer."""

    output: Path
    scratch: Path
    num_workers: int = 1
    validation: float = 0.0
    """Share of the pairs that was to be held out."""
    seed: int | None = None
    """Seed of the options; None if nothing is random."""
    left_out: list[str] = field(default_factory=list)
    strip: str = ""
    """Remark for the summary on the strip that is left out around validation tiles."""
    started: float = field(default_factory=time.monotonic)

    @property
    def unfinished(self) -> Path:
        """Directory of the incomplete dataset; `publish` moves it to the output directory."""
        return self.scratch / "dataset"

    @property
    def parts(self) -> Path:
        """Directory of the finished parts of a survey."""
        return self.scratch / "parts"

    def has_parts(self) -> bool:
        return any(self.parts.glob("[!.]*"))

    def each(
        self, calls: Iterable[Callable[[], Result]], num_calls: int, title: str
    ) -> Iterator[Result]:
        """Results of calls in worker processes, with a progress bar; errors go to `left_out`."""
        results = call_each(calls, min(self.num_workers, num_calls))
        for result in tracked(results, num_calls, title):
            if isinstance(result, PointupError):
                self.left_out.append(str(result))
            else:
                yield result

    def check_same_options(self, options: dict[str, Any]) -> None:
        """Raise ConfigError if an interrupted call that is continued had other options or files."""
        path = self.scratch / "options.json"
        options = json.loads(json.dumps(options, default=str))
        if not path.exists():
            write_text(path, json.dumps(options))
        before = json.loads(path.read_text())
        differing = [name for name in options if before.get(name) != options[name]]
        if differing:
            raise ConfigError(
                f"{self.scratch}: holds the unfinished dataset of a command that differs in "
                f"{' and '.join(differing)}; delete it, or repeat that command"
            )

    def remove_stale(self, is_resumable: bool) -> None:
        """Remove what a killed process left, but for parts and sorted files that are complete and
        leave out no input: one that could not be read then may be readable now.

        Raises ConfigError for such parts if this call can't continue from them.
        """
        from pointup.datasets.pair_writer import read_part

        if not is_resumable and self.has_parts():
            raise ConfigError(
                f"{self.scratch}: holds the unfinished dataset of another command; delete it, or "
                "repeat that command"
            )
        kept = {"lock", "options.json", "parts", "sorted"} if is_resumable else {"lock"}
        for path in self.scratch.iterdir():
            if path.name not in kept:
                remove(path)
        for folder in (self.parts, self.scratch / "sorted"):
            folder.mkdir(exist_ok=True)
            for path in folder.glob(".*"):
                remove(path)
        for path in (self.scratch / "sorted").iterdir():
            if path.is_file():
                remove(path)
        for path in self.parts.glob("*/part.json"):
            if read_part(path.parent).facts["left_out"]:
                remove(path.parent)

    def write(
        self,
        train: Iterable[Pair],
        validation: Iterable[Pair],
        info: dict[str, Any],
        surfaces: Mapping[str, Surface] | None = None,
        shapes: Mapping[str, str] | None = None,
    ) -> int:
        """Write the pairs and publish the dataset. Returns the exit status.

        `shapes` says where the shapes of the pairs are from, see `shapes_of`.
        """
        from pointup.datasets.held_out import write_shapes
        from pointup.datasets.pair_writer import write_pairs

        info = self.description(info)
        # Inputs are left out while the pairs are written, so that the list is filled later.
        info["left_out"] = self.left_out
        write_pairs(self._some(train), validation, self.unfinished, info, surfaces)
        if shapes:
            write_shapes(self.unfinished, shapes)
        return self.publish()

    def description(self, info: dict[str, Any]) -> dict[str, Any]:
        """The description of the dataset for pointup.json, from its `command` and options."""
        made_by = f"pointup {pointup.__version__} {info['command']}"
        info = {"made_by": made_by, **{k: v for k, v in info.items() if k != "command"}}
        info.setdefault("validation", self.validation)
        if self.seed is not None:
            info["seed"] = self.seed
        # Tuples become lists, and paths text that is valid in any working directory.
        return json.loads(json.dumps(info, default=_text))

    def publish(self) -> int:
        """Move the dataset to the output directory, and print the summary and what was left out.

        Returns the exit status: 1 if anything was left out.
        """
        with interrupts_held_back():
            replace_directory(self.output, self.unfinished)
            # Nothing is left to continue, whatever happens to the summary.
            remove(self.parts)
        print_summary(self.output, self.validation, self.strip, time.monotonic() - self.started)
        for reason in self.left_out:
            print_error(f"pointup: left out: {reason}")
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
            raise self.nothing_usable("no training pairs are left")


def chosen(command: object, *names: str) -> dict[str, Any]:
    """Options of a command by their names, for pointup.json."""
    return {name: getattr(command, name) for name in names}


def _text(value: object) -> str:
    return str(value.absolute() if isinstance(value, Path) else value)


def parse_range(
    option: str, text: str, least: float, most: float, example: str
) -> tuple[float, float]:
    """The numbers of a text "NUMBER" or "LOW:HIGH"; ConfigError for any other text."""
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not least <= numbers[0] <= numbers[-1] <= most:
        raise ConfigError(
            f"{option} {text}: must be a number or LOW:HIGH, from {least:g} to {most:g}, as in "
            f"{example}"
        )
    return numbers[0], numbers[-1]
