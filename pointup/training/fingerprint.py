"""Fingerprint of a run's dataset, by which a continued run detects that the data have changed."""

from __future__ import annotations

import json
import logging
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pointup.datasets.pair_dataset import PairDataset
from pointup.errors import ConfigError
from pointup.training.datasets import TrainingData

logger = logging.getLogger("pointup")

NUM_COMPARED = 32
"""Samples per split whose points checkpoints of earlier versions compare."""


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a dataset, from the sample tables: reads no points."""

    data: TrainingData

    @cached_property
    def values(self) -> dict[str, Any]:
        """The fingerprint as JSON values, for checkpoints.

        `written` holds the digests of all contents that `write_pairs` stores in pointup.json; None
        for datasets from other sources. For each split there are checksums of all names, sizes and
        points.
        """
        digests = [written_digests(Path(source.name)) for source in self.data.sources]
        written: dict[str, str] | None = digests[0]
        if len(digests) > 1:
            written = {
                f"{split} of dataset {number}": digest
                for number, of_one in enumerate(digests)
                for split, digest in (of_one or {}).items()
            }
        return {"written": written, **self.data.checksums}

    def check_same(self, before: Any) -> None:
        """Raise ConfigError, naming the differences, if a checkpoint was saved with other data.

        `before` is the fingerprint in the checkpoint; without one, the log warns.
        """
        if not isinstance(before, dict):
            logger.warning("the checkpoint has no fingerprint of its data, which is not compared")
            return
        now = self.values
        differing = []
        for split, dataset in (("train", self.data.train), ("validation", self.data.validation)):
            earlier, current = before.get(split), dict(now[split])
            if isinstance(earlier, dict) and "contents" not in earlier:
                # Earlier versions compared the points of a few samples only.
                del current["contents"]
                current["points"] = points_checksum(dataset)
            differing += [
                f"the {name} of the {split} pairs"
                for name in current
                if not isinstance(earlier, dict) or earlier.get(name) != current[name]
            ]
        written = before.get("written")
        if not differing and isinstance(written, dict) and now["written"] is not None:
            digests = now["written"].items()
            differing = [f"the {split} pairs" for split, d in digests if written.get(split) != d]
        if differing:
            raise ConfigError(
                f"the dataset has changed since the checkpoint ({', '.join(differing)}): restore "
                "it, or start a new run in another --output-dir"
            )


def written_digests(directory: Path) -> dict[str, str] | None:
    """Digests by split that `write_pairs` stored with a dataset; None if there are none."""
    try:
        digests = json.loads((directory / "pointup.json").read_text(encoding="utf-8"))["contents"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return digests if isinstance(digests, dict) else None


def points_checksum(dataset: PairDataset) -> int:
    """Checksum of the stored target points of a few samples, as in checkpoints without `contents`.

    The points are sorted first, because the order in which they are read is not part of the data.
    """
    checksum = 0
    for index in np.linspace(0, len(dataset) - 1, NUM_COMPARED).astype(int).tolist():
        target = dataset.samples.points(index)["target"]
        checksum = zlib.crc32(np.sort(target, axis=0).tobytes(), checksum)
    return checksum
