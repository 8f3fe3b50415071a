"""All that is measured, in the order in which it is."""

from __future__ import annotations

from pointup.bench import (
    planning,
    processes,
    reading,
    reference,
    searches,
    steps,
    upsampled,
)

ALL = (
    planning.SECTION,
    reading.SECTION,
    searches.SECTION,
    steps.SECTION,
    reference.SECTION,
    upsampled.SECTION,
    processes.SECTION,
)
