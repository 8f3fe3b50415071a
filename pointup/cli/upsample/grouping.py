"""Groups the files of a call of `pointup upsample` into surveys; copies those without points."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from pointup.cli.upsample.copies import copy_without_points
from pointup.cli.upsample.plan import Job, Plan, plan_surveys
from pointup.cli.upsample.selection import of_shard, within_bounds
from pointup.cli.worker_group import LaunchedWorkerGroup
from pointup.io.bounds import Bounds


def group_files(
    jobs: Sequence[Job],
    workers: LaunchedWorkerGroup,
    separate: bool,
    bounds: Bounds | None,
    shard: tuple[int, int] | None,
    in_folder: bool,
) -> tuple[list[list[Job]], list[Exception]]:
    """The surveys that the files make up, as the main process sees them, and what is wrong.

    With bounds and a shard, only what they select. If the output is a folder (`in_folder`), the
    main process copies files without points.
    """
    plan = Plan()
    with workers.barrier():
        if workers.is_main:
            plan = plan_surveys(jobs, separate, in_folder)
            if bounds:
                inside, notes, errors = within_bounds(plan.surveys, bounds)
                notes, errors = [*plan.notes, *notes], [*plan.complaints, *errors]
                plan = replace(
                    plan, surveys=inside, notes=notes, complaints=errors, without_points=[]
                )
            if shard:
                rest = plan.without_points if shard[0] == 1 else []
                plan = replace(plan, surveys=of_shard(plan.surveys, shard), without_points=rest)
    plan = workers.from_main(plan)
    complaints = plan.complaints
    if workers.is_main:
        for line in plan.notes:
            print(f"note: {line}", file=sys.stderr)
        complaints = complaints + copy_without_points(plan.without_points)
    return plan.surveys, complaints
