"""Reads files of the viewer back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def scenes_of(path: Path) -> list[dict[str, Any]]:
    """The scenes that the manifest of a viewer file describes."""
    found = re.search(r'id="manifest">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert found
    return json.loads(found[1])["scenes"]
