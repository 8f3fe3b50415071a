"""What the evaluations have in common: the model they load, and where their figures go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

import pointup
from pointup.errors import FileError

if TYPE_CHECKING:
    from pointup.evaluation.measures import Metric
    from pointup.evaluation.report import Report
    from pointup.model import Upsampler

Folder = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Model = Annotated[str | None, tyro.conf.arg(metavar="shapes|lidar|DIR|HUB_ID")]


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the figures go, besides the terminal."""

    json: File = None
    """Write every figure, cloud by cloud, and the conventions of the metrics."""
    markdown: File = None
    """Write the tables that are printed."""

    def check(self, *more: Path | None) -> None:
        """Raise FileError before the work, rather than after it, where a folder is missing."""
        for path in (self.json, self.markdown, *more):
            if path is not None and not path.parent.is_dir():
                raise FileError(f"{path}: there is no folder {path.parent}; make it")

    def show(
        self, report: Report, content: Mapping[str, Any], metrics: Mapping[str, Metric]
    ) -> None:
        from pointup.evaluation.report import write_json, write_text

        print(report.text())
        if self.json:
            write_json(self.json, {"pointup": pointup.__version__, **content}, metrics)
        if self.markdown:
            write_text(self.markdown, report.markdown())


def open_model(name: str | None) -> Upsampler | None:
    """The model of a directory or Hub repository, on the accelerator where there is one."""
    if name is None:
        return None
    from pointup.upsampling.arrays import default_device
    from pointup.upsampling.models import load_model

    return load_model(name, default_device())


def describe_model(name: str | None, upsampler: Upsampler | None) -> str:
    if upsampler is None:
        return "no model"
    num_parameters = sum(parameter.numel() for parameter in upsampler.parameters())
    return f"model {name}, {num_parameters:,} parameters, on {next(upsampler.parameters()).device}"
