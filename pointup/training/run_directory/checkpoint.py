"""Writes, finds and checks the checkpoints of a run: `checkpoints/step_N/`, with all that the next
step depends on; `checkpoints/LATEST` names the newest complete one.

They are written atomically, unlike by `Accelerator.save_state`.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import nn

from pointup.disk import checksum, remove, replace_directory, written_whole
from pointup.errors import PointupError
from pointup.model.stored_model import weights_on_host
from pointup.model.upsampler import Upsampler

logger = logging.getLogger("pointup")

LATEST = "LATEST"
NAME = re.compile(r"step_[0-9]+")
FORMAT = 1
"""Version of the checkpoint layout; checkpoints of other versions are refused."""
DATA_FILES = ("model.safetensors", "optimizer.pt")
FILES = ("state.json", *DATA_FILES)


class CheckpointError(PointupError):
    """A checkpoint can't be written or loaded."""


def save_checkpoint(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any | None,
    state: dict[str, Any],
    keep: int,
    average: dict[str, Any] | None = None,
) -> Path:
    """Write `directory/step_N` for N = `state["step"]`, set LATEST, and keep `keep` checkpoints.

    `average` is the state of a `WeightAverage`. Only one process calls this. All is on the disk
    before LATEST names it, so after a kill or loss of power at any moment LATEST names a complete
    checkpoint. Raises CheckpointError, naming the path, if the disk is full or read-only.
    """
    final = directory / f"step_{state['step']}"
    with _failures_named(f"{final}: the checkpoint"):
        directory.mkdir(parents=True, exist_ok=True)
        if named_by(directory / LATEST) == final.name and not fault_of(final):
            # The weights are unchanged; the rest of the state may include a new evaluation.
            _write(final / "state.json", with_checksums(state, final))
            return final
        with written_whole(final, is_sole_writer=True, flushed=True) as part:
            part.mkdir()
            (part / "model.safetensors").write_bytes(save(weights_on_host(model)))
            states = {
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict() if scaler is not None else None,
                "average": average,
            }
            # In memory first: torch's own error for a full disk does not say that it is full. No
            # getbuffer(): after such an error Python 3.12 crashes as it collects its view.
            torch.save(states, packed := io.BytesIO())
            (part / "optimizer.pt").write_bytes(packed.getvalue())
            (part / "state.json").write_text(with_checksums(state, part))
            remove(final)
        _write(directory / LATEST, final.name)
        # Later checkpoints remain if the user went back to an earlier one.
        earlier = [p for p in whole_checkpoints(directory) if step_of(p) <= state["step"]]
        for old in earlier[:-keep]:
            remove(old)
    return final


def save_model(model: Upsampler, directory: Path) -> None:
    """Replace the model in `directory`; a failure leaves the old model there.

    Raises CheckpointError, naming the path, if the disk is full or read-only.
    """
    new = directory.with_name(f".{directory.name}.part")
    with _failures_named(f"{directory}: the model"):
        try:
            remove(new)
            model.save_pretrained(new)
            replace_directory(directory, new)
        finally:
            remove(new)


@contextmanager
def _failures_named(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise CheckpointError(
            f"{what} can't be written ({reason}); free or unlock the disk, then run the same "
            "command again"
        ) from error


def _write(path: Path, text: str) -> None:
    with written_whole(path, is_sole_writer=True, flushed=True) as part:
        part.write_text(text)


def with_checksums(state: dict[str, Any], path: Path) -> str:
    """The text of state.json: `state`, with sizes and checksums of the checkpoint's other files."""
    files = {
        name: {"bytes": (path / name).stat().st_size, "crc32": checksum(path / name)}
        for name in DATA_FILES
    }
    return json.dumps({"format": FORMAT, "files": files, **state}, indent=1)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def checkpoint_directories(directory: Path) -> list[Path]:
    """Directories with the name of a checkpoint, complete or not, in order of their steps."""
    found = [path for path in directory.glob("step_*") if NAME.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def has_checkpoints(directory: Path) -> bool:
    """Whether a run has saved checkpoints in `directory`, complete or not."""
    return bool(checkpoint_directories(directory)) or named_by(directory / LATEST) is not None


def whole_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints whose files all exist with their full size, in order of their steps."""
    return [path for path in checkpoint_directories(directory) if not fault_of(path)]


def fault_of(path: Path) -> str:
    """The reason why a checkpoint is incomplete, without reading its weights; "" if complete."""
    missing = [name for name in FILES if not (path / name).is_file()]
    if missing:
        return f"lacks {', '.join(missing)}"
    try:
        state = json.loads((path / "state.json").read_text())
        lengths = {name: state["files"][name]["bytes"] for name in DATA_FILES}
        is_of_step = (state["format"], state["step"]) == (FORMAT, step_of(path))
    except (OSError, ValueError, LookupError, TypeError):
        is_of_step = False
    if not is_of_step:
        return "has a state.json that is not that of this checkpoint"
    short = [name for name, length in lengths.items() if (path / name).stat().st_size != length]
    return f"has a {short[0]} that was cut short" if short else ""


def named_by(marker: Path) -> str | None:
    """The checkpoint that LATEST names; None if the file doesn't exist or names none."""
    try:
        text = marker.read_text().strip()
    except (OSError, ValueError):
        return None
    return text if NAME.fullmatch(text) else None


def latest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint to continue from; None if no run has saved one.

    LATEST names it. If LATEST is missing or names none, it is the newest complete checkpoint, and
    the log warns. Raises CheckpointError if that checkpoint is missing or incomplete.
    """
    name, found = named_by(directory / LATEST), checkpoint_directories(directory)
    if name is None and not found:
        return None
    path = directory / name if name else (whole_checkpoints(directory) or found)[-1]
    if fault := fault_of(path):
        raise CheckpointError(f"{path}: the checkpoint {fault}; {offer_instead_of(path)}")
    if name is None:
        logger.warning(
            "%s names no checkpoint: continuing from %s, the newest whole one",
            directory / LATEST, path.name,
        )  # fmt: skip
    return path


def offer_instead_of(path: Path) -> str:
    whole = [other for other in whole_checkpoints(path.parent) if other != path]
    if not whole:
        return f"remove {path.parent} to start again"
    marker = path.parent / LATEST
    return f"write {whole[-1].name} into {marker} to continue from the newest whole one"


def damaged_files(path: Path, files: dict[str, dict[str, int]]) -> list[str]:
    """Names of a checkpoint's files whose checksum differs from state.json; reads all of them."""
    return [name for name, known in files.items() if checksum(path / name) != known["crc32"]]
