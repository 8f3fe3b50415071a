"""Consistency check: all processes have the same options, code, packages, data and batch plan."""

from __future__ import annotations

import json
import platform
import zlib
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

import pointup
from pointup.errors import TrainingError
from pointup.training.config import TrainConfig, as_dict, flattened

MAY_DIFFER = frozenset(
    {"data", "output_dir", "num_workers", "worker_timeout", "collective_timeout", "hang_timeout"}
)
"""Options that may differ between processes. For `data`, the samples are compared instead."""
PACKAGES = ("torch", "accelerate", "torch-geometric", "numpy", "datasets")


def check_consistency(accelerator: Accelerator, facts: Mapping[str, Any]) -> None:
    """Raise TrainingError, on every process, unless `facts` are the same on all processes.

    Facts are JSON values; every process must call this with the same names. One gather of a few
    bytes compares a checksum per fact. Only if some differ, the facts themselves are gathered, for
    a message that says which process differs, and in what.
    """
    if accelerator.num_processes == 1:
        return
    texts = {name: json.dumps(fact, sort_keys=True, default=str) for name, fact in facts.items()}
    checksums = torch.tensor([[zlib.crc32(text.encode()) for text in texts.values()]])
    gathered = accelerator.gather(checksums.to(accelerator.device))
    if bool((gathered == gathered[0]).all()):
        return
    processes: list[tuple[str, dict[str, str]]] = gather_object([(platform.node(), texts)])
    fix = "give all processes the same options, code, packages and data"
    raise TrainingError("; ".join([*differences(processes), fix]))


def differences(processes: list[tuple[str, dict[str, str]]]) -> list[str]:
    """A line for each fact in which a process differs from the majority.

    `processes` has (host, facts as JSON) of each process.
    """
    lines = []
    for name in processes[0][1]:
        counts = Counter(facts[name] for _, facts in processes)
        usual = counts.most_common(1)[0][0]
        for rank, (host, facts) in enumerate(processes):
            if facts[name] != usual:
                others = " and ".join(
                    f"process {i}" for i, (_, f) in enumerate(processes) if f[name] == usual
                )
                if len(processes) > 3:
                    others = f"{counts[usual]} others"
                lines.append(
                    f"process {rank} on {host} differs from {others} in {name}"
                    f"{detail(json.loads(facts[name]), json.loads(usual))}"
                )
    return lines


def detail(here: Any, there: Any) -> str:
    if not isinstance(here, dict) or not isinstance(there, dict):
        return f": {here}, there {there}"
    here, there = flattened(here), flattened(there)
    differing = [n for n in sorted(here.keys() | there.keys()) if here.get(n) != there.get(n)]
    return ": " + ", ".join(f"{n} {here.get(n)}, there {there.get(n)}" for n in differing[:4])


def facts_of_start(config: TrainConfig, mixed_precision: str = "no") -> dict[str, Any]:
    """Facts that are compared at the start of a run: `mixed_precision` is that of the launcher."""
    options = {name: value for name, value in as_dict(config).items() if name not in MAY_DIFFER}
    return {
        "options": options,
        # With a loss scale on some processes only, sums of gradients would mix units.
        "launcher": {"mixed_precision": mixed_precision},
        "packages": {name: version(name) for name in PACKAGES},
        "code": checksum_of_code(),
    }


def checksum_of_code() -> int:
    checksum = 0
    for path in sorted(Path(pointup.__file__).parent.rglob("*.py")):
        checksum = zlib.crc32(path.name.encode() + path.read_bytes(), checksum)
    return checksum
