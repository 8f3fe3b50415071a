"""Checkpoints with well-formed files and impossible contents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from starts import Start, refused_in_a_line

from pointup.training.run_directory.checkpoint import DATA_FILES, checksum


def changed_state(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint's state.json, as JSON."""
    state = json.loads((path / "state.json").read_text())
    change(state)
    (path / "state.json").write_text(json.dumps(state))


def changed_optimizer(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a checkpoint's optimizer.pt, and its checksum with it."""
    saved = torch.load(path / "optimizer.pt", weights_only=True)
    torch.save(change(saved) or saved, path / "optimizer.pt")
    files = {
        name: {"bytes": (path / name).stat().st_size, "crc32": checksum(path / name)}
        for name in DATA_FILES
    }
    changed_state(path, lambda state: state.update(files=files))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(step=7),
        lambda s: s.update(step="2"),
        lambda s: s.update(files=None),
        lambda s: s["files"].pop("optimizer.pt"),
        lambda s: s.update(elapsed_seconds="long"),
        lambda s: s.update(best=None),
        lambda s: s.update(finished=1),
        lambda s: s.update(evaluations_since_best=-1),
        lambda s: s.pop("sampler"),
        lambda s: s.update(sampler=[]),
        lambda s: s["sampler"].update(epoch=-1),
        lambda s: s["sampler"].update(seed=1.5),
        lambda s: s["sampler"].update(segments=[[1, 800, None]]),
        lambda s: s["sampler"].update(segments=[[1, 800, None, 10**6]]),
        lambda s: s["sampler"].update(segments=[[2, 900, None, 10**6], [1, 800, None, 1]]),
    ],
)  # fmt: skip
def test_an_impossible_state_is_refused_and_a_complete_checkpoint_offered(
    start: Start, run: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    changed_state(run / "checkpoints" / "step_2", change)
    refused_in_a_line(start(run), "step_2", "write step_1 into")


def first_state(saved: dict[str, Any]) -> dict[str, Any]:
    return saved["optimizer"]["state"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda o: [1, 2],
        lambda o: o.pop("optimizer"),
        lambda o: o["optimizer"].pop("param_groups"),
        lambda o: o["optimizer"]["param_groups"].append({"params": []}),
        lambda o: o["optimizer"]["param_groups"][0].update(params=[0]),
        lambda o: o["optimizer"]["param_groups"][0].update(betas=(0.1, 0.2)),
        lambda o: first_state(o).update(exp_avg=torch.zeros(7)),
        lambda o: first_state(o).update(exp_avg="none"),
        lambda o: first_state(o).pop("exp_avg_sq"),
        lambda o: first_state(o)["exp_avg"].fill_(float("nan")),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_and_a_complete_checkpoint_offered(
    start: Start, run: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    def in_place(saved: dict[str, Any]) -> Any:
        result = change(saved)
        return result if result == [1, 2] else saved

    changed_optimizer(run / "checkpoints" / "step_2", in_place)
    refused_in_a_line(start(run), "step_2: can't be continued from", "write step_1 into")
