"""What the evaluations have in common: the model they load, and where their figures go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

import pointup
from pointup.errors import ConfigError, FileError

if TYPE_CHECKING:
    from pointup.evaluation.cloud_metrics import Metric
    from pointup.evaluation.report import Report
    from pointup.model.upsampler import Upsampler

Folder = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Model = Annotated[str | None, tyro.conf.arg(metavar="shapes|lidar|DIR|HUB_ID")]
Oversampling = Annotated[float | None, tyro.conf.arg(metavar="O")]


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


def open_model(name: str | None, oversampling: float | None = None) -> Upsampler | None:
    """The model of a name, directory or Hub repository, on the accelerator where there is one.

    With `oversampling` in place of its own. Raises ConfigError for one that can't be, or that has
    no model.
    """
    if name is None:
        if oversampling is not None:
            raise ConfigError("--oversampling needs --model to upsample with")
        return None
    from pointup.upsampling.in_memory import default_device
    from pointup.upsampling.models import load_model
    from pointup.upsampling.options import UpsampleOptions

    UpsampleOptions(oversampling=oversampling)  # Refuses what can't be.
    upsampler = load_model(name, default_device())
    if oversampling is not None:
        upsampler.config = replace(upsampler.config, oversampling=oversampling)
    return upsampler


def describe_model(name: str | None, upsampler: Upsampler | None) -> str:
    if upsampler is None:
        return "no model"
    num_parameters = sum(parameter.numel() for parameter in upsampler.parameters())
    return f"model {name}, {num_parameters:,} parameters, on {next(upsampler.parameters()).device}"


def describe_upsampling(name: str | None, upsampler: Upsampler | None) -> str:
    """The model, and how it is used by `upsample`."""
    oversampling = upsampler.config.oversampling if upsampler else 1.0
    drafted = f", oversampling {oversampling:g}" if oversampling > 1 else ""
    return describe_model(name, upsampler) + drafted
