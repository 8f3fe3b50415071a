"""Checks a run directory (lock, heartbeat, checkpoints, model) and the dataset of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pointup.cli.doctor.machine import Finding, fail, ok, reason_of, warn
from pointup.datasets.opening import open_samples
from pointup.errors import DataError
from pointup.terminal import in_bytes
from pointup.training.run_directory.checkpoint import (
    FILES,
    LATEST,
    checkpoint_directories,
    damaged_files,
    fault_of,
    named_by,
    offer_instead_of,
    whole_checkpoints,
)
from pointup.training.run_directory.lock import inspect_lock

NUM_NAMED = 3
OLD_SECONDS = 600.0
"""Seconds without a new line of metrics after which a running training may hang."""


def read_config(directory: Path) -> dict[str, Any]:
    """The options of a run; {} if its config.json can't be read."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def run_findings(directory: Path) -> Iterator[Finding]:
    if not directory.is_dir():
        yield fail("run", f"{directory}: no such directory", "give the --output-dir of a run")
        return
    if read_config(directory):
        yield ok("run", str(directory))
    else:
        what = f"{directory / 'config.json'} is missing, or not JSON"
        yield fail("run", what, "restore it, or train in another --output-dir")
    lock, is_training = lock_finding(directory / "lock")
    yield lock
    yield heartbeat_finding(directory / "metrics.jsonl", is_training)
    yield from checkpoint_findings(directory / "checkpoints")
    yield model_finding(directory / "model")


def lock_finding(path: Path) -> tuple[Finding, bool]:
    """The state of the lock, and whether the run is training now."""
    if not path.is_file() or not path.stat().st_size:
        return ok("lock", "free: the run is not training"), False
    holder, is_held = inspect_lock(path)
    who = "process {pid} on {host}, since {since}".format_map(holder) if holder else "a process"
    if is_held:
        return ok("lock", f"held by {who}: the run is training"), True
    remedy = "start the same command again: it takes over the lock, and continues the run"
    return warn("lock", f"stale: {who}, has ended without releasing it", remedy), False


def heartbeat_finding(path: Path, is_training: bool) -> Finding:
    """Check the last line of the metrics, and its age."""
    subject = "last heartbeat"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        age = max(time.time() - path.stat().st_mtime, 0.0)
    except OSError:
        return warn(subject, "no metrics.jsonl yet", "start the training, or see logs/rank_0.log")
    records = [record for record in map(parsed, lines) if record]
    if not records:
        return warn(subject, "metrics.jsonl is empty", "see logs/rank_0.log")
    text = f"step {records[-1].get('step')}, {timedelta(seconds=round(age))} ago"
    losses = [record["loss"] for record in records if "loss" in record]
    is_finite = not losses or losses[-1] is not None
    if losses:
        text += f", loss {losses[-1]:.4g}" if is_finite else ", loss not finite"
    if is_training and age > OLD_SECONDS:
        return warn(subject, text, "--hang-timeout ends a hang; see logs/rank_N.log")
    if not is_finite:
        return warn(subject, text, "the log names the clouds; --debug names the operation")
    return ok(subject, text)


def parsed(line: str) -> dict[str, Any]:
    """The record of a line of JSON; {} for a truncated line, such as the last of a killed run."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def checkpoint_findings(directory: Path) -> Iterator[Finding]:
    """Read and check every checkpoint. A damaged one fails if the run would continue from it."""
    subject, marker = "checkpoints", directory / LATEST
    latest, found = named_by(marker), checkpoint_directories(directory)
    yield from (checkpoint_finding(path, path.name == latest) for path in found)
    whole = whole_checkpoints(directory)
    if latest is None and not found:
        yield warn(subject, "none yet", "--save-every sets how often one is written")
    elif latest is None and whole:
        remedy = f"the same command continues from {whole[-1].name}, the newest intact one"
        yield warn(subject, f"{marker} names no checkpoint", remedy)
    elif latest is None or directory / latest not in found:
        text = f"{marker} names {latest or 'no checkpoint'}: missing"
        yield fail(subject, text, offer_instead_of(directory / (latest or LATEST)))
    for path in directory.glob(".step_*.part"):
        yield warn(subject, f"{path.name} is the rest of an interrupted save", "remove it")


def checkpoint_finding(path: Path, is_latest: bool) -> Finding:
    subject, mark = "checkpoint", ", LATEST" if is_latest else ""
    fault = fault_of(path)
    if not fault:
        files = json.loads((path / "state.json").read_text())["files"]
        damaged = damaged_files(path, files)
        fault = f"has a damaged {', '.join(damaged)}" if damaged else ""
    if not fault:
        size = sum((path / name).stat().st_size for name in FILES)
        return ok(subject, f"{path.name} is intact, {in_bytes(size)}{mark}")
    if is_latest:
        return fail(subject, f"{path.name}{mark}, {fault}", offer_instead_of(path))
    return warn(subject, f"{path.name} {fault}", f"remove {path}; no run continues from it")


def model_finding(directory: Path) -> Finding:
    path = directory / "model.safetensors"
    if not directory.is_dir():
        return warn("model", "none yet", "the first evaluation saves one")
    try:
        json.loads((directory / "config.json").read_text())
        with safe_open(path, "pt") as file:
            num_tensors = len(file.keys())
    except (OSError, ValueError, SafetensorError) as error:
        remedy = "the next better evaluation replaces it; the weights are in the checkpoints, too"
        return fail("model", f"{directory} can't be read: {reason_of(error)}", remedy)
    return ok("model", f"{directory}, {num_tensors} tensors")


def data_findings(name: str, min_points: int, token_budget: int | str | None) -> Iterator[Finding]:
    """Check that a model that needs `min_points` points and a run with `token_budget` can use the
    samples; a budget of None grows to the largest pair."""
    inspect = f"`pointup inspect {name}` lists them"
    for split in ("train", "validation"):
        subject = f"data, {split}"
        try:
            samples = open_samples(name, split)
        except DataError as error:
            # What a run on this dataset alone ends with, in two parts: reason and remedy.
            reason, _, remedy = reason_of(error).partition("; ")
            remedy = remedy or "`pointup prepare` makes datasets"
            yield fail(subject, f"training refuses {reason}", remedy)
            return
        bad = samples.bad_samples(min_points)
        tokens = samples.array("num_source").astype(np.int64) + samples.array("num_target")
        text = (
            f"{len(samples):,} pairs, {tokens.sum():,} points, at most {tokens.max():,} in a pair"
        )
        reasons = "; ".join(f"{sample.name}: {sample.reason}" for sample in bad[:NUM_NAMED])
        if len(bad) == len(samples):
            yield fail(subject, f"none of {text} can be used: {reasons}", inspect)
        elif bad:
            remedy = f"they are left out; {inspect}"
            yield warn(subject, f"{text}; {len(bad):,} bad: {reasons}", remedy)
        else:
            yield ok(subject, text)
        if isinstance(token_budget, int) and tokens.max() > token_budget:
            largest = samples.names[int(tokens.argmax())]
            text = f"{largest} has {tokens.max():,} points, more than the token budget of"
            remedy = "give a larger --token-budget, or auto, or --crop"
            yield warn(subject, f"{text} {token_budget:,}", remedy)
