"""Checks whether a pair dataset can be used for training."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pointup.cli.doctor.finding import Finding, fail, ok, reason_of, warn
from pointup.datasets.opening import open_samples
from pointup.errors import DataError

NUM_NAMED = 3


def data_findings(name: str, min_points: int, token_budget: int | str | None) -> Iterator[Finding]:
    """Check the sample tables, for a model that needs `min_points` points.

    A run with `token_budget` must be able to use the samples. A `token_budget` of None is a budget
    that grows to the largest pair.
    """
    for split in ("train", "validation"):
        try:
            yield from split_findings(name, split, min_points, token_budget)
        except DataError as error:
            # What a run on this dataset alone ends with, in two parts: reason and remedy.
            reason, _, remedy = reason_of(error).partition("; ")
            remedy = remedy or "`pointup prepare` makes datasets"
            yield fail(f"data, {split}", f"training refuses {reason}", remedy)
            return


def split_findings(
    name: str, split: str, min_points: int, token_budget: int | str | None
) -> Iterator[Finding]:
    subject, inspect = f"data, {split}", f"`pointup inspect {name}` lists them"
    samples = open_samples(name, split)
    bad = samples.bad_samples(min_points)
    tokens = samples.array("num_source").astype(np.int64) + samples.array("num_target")
    pairs = f"{len(samples):,} pair{'s' * (len(samples) != 1)}"
    text = f"{pairs}, {tokens.sum():,} points, at most {tokens.max():,} in a pair"
    reasons = "; ".join(f"{sample.name}: {sample.reason}" for sample in bad[:NUM_NAMED])
    if len(bad) == len(samples):
        yield fail(subject, f"none of {text} can be used: {reasons}", inspect)
    elif bad:
        yield warn(subject, f"{text}; {len(bad):,} bad: {reasons}", f"they are left out; {inspect}")
    else:
        yield ok(subject, text)
    largest = int(tokens.argmax())
    if isinstance(token_budget, int) and tokens[largest] > token_budget:
        what = f"{samples.names[largest]} has {tokens[largest]:,} points"
        remedy = "give a larger --token-budget, or auto, or --crop"
        yield warn(subject, f"{what}, more than the token budget of {token_budget:,}", remedy)
