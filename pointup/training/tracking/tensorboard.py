"""What TensorBoard and Weights & Biases show of a run: charts, hyperparameters, texts, clouds."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.tracking import TensorBoardTracker

import pointup
from pointup.terminal import literal
from pointup.training.evaluation import SampleClouds

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


OVERVIEW = "1 overview"
TAGS = {
    "loss": f"{OVERVIEW}/3 training loss",
    "learning_rate": f"{OVERVIEW}/4 learning rate",
    "tokens_per_second": f"{OVERVIEW}/5 tokens per second",
    "share_of_midpoints": f"{OVERVIEW}/1 share of the midpoint baseline",
    "chamfer": f"{OVERVIEW}/2 validation Chamfer distance",
    "grad_norm": "3 training/gradient norm",
    "epoch": "3 training/epoch",
    "num_clouds": "3 training/clouds per step",
    "num_tokens": "3 training/tokens per step",
    "fill": "3 training/fill of the token budget",
    "step_seconds": "4 speed/seconds per step",
    "data_wait_seconds": "4 speed/seconds of waiting for data",
    "idle_fraction": "4 speed/idle fraction",
    "peak_memory_gib": "5 memory/peak in GiB",
    "out_of_memory": "5 memory/out-of-memory errors",
    "seen_clouds": "3 training/clouds so far",
    "unreadable_clouds": "3 training/unreadable clouds",
}
"""Names of curves. TensorBoard sorts groups and charts by name; numbers put the main ones first.
Of the metrics, HPARAMS shows only the first one without a click."""
REFERENCES = {
    "midpoints": "midpoint baseline",
    "source": "source as it is",
    "resampled": "resampled ground truth",
}
"""Rows of an evaluation that do not depend on the model, and their names as runs."""
CHARTS = ("share_of_midpoints", "chamfer", "loss", "learning_rate", "tokens_per_second")
NOT_COMPARED = frozenset(
    {
        "output_dir", "log_with", "num_workers", "worker_timeout", "log_every", "save_every",
        "save_minutes", "keep_checkpoints", "num_pictures", "collective_timeout", "hang_timeout",
        "on_save_error", "debug", "quick",
    }
)  # fmt: skip
"""Options that differ between runs and say nothing about what they learn."""
MESH_POINTS = 10_000


def training_tag(name: str) -> str:
    """Name of the curve of a value of metrics.jsonl."""
    return TAGS.get(name, f"4 speed/{name.replace('_', ' ')}")


def validation_tag(metric: str) -> str:
    """Name of the curve of a metric of an evaluation."""
    return TAGS["chamfer"] if metric == "chamfer" else f"2 validation/{metric.replace('_', ' ')}"


class TensorBoardRun:
    """The events of one run, in its output directory, with its references as runs of their own.

    TensorBoard draws a curve of the same name in several runs in one chart, each run in its own
    colour. So the references are runs, in `baselines/`, and their lines lie in the model's charts.
    So are the datasets of a run that trains on several, in `datasets/`. Points from `purge_step`
    on, of an interrupted attempt, are removed.
    """

    def __init__(self, output_dir: Path, purge_step: int) -> None:
        # Runs of earlier versions have their events in a subdirectory; they are continued there.
        self.directory = output_dir / "pointup" if (output_dir / "pointup").is_dir() else output_dir
        self.purge_step = purge_step
        self.tracker = TensorBoardTracker("", str(self.directory), purge_step=purge_step)
        self.tracker.start()
        self.others: dict[str, SummaryWriter] = {}
        self.drawn: set[str] = set()

    @property
    def writer(self) -> SummaryWriter:
        return self.tracker.writer

    def start(self, values: dict[str, Any]) -> None:
        """Write charts, hyperparameters, and the command with its versions."""
        charts = {
            TAGS[name].partition("/")[2].lstrip("0123456789 "): [
                "Multiline",
                [f"^{re.escape(TAGS[name])}$"],
            ]
            for name in CHARTS
        }
        self.writer.add_custom_scalars({"overview": charts})
        self.write_hyperparameters(values)
        packages = ("torch", "accelerate", "torch-geometric", "datasets", "numpy")
        versions = {"pointup": pointup.__version__, "Python": platform.python_version()}
        versions |= {name: version(name) for name in packages}
        rows = "\n".join(f"| {name} | {number} |" for name, number in versions.items())
        words = [Path(sys.argv[0]).name, *sys.argv[1:]]
        command = shlex.join(words).replace(" --", " \\\n    --")
        self.write_text("command", f"```\n{command}\n```")
        self.write_text("versions", f"| package | version |\n|---|---|\n{rows}")

    def write_hyperparameters(self, values: dict[str, Any]) -> None:
        """Write hyperparameters into the events of the run itself, with their types.

        SummaryWriter.add_hparams would add a run, named by the time, at each start, and store
        booleans as numbers. It would also describe the hyperparameters of the experiment; without
        a description TensorBoard compares the runs itself and lists those that differ first.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

        info = SessionStartInfo()
        for name, value in values.items():
            if name in NOT_COMPARED:
                continue
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, (int, float)):
                info.hparams[name].number_value = value
            else:
                info.hparams[name].string_value = str(value)
        content = HParamsPluginData(session_start_info=info, version=metadata.PLUGIN_DATA_VERSION)
        described = metadata.create_summary_metadata(content)
        value = Summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=described)
        self.writer._get_file_writer().add_summary(Summary(value=[value]))
        self.writer.flush()

    def write_text(self, title: str, markdown: str) -> None:
        self.writer.add_text(title, markdown)

    def write_references(self, step: int, rows: Mapping[str, Mapping[str, float]]) -> None:
        """Points of the lines of the references; the midpoint baseline's share is 1."""
        for row, name in REFERENCES.items():
            if row in rows:
                values = {validation_tag(metric): value for metric, value in rows[row].items()}
                if row == "midpoints":
                    values[TAGS["share_of_midpoints"]] = 1.0
                self.write_beside(step, f"baselines/{name}", values)

    def write_beside(self, step: int, name: str, values: Mapping[str, float]) -> None:
        """Points of curves of another run, in the subdirectory `name`."""
        from torch.utils.tensorboard import SummaryWriter

        if name not in self.others:
            directory = str(self.directory / name)
            self.others[name] = SummaryWriter(directory, purge_step=self.purge_step)
        for tag, value in values.items():
            self.others[name].add_scalar(tag, value, step)
        self.others[name].flush()

    def write_clouds(self, step: int, name: str, clouds: SampleClouds) -> None:
        """Clouds of the first sample to turn about, coloured by error; source and target only once.

        A browser draws at most 16 clouds in 3D on a page; with all samples of several runs the tab
        would stay empty.
        """
        if self.drawn - {name}:
            return
        # Only here, because matplotlib is not needed for anything else in training.
        from pointup.visualization.rendering import error_colors

        centre = clouds.target.mean(axis=0) if len(clouds.target) else np.zeros(3)
        shown = {"prediction": (clouds.prediction, clouds.target)}
        if name not in self.drawn:
            shown["source"] = (clouds.source, clouds.target)
            shown["target"] = (clouds.target, clouds.prediction)
        self.drawn.add(name)
        for title, (points, against) in shown.items():
            keep = np.random.default_rng(0).permutation(len(points))[:MESH_POINTS]
            colors = error_colors(points, against, clouds.source, clouds.target)[keep]
            places = points[keep] - centre
            if clouds.vertical:
                # The plugin shows y upwards.
                places = places[:, [0, 2, 1]] * np.array([1, 1, -1])
            size = float(np.ptp(places, axis=0).max(initial=1e-6)) / 60
            self.writer.add_mesh(
                f"{literal(name)}/{title}",
                torch.from_numpy(places.astype(np.float32))[None],
                torch.from_numpy(colors)[None],
                config_dict={"material": {"cls": "PointsMaterial", "size": size}},
                global_step=step,
            )

    def finish(self) -> None:
        for writer in self.others.values():
            writer.close()


