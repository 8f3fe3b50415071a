"""Pairs to look at: source, baseline, output and target, in the viewer and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from torch_geometric.data import Batch

from pointup.evaluation.pairs import clouds_of_pairs, upsampled_pairs
from pointup.model.upsampler import Upsampler
from pointup.visualization import columns_picture
from pointup.visualization.viewer import Scene, compare_with_reference

TITLES = {
    "source": "source",
    "midpoints": "midpoint baseline",
    "prediction": "prediction",
    "model": "model",
}
"""Clouds that are shown beside the target, from left to right, and their titles."""


@dataclass(frozen=True, eq=False)
class ShownPair:
    """Clouds (N, 3) of a pair by the names of `TITLES`, and their target.

    Attributes:
        vertical: z points up; otherwise y.
        unit: of the coordinates, such as "m".
        note: one line about the pair.
        notes: a few words about each cloud, and about the target, by name.
        of: name of the target.
    """

    name: str
    clouds: Mapping[str, np.ndarray]
    target: np.ndarray
    vertical: bool
    unit: str = ""
    note: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    of: str = "target"

    def scene(self) -> Scene:
        """For the viewer, coloured by the distance to the target."""
        return compare_with_reference(
            self._titled(),
            self.target,
            self.unit,
            "z" if self.vertical else "y",
            name=self.name,
            note=self.note,
            of=self.of,
        )

    def picture(self, errors: bool = True) -> np.ndarray:
        """(height, width, 3) uint8; see `columns_picture`."""
        return columns_picture(
            self._titled(),
            self.target,
            of=self.of,
            unit=self.unit,
            vertical=self.vertical,
            title=self.name,
            subtitle=self.note,
            notes={TITLES.get(name, name): note for name, note in self.notes.items()},
            errors=errors,
        )

    def _titled(self) -> dict[str, np.ndarray]:
        return {title: self.clouds[name] for name, title in TITLES.items() if name in self.clouds}


def worst_to_best(scores: Sequence[float]) -> dict[str, int]:
    """Index of the pair with the highest score (the worst), with the median one and the lowest.

    Fewer than three pairs have fewer entries; scores that are not finite are left out.
    """
    order = [int(i) for i in np.argsort(scores)[::-1] if np.isfinite(scores[int(i)])]
    if len(order) < 3:
        return {"worst": order[0], "best": order[-1]} if len(order) == 2 else {"only": order[0]}
    return {"worst": order[0], "median": order[len(order) // 2], "best": order[-1]}


def clouds_to_show(
    batch: Batch, ratio: Tensor, upsampler: Upsampler | None, vertical: bool, as_written: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Source, midpoint baseline and output of a batch of one pair by row, and the target.

    ratio: (1,) of the model and the baseline. `as_written`: the output is that of `pointup
    upsample`, else that of the network.
    """
    clouds = clouds_of_pairs(batch, ratio, None if as_written else upsampler)
    if upsampler is not None and as_written:
        clouds["model"] = upsampled_pairs(batch, ratio, upsampler, [vertical])
    shown = {row: clouds[row][0].detach().cpu().double().numpy() for row in TITLES if row in clouds}
    return shown, batch.target.cpu().double().numpy()
