"""What a run is about to do, as a table."""

from __future__ import annotations

from accelerate import Accelerator

from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.training.config import TrainConfig
from pointup.training.datasets import TrainingData
from pointup.training.faults.token_budget import describe_budget
from pointup.training.tracking.tables import plan_table


def plan_of_run(
    config: TrainConfig,
    data: TrainingData,
    accelerator: Accelerator,
    sampler: TokenBudgetBatchSampler,
    num_weights: int,
    total_steps: int | None,
    peak_rate: float,
) -> str:
    """The table at the start of a run, and a line for each sample that is left out."""
    table = {
        "data": data.description,
        "device": f"{accelerator.device}, precision {accelerator.mixed_precision}",
        "weights": f"{num_weights:,}",
        "processes": f"{accelerator.num_processes}, of "
        f"{config.accumulation_steps} micro-batches a step",
        "token budget": describe_budget(
            config, data, sampler.token_budget, sampler.statistics().fill
        ),
        "clouds a step": f"{len(data.train) / sampler.num_steps:.1f}",
        "steps": f"{total_steps or '?'}, {sampler.num_steps} an epoch",
        "learning rate": f"{peak_rate:.3g}, scaling {config.lr_scaling}",
    }
    return "\n".join([plan_table(table), *(f"Left out: {line}" for line in data.left_out)])