SHOWN_POINTS = 10_000


class WandbRun:
    """The run of Accelerate's tracker for Weights & Biases.

    Attributes:
        run: as `wandb.init` returned it.
    """

    def __init__(self, run: Any, lower_is_better: list[str]) -> None:
        self.run = run
        for name in lower_is_better:
            # The table of runs shows the best value, not the last one.
            run.define_metric(name, summary="min")

    def write_plan(self, plan: str, dataset: str) -> None:
        """Keep the plan and the dataset's description as the notes of the run (Markdown)."""
        self.run.notes = f"```\n{plan}\n```\n\n{dataset}"

    def write_clouds(self, step: int, name: str, clouds: SampleClouds) -> None:
        """Source, prediction and target to turn about, coloured by error; at most 10,000 points."""
        import wandb

        # Only here, because matplotlib is not needed for anything else in training.
        from pointup.visualization.rendering import error_colors

        shown = {
            "source": (clouds.source, clouds.target),
            "prediction": (clouds.prediction, clouds.target),
            "target": (clouds.target, clouds.prediction),
        }
        centre = clouds.target.mean(axis=0) if len(clouds.target) else np.zeros(3)
        found = {}
        for title, (points, against) in shown.items():
            keep = np.random.default_rng(0).permutation(len(points))[:SHOWN_POINTS]
            if not len(keep):
                continue
            colors = error_colors(points, against, clouds.source, clouds.target)[keep]
            cloud = np.column_stack([points[keep] - centre, colors])
            found[f"clouds/{literal(name)}/{title}"] = wandb.Object3D(cloud)
        self.run.log(found, step=step)
