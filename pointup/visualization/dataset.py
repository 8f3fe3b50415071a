"""Picture of a dataset: histograms of sizes, ratios and extents of its samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pointup.visualization.page import Page, labelled, save_picture


def dataset_picture(
    num_source: np.ndarray,
    num_target: np.ndarray,
    extent: np.ndarray,
    path: str | Path | None = None,
    unit: str = "",
) -> np.ndarray:
    """Histograms of a dataset: points per sample, ratio of target to source, extent of the source.

    num_source, num_target: (B,) number of points of each sample.
    extent: (B,) longest side of the bounding box of each sample's source, in `unit`.

    Written to `path` (PNG or JPEG) if given. Raises FileError where `path` can't be written.
    """
    num_source, num_target = np.asarray(num_source), np.asarray(num_target)
    ratio = num_target[num_source > 0] / num_source[num_source > 0]
    page = Page(1600, 400)
    total = int(num_source.sum()) + int(num_target.sum())
    page.heading(24, 366, f"{len(num_source):,} samples", f"{total:,} points")
    page.histogram(72, "points per sample", {"source": num_source, "target": num_target})
    page.histogram(592, "upsampling ratio, target / source", {"": ratio})
    page.histogram(1112, labelled("longest side of the source", unit), {"": np.asarray(extent)})
    if path is not None:
        save_picture(page.pixels(), path)
    return page.pixels()
