"""Runs the passes of an upsampling: each pass upsamples the output of the one before it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from pointup.errors import ConfigError
from pointup.io.cloud import PointCloud
from pointup.model.upsampler import Upsampler
from pointup.upsampling.executor import (
    WorkerGroup,
    choose_from_second_pass,
    make_ground_points,
    run_upsampling,
)
from pointup.upsampling.new_points import NewPoints
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.single_pass.upsampling_pass import UpsamplingPass
from pointup.upsampling.store.point_store import Store, build_store

OVERSAMPLING_RELAXATION_STEPS = 3
"""Relaxation steps of both passes with oversampling. More steps make the points more even, and move
them farther off the surface."""


def run_passes(
    measured: Store,
    model: Upsampler,
    options: UpsampleOptions,
    workers: WorkerGroup,
    device: torch.device,
    *,
    token_budget: int | None = None,
    tile: float | None = None,
    begin: Callable[[str, int], Any] = lambda phase, num_points: None,
    report: Callable[[float], Any] = lambda points: None,
) -> NewPoints:
    """Run all passes over a cloud, as many as the ratio or density needs.

    `begin` is called at the start of each pass with the name of the phase and its number of points;
    for `tile` and `report` see `run_upsampling`. With oversampling, by the options or the model's
    configuration, a second pass over the output of the first supplies more candidates, and the
    points are selected again. Raises ConfigError for `max_uncertainty` with a model that predicts
    no uncertainty.
    """
    if options.max_uncertainty is not None and not model.calibration:
        raise ConfigError(
            f"max uncertainty {options.max_uncertainty:g}: the model predicts no uncertainty; "
            "train one with --model.predict-error"
        )
    made = make_ground_points(measured, options, workers)
    ground = made.output if made else None
    of_first_pass: dict[str, Any] = {}
    # They count for the ratio and the density like all others.
    if made and options.density is None:
        num_other = options.num_out(len(measured)) - made.output.num_new()
        options = replace(options, ratio=num_other / len(measured))
    elif made:
        of_first_pass = {"num_made": made.num_below()}
    oversampling = options.oversampling_of(model.config)
    ratios = options.pass_ratios(len(measured), model.config.max_pass_ratio)
    passes: list[UpsamplingPass] = []

    def run(
        store: Store, phase: str, options: UpsampleOptions = options, **settings: Any
    ) -> UpsamplingPass:
        with workers.barrier():
            upsampling = UpsamplingPass(store, model, options, device, token_budget, **settings)
        begin(phase, len(store))
        run_upsampling(upsampling, workers, tile, report)
        return upsampling

    def store_of(points: Callable[[], Iterator[PointCloud]], name: str) -> Store:
        directory = measured.directory / name
        with workers.barrier():
            if workers.is_main:
                directory.mkdir()
                build_store(points(), directory)
        return Store(directory)

    def run_oversampled(ratio: float | None) -> UpsamplingPass:
        """The first pass, with its points selected again from the candidates of a second pass."""
        settings: dict[str, Any] = {"num_steps": OVERSAMPLING_RELAXATION_STEPS}
        of_first = settings | of_first_pass
        first = run(measured, "upsampling", ratio=ratio, oversampling=oversampling, **of_first)
        if first.output.num_new():
            finer = store_of(first.output.for_second_pass, "second_pass")
            # The second pass keeps the points of the first one, even if the output leaves the
            # measured points out.
            keeping = replace(options, originals=True)
            second = run(
                finer, "oversampling", keeping, ratio=oversampling, measured=measured, **settings
            )
            begin("selection", len(measured))
            choose_from_second_pass(first, second, workers, report)
            with workers.barrier():
                if workers.is_main:
                    shutil.rmtree(finer.directory)
        return first

    store = measured
    for number, ratio in enumerate(ratios, 1):
        if passes:
            passes.append(run(store, f"upsampling, pass {number}", ratio=ratio, measured=measured))
        elif oversampling > 1:
            passes.append(run_oversampled(ratio))
        else:
            passes.append(run(measured, "upsampling", ratio=ratio, **of_first_pass))
        if number < len(ratios):
            if not passes[-1].needs_next_pass():
                break
            store = store_of(passes[-1].output.for_next_pass, f"pass_{number + 1}")
    kept = passes if options.originals else passes[-1:]
    outputs = [upsampling.output for upsampling in kept]
    return NewPoints(measured, outputs, ground, options.has_uncertainty(model))
