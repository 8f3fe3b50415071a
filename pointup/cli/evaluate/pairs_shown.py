"""What `pointup evaluate pairs` shows: the worst, median and best pair, as picture and viewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pointup.datasets.batch import collate
from pointup.datasets.pair_dataset import PairDataset
from pointup.evaluation.cloud_metrics import Figures
from pointup.evaluation.pair_scenes import ShownPair, clouds_to_show, worst_to_best
from pointup.io.length_unit import LengthUnit
from pointup.model.upsampler import Upsampler
from pointup.training.objective import training_ratio
from pointup.visualization import save_picture, stacked
from pointup.visualization.viewer import write_viewer


@dataclass(frozen=True, eq=False)
class MeasuredPairs:
    """Pairs of a dataset and their figures by row, in the same order.

    Attributes:
        kept: index of each measured pair in `pairs`.
        ratio, max_ratio: options of the command.
        as_written: the output of `pointup upsample` is shown, else that of the network.
    """

    pairs: PairDataset
    kept: Sequence[int]
    rows: Sequence[dict[str, Figures]]
    unit: LengthUnit
    ratio: float | None
    max_ratio: float
    as_written: bool

    def show(self, upsampler: Upsampler | None, picture: Path | None, view: Path | None) -> None:
        """Write a picture and a viewer of the worst, the median and the best pair, where asked for.

        The order is that of the Chamfer distance of the model as a share of that of the midpoints;
        without a model, that of the midpoints. Pairs without this share are left out, because their
        midpoints equal their target; a note is printed if no pair has one. Raises FileError if a
        file can't be written.
        """
        if picture is None and view is None:
            return
        row = "midpoints" if upsampler is None else "model"
        values = [rows[row]["chamfer"] for rows in self.rows]
        scores = values if upsampler is None else [_share(rows) for rows in self.rows]
        if not np.isfinite(scores).any():
            print("no picture and no viewer: the midpoints equal the target in every pair")
            return
        shown = []
        for place, number in worst_to_best(scores).items():
            share = f", {scores[number]:.1%} of the midpoint baseline's" if upsampler else ""
            note = f"Chamfer distance {values[number]:.4g} {self.unit.name}{share}"
            shown.append(self._pair(number, upsampler, place, note))
        if picture is not None:
            save_picture(stacked([pair.picture() for pair in shown]), picture)
        if view is not None:
            title = ", ".join(pair.name for pair in shown)
            write_viewer(view, [pair.scene() for pair in shown], title)

    def _pair(self, number: int, upsampler: Upsampler | None, place: str, note: str) -> ShownPair:
        index = self.kept[number]
        batch = collate([self.pairs[(0, index)]])
        batch = batch.to(next(upsampler.parameters()).device) if upsampler else batch
        vertical = self.pairs.samples.is_vertical(index)
        ratio = training_ratio(batch, self.ratio, self.max_ratio)
        clouds, target = clouds_to_show(batch, ratio, upsampler, vertical, self.as_written)
        unit = "" if self.unit.metres is None else self.unit.name
        notes = {
            row: f"Chamfer {figures['chamfer']:.3g} {unit}".strip()
            for row, figures in self.rows[number].items()
        }
        name = f"{place}: {self.pairs.names[index]}"
        return ShownPair(name, clouds, target, vertical, unit, note, notes)


def _share(rows: Mapping[str, Figures]) -> float:
    """Chamfer distance of the model as a share of that of the midpoints; NaN if theirs is 0."""
    midpoints = rows["midpoints"]["chamfer"]
    return rows["model"]["chamfer"] / midpoints if midpoints else float("nan")
