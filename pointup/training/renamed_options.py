"""Translates options of earlier versions to their current names and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointup.model.config import RENAMED, with_current_names

RENAMED_OPTIONS = {
    f"--model.{old.replace('_', '-')}": f"--model.{new.replace('_', '-')}"
    for old, new in RENAMED.items()
}
"""Current names of train.py flags, by their earlier names."""
RENAMED_CHAMFER = {"plain": "unsquared"}


def with_current_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The stored options of a run, with current names and values."""
    current = dict(saved)
    if "data" in saved and not isinstance(saved["data"], list | tuple):
        # A run had one dataset, or none.
        current["data"] = [] if saved["data"] is None else [str(saved["data"])]
    model, loss = saved.get("model"), saved.get("loss")
    if isinstance(model, dict):
        current["model"] = with_current_names(model)
    if isinstance(loss, dict) and isinstance(loss.get("chamfer"), str):
        current["loss"] = {
            **loss,
            "chamfer": RENAMED_CHAMFER.get(loss["chamfer"], loss["chamfer"]),
        }
    return current
