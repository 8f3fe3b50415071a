"""What the data of a run contain, in a few numbers: whether a dataset was replaced by another."""

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
NUM_LOOKED_INTO = 32
"""Samples of a dataset whose points are compared; of the others, name and size."""


def fingerprint_of(name: str, train: PairDataset, validation: PairDataset) -> Fingerprint:
    """What is compared when a run is continued, as JSON takes it.

    `written` is the digest of all contents that `write_pairs` left in pointup.json, where it did.
    For datasets of other writers there are names, sizes, and the points of a few samples alone.
    """
    return {
        "written": written_digests(Path(name)),
        "train": sampled(train),
        "validation": sampled(validation),
    }


def written_digests(directory: Path) -> dict[str, str] | None:
    """Digests by split that `write_pairs` left beside a dataset; None where there are none."""
    try:
        digests = json.loads((directory / "pointup.json").read_text(encoding="utf-8"))["contents"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return digests if isinstance(digests, dict) else None


def sampled(dataset: PairDataset) -> dict[str, int]:
    """Checksums of all names and sizes, and of the target points of a few samples as stored.

    Points are sorted before: the order in which they are read is no part of the data.
    """
    # As stored: augmented ones may differ in a last bit between kinds of processor.
    stored = copy(dataset)
    stored.augment, stored.max_tokens = False, None
    points = 0
    for index in np.linspace(0, len(dataset) - 1, NUM_LOOKED_INTO).astype(int).tolist():
        points = zlib.crc32(np.sort(stored[index].target.numpy(), axis=0).tobytes(), points)
    return {
        "samples": len(dataset),
        "names": zlib.crc32("\n".join(map(str, dataset.names)).encode()),
        "sizes": zlib.crc32(dataset.full_sizes.tobytes()),
        "points": points,
    }


def check_same_data(before: Any, now: Fingerprint) -> None:
    """Raise ConfigError, naming what differs, where a checkpoint was made with other data.

    Nothing is compared with a checkpoint that has no fingerprint.
    """
    if not isinstance(before, dict):
        logger.warning("the checkpoint has no fingerprint of its data: they can't be compared")
        return
    differing = [
        f"the {name} of the {split} pairs"
        for split in ("train", "validation")
        for name in now[split]
        if not isinstance(before.get(split), dict) or before[split].get(name) != now[split][name]
    ]
    written = before.get("written")
    if not differing and isinstance(written, dict) and now["written"] is not None:
        # Digests of everything; what was sampled may be the same by chance.
        digests = now["written"].items()
        differing = [f"the {split} pairs" for split, d in digests if written.get(split) != d]
    if differing:
        raise ConfigError(
            f"the dataset has changed since the checkpoint ({', '.join(differing)}): restore it, "
            "or start a new run in another --output-dir"
        )
