"""Calibrates the uncertainty of the model that a run has kept, on validation pairs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pointup.datasets.batch import make_loader, move
from pointup.geometry.surfaces import Surface
from pointup.io.cloud import PointCloud
from pointup.model.calibration import Calibration
from pointup.model.upsampler import Upsampler
from pointup.training.config import TrainConfig
from pointup.training.datasets import TrainingData
from pointup.training.objective import training_ratio

MOST_PAIRS = 16
"""Largest number of validation pairs that a calibration is fitted on."""
# Least distance on surveys in spacings, about that of lidar and forest. A target is noisy, too: on
# ground no new point is farther from it than a measured one, which is no proof of an error of 0.
_LEAST_ON_SURVEYS = 0.08
_EXACT = Calibration((-9.0, 9.0), (-9.0, 9.0))
_SPACING = Calibration((0.0,), (0.0,))


def calibrate_kept_model(
    data: TrainingData,
    config: TrainConfig,
    device: torch.device,
    enter_phase: Callable[[str], None],
) -> str:
    """Fit the calibration of the model in the run directory, and store it in its config.json;
    returns a line about it.

    The new points of some validation pairs are compared with the true surface or the target.
    `enter_phase` is that of the watchdog.
    """
    from pointup.evaluation.pairs import unpacked, upsampled_pairs
    from pointup.evaluation.uncertainty import measured_uncertainty

    directory = Path(config.output_dir, "model")
    if not directory.is_dir():
        return "note: there is no model to calibrate the uncertainty of"
    model = Upsampler.from_pretrained(directory).to(device)
    if not model.config.predict_error:
        return "note: the model predicts no uncertainty; with --model.predict-error one does"
    samples = data.validation.samples
    number = min(MOST_PAIRS, len(data.validation))
    chosen = np.unique(np.linspace(0, len(data.validation) - 1, number).astype(int)).tolist()
    parts = [np.empty((3, 0))]
    for batch in make_loader(data.validation, [[(0, i)] for i in chosen], device=device):
        enter_phase("calibration")
        if not batch.num_graphs:
            continue
        batch, index = move(batch, device), int(batch.index[0])
        # In one pass, so that the uncertainty is that of one prediction.
        own = training_ratio(batch, config.ratio, config.max_ratio)
        own = own.clamp(max=model.config.max_pass_ratio)
        (target,), file = unpacked(batch.target, batch.target_ptr), samples.surface(index)
        surface = None if file is None else Surface.load(file)
        vertical = samples.is_vertical(index)
        for ratio in (own, own.clamp(max=2)):
            made: list[PointCloud] = []
            for model.calibration in (_EXACT, _SPACING):
                upsampled_pairs(batch, ratio, model, [vertical], not config.noise_spacings, made)
            found = (measured_uncertainty(cloud, target, surface) for cloud in made)
            (errors, distance), (spacing, _) = found
            if surface is None and vertical:
                distance = np.maximum(distance, _LEAST_ON_SURVEYS * spacing)
            # Points on the ground below crowns have an uncertainty that no calibration changes.
            of_model = errors != spacing
            ratios = np.full(len(errors), ratio.item())
            part = np.stack([np.log(errors / spacing), distance / spacing, ratios])
            parts.append(part[:, of_model])
    log_error, distance, ratios = np.concatenate(parts, axis=1)
    if not len(log_error):
        return "note: the uncertainty is not calibrated: no validation pair has new points"
    model.calibration = Calibration.fit(log_error, distance, ratios)
    model.save_pretrained(directory)
    return f"Calibrated the uncertainty on {len(log_error):,} new points of validation pairs."
