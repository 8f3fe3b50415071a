"""All sections of the benchmark, in their order."""

from __future__ import annotations

from pointup.benchmark import batch_planning as planning
from pointup.benchmark import data_loading as reading
from pointup.benchmark import data_path
from pointup.benchmark import neighbor_search as searches
from pointup.benchmark import reference_training as reference
from pointup.benchmark import scaling as processes
from pointup.benchmark import training_speed as steps
from pointup.benchmark import upsampling as upsampled

ALL = (
    planning.SECTION,
    reading.SECTION,
    data_path.SECTION,
    searches.SECTION,
    steps.SECTION,
    reference.SECTION,
    upsampled.SECTION,
    processes.SECTION,
)
