"""Fingerprint of a run's dataset, by which a continued run detects that the data have changed."""

from __future__ import annotations

import json
import logging
import zlib
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from pointup.datasets.pair_dataset import PairDataset
from pointup.errors import ConfigError

logger = logging.getLogger("pointup")

Fingerprint = dict[str, Any]
NUM_COMPARED = 32
"""Samples per split whose points are compared; of the other samples, names and sizes are."""


def fingerprint_of(name: str, train: PairDataset, validation: PairDataset) -> Fingerprint:
    """The fingerprint of a dataset, as JSON values.

    `written` holds the digests of all contents that `write_pairs` stores in pointup.json. Datasets
    from other sources have None there; of them, names, sizes, and the points of a few samples are
    compared.
    """
    return {
        "written": written_digests(Path(name)),
        "train": sampled(train),
        "validation": sampled(validation),
    }


def written_digests(directory: Path) -> dict[str, str] | None:
    """Digests by split that `write_pairs` stored with a dataset; None if there are none."""
    try:
        digests = json.loads((directory / "pointup.json").read_text(encoding="utf-8"))["contents"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return digests if isinstance(digests, dict) else None


def sampled(dataset: PairDataset) -> dict[str, int]:
    """Checksums of all names and sizes, and of the stored target points of a few samples.

    The points are sorted first, because the order in which they are read is not part of the data.
    """
    # Without augmentation, whose last bits may differ between processor types.
    stored = copy(dataset)
    stored.augment, stored.max_tokens = False, None
    points = 0
    for index in np.linspace(0, len(dataset) - 1, NUM_COMPARED).astype(int).tolist():
        points = zlib.crc32(np.sort(stored[index].target.numpy(), axis=0).tobytes(), points)
    return {
        "samples": len(dataset),
        "names": zlib.crc32("\n".join(map(str, dataset.names)).encode()),
        "sizes": zlib.crc32(dataset.full_sizes.tobytes()),
        "points": points,
    }


def check_same_data(before: Any, now: Fingerprint) -> None:
    """Raise ConfigError, naming the differences, if a checkpoint was saved with other data.

    A checkpoint without a fingerprint is not compared; the log warns about it.
    """
    if not isinstance(before, dict):
        logger.warning("the checkpoint has no fingerprint of its data, which is not compared")
        return
    differing = [
        f"the {name} of the {split} pairs"
        for split in ("train", "validation")
        for name in now[split]
        if not isinstance(before.get(split), dict) or before[split].get(name) != now[split][name]
    ]
    written = before.get("written")
    if not differing and isinstance(written, dict) and now["written"] is not None:
        # The digests cover all contents; the sampled points may be equal although others differ.
        digests = now["written"].items()
        differing = [f"the {split} pairs" for split, d in digests if written.get(split) != d]
    if differing:
        raise ConfigError(
            f"the dataset has changed since the checkpoint ({', '.join(differing)}): restore it, "
            "or start a new run in another --output-dir"
        )
