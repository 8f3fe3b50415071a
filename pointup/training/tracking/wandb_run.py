"""What Weights & Biases gets besides curves and pictures: the plan, clouds in 3D, best values."""

from __future__ import annotations

from typing import Any

import numpy as np

from pointup.terminal import literal
from pointup.training.evaluation import SampleClouds

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
        from pointup.visualization.coloring import error_colors

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
