"""Fingerprints of a dataset in checkpoints, and those of earlier versions."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator
from runs import options

from pointup.datasets.pair_dataset import open_pairs, open_samples, write_pairs
from pointup.errors import ConfigError
from pointup.training.datasets import open_training_data
from pointup.training.fingerprint import Fingerprint


def earlier_fingerprint(directory: Path) -> dict:
    """A fingerprint as version 0.1.0 stored it: names, sizes, and the points of 32 samples."""
    values: dict = {
        "written": json.loads((directory / "pointup.json").read_text())["contents"],
    }
    for split in ("train", "validation"):
        rows = open_pairs(directory, split)
        sizes = np.array(rows["num_source"][:]) + np.array(rows["num_target"][:])
        points = 0
        for index in np.linspace(0, len(rows) - 1, 32).astype(int).tolist():
            target = np.array(rows[index]["target"], np.float32)
            points = zlib.crc32(np.sort(target, axis=0).tobytes(), points)
        values[split] = {
            "samples": len(rows),
            "names": zlib.crc32("\n".join(rows["name"][:]).encode()),
            "sizes": zlib.crc32(sizes.astype(np.int64).tobytes()),
            "points": points,
        }
    return values


def test_a_checkpoint_of_an_earlier_version_is_compared_in_what_it_has(
    pair_directory: Path, tmp_path: Path, accelerator: Accelerator
) -> None:
    earlier = earlier_fingerprint(pair_directory)
    data = open_training_data(options(pair_directory, tmp_path), accelerator)
    Fingerprint(data).check_same(earlier)

    written = [open_samples(pair_directory, split) for split in ("train", "validation")]
    train, validation = ([part.pair(i) for i in range(len(part))] for part in written)
    train[0].target[0] += 0.01
    write_pairs(train, validation, tmp_path / "other", {})
    changed = open_training_data(options(tmp_path / "other", tmp_path), accelerator)
    with pytest.raises(ConfigError, match=r"changed .*\(the points of the train pairs\)"):
        Fingerprint(changed).check_same(earlier)
    with pytest.raises(ConfigError, match=r"changed .*\(the contents of the train pairs\)"):
        Fingerprint(changed).check_same(Fingerprint(data).values)
    train[0].target[0] -= 0.01
    train[1].source[0] += 0.01  # Earlier versions compared sources by the digest only.
    write_pairs(train[:2] + train[2:], validation, tmp_path / "source", {})
    changed = open_training_data(options(tmp_path / "source", tmp_path), accelerator)
    with pytest.raises(ConfigError, match=r"changed"):
        Fingerprint(changed).check_same(earlier)
