"""Options of a model for forests, shared by tests: columns, extrapolation, descent, errors."""

from __future__ import annotations

from typing import Any

FOREST: dict[str, Any] = {
    "column_layers": 2,
    "column_neighbors": 5,
    "column_stride": 3,
    "extrapolation": True,
    "descent": True,
    "predict_error": True,
}
