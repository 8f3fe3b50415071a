"""Checkpoints of a run: whole or not there at all.

A checkpoint is `checkpoints/step_N/`; the file `checkpoints/LATEST` names the newest whole one.
It holds everything that a run's next step depends on. Random numbers are drawn anew for every
micro-batch from (seed, step, slot), so there is no generator state to keep, on any process.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from pointup.errors import PointupError
from pointup.model import Upsampler
from pointup.training.optimizer import load_optimizer

LATEST = "LATEST"
FORMAT = 1
"""Version of the layout of checkpoints; one of another version is refused."""
PREFIXES = ("module.", "_orig_mod.")
DATA_FILES = ("model.safetensors", "optimizer.pt")
FILES = ("state.json", *DATA_FILES)
LOAD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
)


class CheckpointError(PointupError):
    """A checkpoint can't be written or continued from."""


def save_checkpoint(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any | None,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write `directory/step_N` for N = `state["step"]`, point LATEST to it, and keep only `keep`.

    One process writes. Files are flushed to disk before the directory gets its name and the
    directory before LATEST names it, so that a kill at any moment leaves LATEST on a whole one.
    Raises CheckpointError, naming the path, when the disk is full or read-only.
    """
    final = directory / f"step_{state['step']}"
    temporary = final.with_suffix(".tmp")
    marker = directory / LATEST
    try:
        if marker.exists() and directory / marker.read_text().strip() == final:
            # The same weights; what else is known may have grown, by an evaluation.
            write_whole(final / "state.json", with_checksums(state, final))
            return final
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        save_file(weights, temporary / "model.safetensors")
        torch.save(
            {
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict() if scaler is not None else None,
            },
            temporary / "optimizer.pt",
        )
        (temporary / "state.json").write_text(with_checksums(state, temporary))
        for path in [*temporary.iterdir(), temporary]:
            flush_to_disk(path)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        write_whole(marker, final.name)
        # Those of later steps were left behind by going back to an earlier one.
        earlier = [p for p in whole_checkpoints(directory) if step_of(p) <= state["step"]]
        for old in earlier[:-keep]:
            shutil.rmtree(old)
    except (OSError, RuntimeError, SafetensorError) as error:
        # Half a checkpoint would only keep the disk full.
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise CheckpointError(
            f"{final}: the checkpoint can't be written ({reason}); "
            "free or unlock the disk, then run the same command again"
        ) from error
    return final


def write_whole(path: Path, text: str) -> None:
    """Replace a file, which holds the old text or the new one at any moment."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    flush_to_disk(temporary)
    temporary.replace(path)
    flush_to_disk(path.parent)


def save_model(model: Upsampler, directory: Path) -> None:
    """Replace the model in `directory`, which holds a whole one before and after.

    Raises CheckpointError, naming the path, when the disk is full or read-only.
    """
    written, replaced = directory.with_suffix(".tmp"), directory.with_suffix(".old")
    try:
        for leftover in (written, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        model.save_pretrained(written)
        if directory.exists():
            directory.rename(replaced)
        written.rename(directory)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(written, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise CheckpointError(f"{directory}: the model can't be written ({reason})") from error


def flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def with_checksums(state: dict[str, Any], path: Path) -> str:
    """The text of a checkpoint's state.json: `state`, and what its other files must be."""
    files = {
        name: {"bytes": (path / name).stat().st_size, "crc32": checksum(path / name)}
        for name in DATA_FILES
    }
    return json.dumps({"format": FORMAT, "files": files, **state}, indent=1)


def checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def step_of(path: Path) -> int:
    return int(path.name[5:])


def whole_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints whose files are all there at full length, oldest step first."""
    found = [path for path in directory.glob("step_*") if path.name[5:].isdigit()]
    return sorted((path for path in found if not fault_of(path)), key=step_of)


def fault_of(path: Path) -> str:
    """What keeps a checkpoint from being whole, seen without reading all of it; "" for nothing."""
    missing = [name for name in FILES if not (path / name).is_file()]
    if missing:
        return f"lacks {', '.join(missing)}"
    try:
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError):
        return "has a state.json that can't be read"
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return "was written by another version of pointup"
    for name, known in state["files"].items():
        if (path / name).stat().st_size != known["bytes"]:
            return f"has a {name} that was cut short"
    return ""


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that LATEST names, or None where no run has saved one.

    Raises CheckpointError when LATEST names one that is gone or not whole.
    """
    marker = directory / LATEST
    if not marker.exists():
        return None
    path = directory / marker.read_text().strip()
    fault = fault_of(path)
    if fault:
        raise CheckpointError(f"{path}: the checkpoint {fault}; {offer_instead_of(path)}")
    return path


def offer_instead_of(path: Path) -> str:
    whole = [other for other in whole_checkpoints(path.parent) if other != path]
    if not whole:
        return f"remove {path.parent} to start again"
    marker = path.parent / LATEST
    return f"write {whole[-1].name} into {marker} to continue from the newest whole one"


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any | None
) -> dict[str, Any]:
    """Put model, optimizer and scaler into the state of `path`; return the rest of the state.

    Weights saved from a wrapped model (prefix `module.` or `_orig_mod.`) load as well.
    Raises CheckpointError, naming the file, when one is truncated or of another model.
    """
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        damaged = damaged_files(path, state.pop("files"))
        if damaged:
            raise ValueError(f"{', '.join(damaged)} is damaged")
        del state["format"]
        weights = {unwrapped(k): v for k, v in load_file(path / "model.safetensors").items()}
        model.load_state_dict(weights)
        saved = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        load_optimizer(optimizer, saved["optimizer"])
        if scaler is not None and saved["scaler"] is not None:
            scaler.load_state_dict(saved["scaler"])
    except LOAD_ERRORS as error:
        lines = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
        reason = " ".join(lines[:2])[:200]
        raise CheckpointError(
            f"{path}: can't be continued from ({reason}); {offer_instead_of(path)}"
        ) from error
    return state


def damaged_files(path: Path, files: dict[str, dict[str, int]]) -> list[str]:
    """Names of a checkpoint's files that aren't what its state.json says, by reading them all."""
    return [name for name, known in files.items() if checksum(path / name) != known["crc32"]]


def unwrapped(name: str) -> str:
    """A weight's name without the prefixes that wrappers of a model give it."""
    while name.startswith(PREFIXES):
        name = name.split(".", 1)[1]
    return name
