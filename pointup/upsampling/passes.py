"""Upsampling in passes: by a large ratio, a pass goes over what the one before it made."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from pointup.io.cloud import PointCloud
from pointup.model.upsampler import Upsampler
from pointup.upsampling.executor import Shares, choose_from_draft, run_upsampling
from pointup.upsampling.new_points import NewPoints
from pointup.upsampling.options import Wishes
from pointup.upsampling.single_pass.upsampling_pass import Upsampling
from pointup.upsampling.store.point_store import Store, build_store

DRAFT_STEPS = 3
"""How often points are pushed that others are drafted from: more makes them more even, and puts
them farther off the surface."""


def run_passes(
    measured: Store,
    model: Upsampler,
    wishes: Wishes,
    shares: Shares,
    device: torch.device,
    *,
    token_budget: int | None = None,
    tile: float | None = None,
    begin: Callable[[str, int], Any] = lambda phase, num_points: None,
    report: Callable[[float], Any] = lambda points: None,
) -> NewPoints:
    """Make the new points of a cloud, in as many passes as the wishes take.

    `begin` is told of each pass, and how many points it has; see `run_upsampling` for the rest. The
    points of the first pass are chosen once more from a draft where the wishes or the model ask for
    oversampling.
    """
    oversampling = wishes.oversampling_of(model.config)
    ratios = wishes.pass_ratios(len(measured))
    passes: list[Upsampling] = []

    def run(store: Store, phase: str, wishes: Wishes = wishes, **options: Any) -> Upsampling:
        with shares.together():
            upsampling = Upsampling(store, model, wishes, device, token_budget, **options)
        begin(phase, len(store))
        run_upsampling(upsampling, shares, tile, report)
        return upsampling

    def store_of(points: Callable[[], Iterator[PointCloud]], name: str) -> Store:
        directory = measured.directory / name
        with shares.together():
            if shares.is_main:
                directory.mkdir()
                build_store(points(), directory)
        return Store(directory)

    def run_drafted(ratio: float | None) -> Upsampling:
        """The first pass, its points chosen once more from a draft."""
        options: dict[str, Any] = {"num_steps": DRAFT_STEPS}
        first = run(measured, "upsampling", ratio=ratio, oversampling=oversampling, **options)
        if first.made.num_new():
            finer = store_of(first.made.for_draft, "draft")
            # The points so far are kept in it, also where the measured ones are not.
            keeping = replace(wishes, originals=True)
            draft = run(
                finer, "drafting", keeping, ratio=oversampling, measured=measured, **options
            )
            begin("choosing", len(measured))
            choose_from_draft(first, draft, shares, report)
            with shares.together():
                if shares.is_main:
                    shutil.rmtree(finer.directory)
        return first

    store = measured
    for number, ratio in enumerate(ratios, 1):
        if passes:
            passes.append(run(store, f"upsampling, pass {number}", ratio=ratio, measured=measured))
        elif oversampling > 1:
            passes.append(run_drafted(ratio))
        else:
            passes.append(run(measured, "upsampling", ratio=ratio))
        if number < len(ratios):
            if not passes[-1].has_more_to_make():
                break
            store = store_of(passes[-1].made.for_next_pass, f"pass_{number + 1}")
    kept = passes if wishes.originals else passes[-1:]
    return NewPoints(measured, [upsampling.made for upsampling in kept])
