"""Common part of all `pointup evaluate` commands: the model to load, and the output files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pointup
from pointup.cli.evaluate import Output
from pointup.cli.input_files import check_shown
from pointup.disk import check_output_file, write_text
from pointup.errors import ConfigError
from pointup.evaluation.pairs import ShownPair
from pointup.evaluation.report import EvaluationReport, write_json
from pointup.evaluation.uncertainty import Reliability
from pointup.model.upsampler import Upsampler
from pointup.upsampling.in_memory import default_device, load_model
from pointup.upsampling.options import UpsampleOptions
from pointup.visualization.page import reliability_picture, save_picture, stacked
from pointup.visualization.viewer.document import write_viewer


def check_outputs(
    output: Output, picture: Path | None, view: Path | None, rasters: Path | None = None
) -> None:
    """Raise FileError if an output file can't be written. Call it before the work."""
    check_shown(picture, view, rasters)
    for path in (output.json, output.markdown):
        if path is not None:
            check_output_file(path)


def show_report(output: Output, report: EvaluationReport, content: Mapping[str, Any]) -> None:
    """Print a report; write its tables and, with `content`, all figures where asked for."""
    print(report.text())
    if output.json:
        metrics = {name: m for table in report.tables for name, m in table.metrics.items()}
        write_json(output.json, {"pointup": pointup.__version__, **content}, metrics)
    if output.markdown:
        write_text(output.markdown, report.markdown())


def open_model(name: str | None, oversampling: float | None = None) -> Upsampler | None:
    """Load an included model, a directory or a Hub repository, onto the accelerator if any.

    `oversampling` replaces the value in the model's configuration. Raises ConfigError if it is out
    of range or `name` is None.
    """
    if name is None:
        if oversampling is not None:
            raise ConfigError("--oversampling needs --model to upsample with")
        return None
    UpsampleOptions(oversampling=oversampling)  # Raises ConfigError if it is out of range.
    upsampler = load_model(name, default_device())
    if oversampling is not None:
        upsampler.config = replace(upsampler.config, oversampling=oversampling)
    return upsampler


def describe_model(name: str | None, upsampler: Upsampler | None, as_written: bool = True) -> str:
    """The model; with its oversampling, if its output is that of `upsample` (`as_written`)."""
    if upsampler is None:
        return "no model"
    num_parameters = sum(parameter.numel() for parameter in upsampler.parameters())
    text = f"model {name}, {num_parameters:,} parameters, on {next(upsampler.parameters()).device}"
    oversampling = upsampler.config.oversampling if as_written else 1.0
    return text + (f", oversampling {oversampling:g}" if oversampling > 1 else "")


def write_shown(
    pairs: Sequence[ShownPair],
    title: str,
    picture: Path | None,
    view: Path | None,
    found: Reliability,
) -> None:
    """Write a picture and a viewer of some pairs, where asked for; the picture ends with the
    reliability `found` of uncertainties, if there is one.

    Raises FileError if a file can't be written.
    """
    if picture is not None:
        plots = [reliability_picture(found, pairs[0].unit)] if found else []
        save_picture(stacked([*(pair.picture() for pair in pairs), *plots]), picture)
    if view is not None:
        write_viewer(view, [pair.scene() for pair in pairs], title)
