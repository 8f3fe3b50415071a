"""`pointup report`: writes one HTML file about training runs, to read and to send."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pointup.cli.input_files import HtmlFile, Title, describe_page
from pointup.errors import ConfigError, PointupError


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one HTML file about training runs: curves, tables with baselines, samples in 3D.

    The file works offline. The worst, the median and the best validation sample are upsampled with
    the best model of each run; the dataset of the first run is needed for that.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(required)"),
    ]
    """Output directories of train.py. The first one is compared with the others."""
    output: HtmlFile
    """HTML file to write."""
    max_pairs: int = 64
    """Largest number of validation pairs that are measured to find the worst and the best; of more,
    pairs at equal intervals."""
    title: Title = None
    """Title of the page. By default the names of the runs."""

    def run(self) -> int:
        from pointup.cli.report.page import report_html, samples_of_runs
        from pointup.cli.report.runs import read_runs
        from pointup.visualization.viewer.document import check_viewer_path, write_page

        check_viewer_path(self.output)
        if not self.runs:
            raise ConfigError("no run: name output directories of train.py")
        if self.max_pairs < 1:
            raise ConfigError(f"--max-pairs {self.max_pairs}: must be at least 1")
        runs = read_runs(self.runs)
        try:
            samples, reason = samples_of_runs(runs, self.max_pairs), ""
        except PointupError as error:
            # Curves and tables are worth a report; the page states what is missing and why.
            samples, reason = None, str(error)
            print(f"no samples: {error}")
        title = self.title or ", ".join(run.name for run in runs)
        size = write_page(self.output, report_html(runs, samples, reason, title))
        print(describe_page(self.output, size))
        return 0
