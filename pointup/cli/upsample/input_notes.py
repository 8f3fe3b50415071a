"""Notes on the points of a survey that is to be upsampled: another model may suit them better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pointup.cli.upsample.plan import Job
from pointup.cli.upsample.survey_store import SortedFiles
from pointup.upsampling.scatter import MUCH_SCATTER, scatter
from pointup.upsampling.store.point_store import Store

# Share of vegetation from which on the model for forests is named.
_MUCH_VEGETATION = 0.3


def notes_on_input(
    jobs: Sequence[Job], found: SortedFiles, store: Store, suggests_model: bool
) -> list[str]:
    """Notes for a user who may want to stop, because other options give a better result.

    `found` counts the points of the files by the number of their job. With `suggests_model` a note
    names a model that may suit the points better than that of the jobs.
    """
    notes = []
    if found.num_synthetic:
        notes.append(_of_synthetic(jobs, found.num_synthetic))
    share = found.num_vegetation / max(1, int(store.num_taken.sum()))
    if suggests_model and jobs[0].model == "lidar" and share > _MUCH_VEGETATION:
        notes.append(f"{share:.0%} of the points are vegetation: try --model forest")
    if suggests_model and jobs[0].model == "shapes" and (noise := scatter(store)) >= MUCH_SCATTER:
        notes.append(
            f"the points look noisy, by about {noise:.2g} spacings: if they are, --denoise "
            "replaces them; if these are plants, try --model forest"
        )
    return notes


def _of_synthetic(jobs: Sequence[Job], num_synthetic: Mapping[int, int]) -> str:
    others = f" and {len(num_synthetic) - 1:,} other files" if len(num_synthetic) > 1 else ""
    return (
        f"{jobs[min(num_synthetic)].source}{others}: {sum(num_synthetic.values()):,} points "
        "have the synthetic flag: they are not measured, but upsampled as if they were; remove "
        "them first"
    )
