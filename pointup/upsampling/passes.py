"""Upsampling in passes: by a large ratio, a pass goes over what the one before it made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from pointup.data.clouds import PointCloud
from pointup.model import Upsampler
from pointup.upsampling.job import Upsampling
from pointup.upsampling.running import Shares, run_upsampling
from pointup.upsampling.store import Store, build_store
from pointup.upsampling.wishes import Wishes


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
) -> Iterator[PointCloud]:
    """Make the new points of a cloud, in as many passes as the wishes take; then they come.

    In the main process the clouds that `Upsampling.new_points` gives, pass after pass; their files
    are gone then. `begin` is told of each pass, and how many points it has; see `run_upsampling`
    for the rest.
    """
    ratios = wishes.pass_ratios(len(measured))
    passes: list[Upsampling] = []
    store = measured
    for number, ratio in enumerate(ratios, 1):
        with shares.together():
            upsampling = Upsampling(
                store,
                model,
                wishes,
                device,
                token_budget,
                ratio=ratio,
                measured=measured if passes else None,
            )
        begin(f"upsampling, pass {number}" if passes else "upsampling", len(store))
        run_upsampling(upsampling, shares, tile, report)
        passes.append(upsampling)
        if number < len(ratios):
            directory = measured.directory / f"pass_{number + 1}"
            with shares.together():
                if shares.is_main and upsampling.has_more_to_make():
                    directory.mkdir()
                    build_store(upsampling.for_next_pass(), directory)
            if not directory.exists():
                break
            store = Store(directory)
    kept = passes if wishes.originals else passes[-1:]
    return chain.from_iterable(upsampling.new_points() for upsampling in kept)
