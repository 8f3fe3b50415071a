"""Upsamples the source of a survey evaluation: by the model, and by the baselines."""

from __future__ import annotations

import numpy as np

from pointup.errors import DataError
from pointup.evaluation.baselines import baseline_clouds
from pointup.evaluation.survey_file import Survey
from pointup.io.cloud import PointCloud
from pointup.io.noise import CLASSIFICATION
from pointup.model.upsampler import Upsampler
from pointup.upsampling import upsample


def upsampled_surveys(
    source: Survey,
    ratio: float,
    density: float | None = None,
    upsampler: Upsampler | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """The surveys (M, 3) float64 that methods make of a source, by the names of the methods.

    They are "model", if there is one, "midpoints" and those of `baseline_clouds`. The model and the
    midpoints are what `pointup upsample` writes with the ratio or, if one is given, the target
    density in points per square unit. The other baselines have as many points as the model, without
    a model as the midpoints. Raises DataError, which names the file, for a source that can't be
    upsampled.
    """
    surveys = {}
    if upsampler is not None:
        surveys["model"] = _as_written(source, ratio, density, upsampler)
    surveys["midpoints"] = _as_written(source, ratio, density, _midpoint_model(upsampler))
    like = surveys.get("model", surveys["midpoints"])
    num_points = max(len(like), len(source.positions))
    return surveys | baseline_clouds(source.positions, num_points, seed)


def _midpoint_model(upsampler: Upsampler | None) -> Upsampler:
    """A model whose output is the midpoint baseline, in the same passes as those of `upsampler`.

    An untrained model has zero offsets, so that its output is the thinned midpoints. Exponent 0
    ignores its predicted density.
    """
    if upsampler is None:
        return Upsampler(density_exponent=0.0)
    # The largest ratio of a pass also limits how many points one becomes at a density.
    return Upsampler(density_exponent=0.0, max_pass_ratio=upsampler.config.max_pass_ratio)


def _as_written(
    source: Survey, ratio: float, density: float | None, upsampler: Upsampler
) -> np.ndarray:
    """What `pointup upsample` makes of a survey."""
    cloud = PointCloud(source.positions)
    if source.classification is not None:
        cloud.attributes[CLASSIFICATION] = source.classification
    try:
        # A density replaces the ratio, by which the survey was thinned.
        by_ratio = ratio if density is None else None
        made = upsample(cloud, by_ratio, density=density, model=upsampler, above_ground=True)
    except DataError as error:
        raise DataError(f"{source.path}: {error}") from None
    return made.positions
