"""Digests of what pointup writes, and the file that records them for each kind of machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from filelock import FileLock
from safetensors.numpy import load_file

RECORDS = Path(__file__).parent / "digests.json"
RECORD = "POINTUP_RECORD_DIGESTS"
"""Set to 1, this environment variable makes the tests record digests instead of comparing them."""
Digests = dict[str, str]


def check(case: str, digests: Digests) -> None:
    """Compare digests with the recorded ones of this machine, or record them.

    Skips the test on a machine for which nothing was recorded.
    """
    machine = fingerprint()
    if os.environ.get(RECORD) == "1":
        # Test processes record in turn.
        with FileLock(Path(tempfile.gettempdir()) / "pointup_digests.lock"):
            records = _records()
            records.setdefault(machine, {})[case] = digests
            RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
        return
    records = _records()
    remedy = (
        f"on a revision known to be right, record them with {RECORD}=1 pytest -m slow tests/golden"
    )
    if machine not in records:
        pytest.skip(f"no digests for {machine}: {remedy}")
    assert case in records[machine], f"no digests of {case}: {remedy}"
    assert digests == records[machine][case]


def _records() -> dict[str, dict[str, Digests]]:
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def fingerprint() -> str:
    """What floating-point results depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    values = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    # Virtual machines have one name for several generations.
    known = [values[name] for name in ("model name", "cpu family", "model") if name in values]
    cpu = " ".join(known) or platform.processor()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, numpy {np.__version__}, {capability}, {cpu}"


def of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def of_file(path: Path) -> str:
    return of_bytes(path.read_bytes())


def of_weights(path: Path) -> str:
    """Digest of names, types, shapes and values of all tensors."""
    tensors = sorted(load_file(path).items())
    parts = [f"{name} {t.dtype} {t.shape} {of_bytes(t.tobytes())}" for name, t in tensors]
    return of_bytes("\n".join(parts).encode())


def of_dataset(folder: Path) -> Digests:
    """Digests of a pair dataset: columns of its pairs and of its sample tables, and other files."""
    digest_of = {".arrow": of_table, ".json": of_json}
    return {
        str(path.relative_to(folder)): digest_of.get(path.suffix, of_file)(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "dataset_info.json"  # Written by `datasets`.
    }


def of_table(path: Path) -> str:
    """Digest of the columns of an Arrow file or stream, without its metadata."""
    is_file = path.read_bytes().startswith(b"ARROW1")
    with pa.OSFile(str(path)) as source:
        table = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).read_all()
    schema = table.schema.remove_metadata().to_string(show_field_metadata=False)
    return of_bytes(json.dumps([schema, table.to_pydict()]).encode())


def of_json(path: Path) -> str:
    """Digest of a JSON file without the version of pointup and the folder of the test."""
    text = re.sub(r'"[^"]*/golden/', '"', path.read_text())
    content: Any = json.loads(re.sub(r"pointup \d[\w.]*", "pointup", text))
    if isinstance(content, dict):
        content.pop("pointup", None)
    return of_bytes(json.dumps(content).encode())
