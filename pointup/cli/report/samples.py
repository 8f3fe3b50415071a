"""The worst, median and best validation sample of a report, upsampled by the model of each run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Batch
from tqdm import tqdm

from pointup.cli.report.runs import RunRecord
from pointup.datasets.batch import collate
from pointup.datasets.pair_dataset import PairDataset
from pointup.errors import DataError
from pointup.evaluation.pair_scenes import worst_to_best
from pointup.evaluation.pairs import clouds_of_pairs, measure_pairs
from pointup.io.length_unit import known_unit
from pointup.model.upsampler import Upsampler
from pointup.synthetic.default_dataset import default_dataset
from pointup.training.config import data_sources
from pointup.training.datasets import open_split
from pointup.training.objective import training_ratio
from pointup.upsampling.in_memory import default_device, load_model
from pointup.visualization import evaluation_picture
from pointup.visualization.viewer import Scene, compare_with_reference


@dataclass(frozen=True)
class Samples:
    """Samples of a report.

    Attributes:
        scenes: for the viewer: source, midpoint baseline, the output of each run, target.
        pictures: of the same samples by the first run, by name.
        shares: of the first run's Chamfer distance, one for each measured pair, sorted.
        num_pairs: number of usable validation pairs, of which some were measured.
    """

    scenes: list[Scene]
    pictures: dict[str, np.ndarray]
    shares: np.ndarray
    num_pairs: int


@torch.no_grad()
def samples_of_runs(runs: Sequence[RunRecord], max_pairs: int, names_run: bool = True) -> Samples:
    """Measure validation pairs with the model of the first run, and upsample three with all.

    `names_run` adds the name of the first run, whose figures they are, to the names of pictures.
    A run must not have one of the names FIXED_CLOUDS of other clouds of a sample.
    Raises DataError if the dataset of the first run is gone, ModelError without a model.
    """
    first = runs[0]
    sources = data_sources(first.options.get("data") or [str(default_dataset())])
    device = default_device()
    models = {run.name: load_model(str(run.path / "model"), device) for run in runs}
    min_points = max(model.config.k for model in models.values())
    try:
        usable, _ = open_split(sources, "validation", min_points)
    except DataError as error:
        names = [source.name for source in sources]
        missing = [n for n in names if not (Path(n).exists() or Path(n).is_absolute())]
        if not missing:
            raise
        # A name such as a/b may be one on the Hub.
        raise DataError(
            f"{error}. A directory {' or '.join(missing)} is relative to the folder in which "
            f"{first.path} was trained; run this command in that folder"
        ) from error
    pairs = PairDataset(usable)
    ratio, max_ratio = first.options.get("ratio"), float(first.options.get("max_ratio") or 16.0)
    places = np.linspace(0, len(pairs) - 1, min(max_pairs, len(pairs))).round().astype(int)
    shares = np.full(len(places), np.nan)
    for i, index in enumerate(tqdm(places, unit="pair", leave=False, disable=None)):
        batch = collate([pairs[(0, int(index))]]).to(device)
        rows = measure_pairs(batch, training_ratio(batch, ratio, max_ratio), models[first.name])[0]
        midpoints = rows.get("midpoints", {}).get("chamfer")
        if midpoints and "model" in rows:
            shares[i] = rows["model"]["chamfer"] / midpoints
    if not np.isfinite(shares).any():
        raise DataError(f"{sources[0].name}: the model can't be measured on any validation pair")
    scenes, pictures = [], {}
    for place, i in worst_to_best(shares.tolist()).items():
        index = int(places[i])
        unit = known_unit([sources[bisect_right(usable.bounds, index) - 1].name])
        batch = collate([pairs[(0, index)]]).to(device)
        title = f"{place}: {pairs.names[index]}"
        note = f"{shares[i]:.1%} of the Chamfer distance of the midpoint baseline"
        note += f", {first.name}" if names_run else ""
        vertical = usable.is_vertical(index)
        clouds = clouds_of_sample(batch, training_ratio(batch, ratio, max_ratio), models)
        target = clouds.pop("target")
        scene = compare_with_reference(
            clouds, target, unit, "z" if vertical else "y", name=title, note=note, of="target"
        )
        scenes.append(scene)
        pictures[f"{title}, {note}"] = evaluation_picture(
            clouds["source"],
            clouds[first.name],
            target,
            unit=unit,
            vertical=vertical,
            baseline=clouds["midpoint baseline"],
        )
    return Samples(scenes, pictures, np.sort(shares[np.isfinite(shares)]), len(pairs))


def clouds_of_sample(
    batch: Batch, ratio: torch.Tensor, models: dict[str, Upsampler]
) -> dict[str, np.ndarray]:
    """Clouds (N, 3) of a batch of one pair: source, baseline, output by run, target."""
    packed = clouds_of_pairs(batch, ratio)
    tensors = {"source": batch.pos, "midpoint baseline": packed["midpoints"][0]}
    for name, model in models.items():
        tensors[name] = clouds_of_pairs(batch, ratio, model)["model"][0]
    tensors["target"] = batch.target
    return {name: points.cpu().double().numpy() for name, points in tensors.items()}
