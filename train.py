"""Train a point cloud upsampler.

    accelerate launch --config_file accelerate_configs/cpu.yaml train.py
    accelerate launch --config_file accelerate_configs/8gpu.yaml train.py --data pairs/ --hours 7
    accelerate launch --config_file accelerate_configs/cpu2.yaml train.py --quick

The same command again continues the run in --output-dir.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
import tyro
from accelerate import Accelerator
from torch_geometric.data import Batch

from pointup.data.batch import make_loader
from pointup.data.sampler import TokenBudgetBatchSampler
from pointup.errors import PointupError, TrainingError
from pointup.model import Upsampler
from pointup.training.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    save_model,
)
from pointup.training.config import TrainConfig, claim_output_dir
from pointup.training.datasets import open_training_data
from pointup.training.evaluation import Evaluation
from pointup.training.launch import make_accelerator, peak_memory_bytes, seed_micro_batch
from pointup.training.logs import RankLog
from pointup.training.monitor import Monitor, plan_table
from pointup.training.objective import cloud_losses, target_spacing, training_ratio
from pointup.training.progress import Progress, length_in_steps
from pointup.training.reduction import StepReduction
from pointup.training.schedule import learning_rate_at, scaled_learning_rate
from pointup.training.stopping import StopRequest

logger = logging.getLogger("pointup")

MAX_BAD_STEPS = 10
"""Steps in a row with a non-finite gradient after which a run ends."""


def main() -> int:
    """Read the options and train; what a user can mend becomes one line and an exit status."""
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        config = tyro.cli(TrainConfig, description=__doc__)
        accelerator = make_accelerator(
            config.output_dir, config.log_with, config.collective_timeout
        )
        is_main = accelerator.is_main_process
        if config.quick:
            check_setup(config, accelerator)
        else:
            train(config, accelerator)
        accelerator.end_training()
    except (PointupError, ValueError) as error:
        logger.debug("the run ends with an error", exc_info=True)
        if is_main:
            print(f"train.py: error: {error}", file=sys.stderr)
        return 1
    return 0


def check_setup(config: TrainConfig, accelerator: Accelerator) -> None:
    """A few steps, an evaluation, a checkpoint, and a second start that continues from it."""
    config = replace(
        config, output_dir=config.output_dir / "quick", steps=4, epochs=None, hours=None,
        log_every=1, eval_every=4, save_every=2, warmup_steps=1,
    )  # fmt: skip
    if accelerator.is_main_process:
        shutil.rmtree(config.output_dir, ignore_errors=True)
    accelerator.wait_for_everyone()
    train(config, accelerator, stop_after=2)
    accelerator.free_memory()
    train(config, accelerator)
    accelerator.print("The setup works: trained, evaluated, saved, continued.")


def train(config: TrainConfig, accelerator: Accelerator, stop_after: int | None = None) -> None:
    """Train to the end that `config` sets, or to step `stop_after`, from where a run stopped."""
    claim_output_dir(config, accelerator)
    with RankLog(config.output_dir, accelerator.process_index, accelerator.num_processes):
        run(config, accelerator, stop_after)


def run(config: TrainConfig, accelerator: Accelerator, stop_after: int | None) -> None:
    """The run itself, every process keeping its log."""
    data = open_training_data(config, accelerator)
    sampler = TokenBudgetBatchSampler(
        data.train.full_sizes,
        config.token_budget,
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        accumulation_steps=config.accumulation_steps,
        seed=config.seed,
        max_clouds=config.max_clouds,
        names=data.train.names,
        crop=config.crop,
    )
    loader = make_loader(data.train, sampler, config.num_workers, config.worker_timeout)
    total_steps = length_in_steps(config.steps, config.epochs, config.hours, sampler.num_steps)
    quarter = math.ceil(total_steps / 4) if total_steps else 500
    eval_every, save_every = config.eval_every or quarter, config.save_every or quarter
    clouds_per_step = len(data.train) / sampler.num_steps
    peak_rate = scaled_learning_rate(
        config.learning_rate, config.lr_scaling, clouds_per_step, config.reference_clouds
    )

    torch.manual_seed(config.seed)
    weights = Upsampler(**asdict(config.model))
    optimizer = torch.optim.AdamW(weights.parameters(), weight_decay=config.weight_decay)
    model, optimizer = accelerator.prepare(weights, optimizer)
    reduction = StepReduction(accelerator, weights.parameters())
    evaluation = Evaluation(data, accelerator, config)

    checkpoints = config.output_dir / "checkpoints"
    checkpoint = latest_checkpoint(checkpoints)
    progress = Progress()
    if checkpoint:
        state = load_checkpoint(checkpoint, weights, optimizer, accelerator.scaler)
        sampler.load_state_dict(state.pop("sampler"))
        progress = Progress(**state)

    def save() -> None:
        if accelerator.is_main_process:
            state = {"sampler": sampler.state_dict(), **asdict(progress)}
            save_checkpoint(
                checkpoints, weights, optimizer, accelerator.scaler, state, config.keep_checkpoints
            )
        accelerator.wait_for_everyone()

    def evaluate() -> None:
        result = evaluation.run(model)
        monitor.validation(progress.step, result.rows)
        for tag, picture in result.pictures.items():
            monitor.picture(progress.step, tag, picture)
        is_best = progress.judge(result.score, config.patience, config.target_chamfer)
        if is_best and accelerator.is_main_process:
            save_model(weights, config.output_dir / "model")

    plan = sampler.statistics()
    stop = StopRequest()
    with stop, Monitor(accelerator, config, progress.step) as monitor:
        monitor.print(
            plan_table(
                {
                    "data": data.description,
                    "device": f"{accelerator.device}, precision {accelerator.mixed_precision}",
                    "weights": f"{reduction.num_weights:,}",
                    "processes": f"{accelerator.num_processes}",
                    "accumulation": f"{config.accumulation_steps} micro-batches",
                    "token budget": f"{config.token_budget:,}, {plan.fill:.1%} used",
                    "clouds a step": f"{clouds_per_step:.1f}",
                    "steps": f"{total_steps or '?'}, {sampler.num_steps} an epoch",
                    "learning rate": f"{peak_rate:.3g}, scaling {config.lr_scaling}",
                }
            )
        )
        for line in data.left_out:
            monitor.print(f"Left out: {line}")
        if checkpoint:
            monitor.print(f"Continuing from {checkpoint}.")
        started = time.monotonic() - progress.elapsed_seconds
        batches: Iterator[Batch] | None = None
        num_bad_steps = 0
        share_done = progress.share_done(total_steps, config.hours)

        while not progress.finished and progress.step != stop_after:
            if not len(sampler):
                sampler.set_epoch(sampler.epoch + 1)
                batches = None
            batches = batches or iter(loader)
            rate = learning_rate_at(progress.step, share_done, peak_rate, config.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = rate

            step_began = time.monotonic()
            reduction.start()
            names: list[str] = []
            for micro_step in range(config.accumulation_steps):
                with reduction.waiting_for_data():
                    batch = next(batches)
                slot = micro_step * accelerator.num_processes + accelerator.process_index
                seed_micro_batch(config.seed, progress.step, slot)
                names += batch.name
                with reduction.working(), accelerator.no_sync(model):
                    losses = micro_batch_losses(model, batch, accelerator, config)
                    accelerator.backward(losses.sum())
                    reduction.add(losses, num_tokens=len(batch.pos) + len(batch.target))
            totals = reduction.finish(stop.asked, elapsed_seconds=time.monotonic() - started)

            grad_norm = accelerator.clip_grad_norm_(weights.parameters(), config.clip_norm).item()
            if math.isfinite(grad_norm) or accelerator.scaler is not None:
                optimizer.step()  # With fp16 the scaler skips a step that overflowed.
                num_bad_steps = 0
            else:
                num_bad_steps += 1
                logger.warning("step %d skipped, gradient %s: %s", progress.step, grad_norm, names)
                if num_bad_steps == MAX_BAD_STEPS:
                    raise TrainingError(
                        f"{MAX_BAD_STEPS} steps in a row had a non-finite gradient; lower "
                        f"--learning-rate, and see {config.output_dir}/logs for the clouds in them"
                    )
            sampler.advance(1)
            progress.step += 1
            progress.elapsed_seconds = totals.elapsed_seconds
            share_done = progress.share_done(total_steps, config.hours)
            progress.finished = share_done >= 1.0

            if progress.step % config.log_every == 0 or progress.finished:
                seconds = time.monotonic() - step_began
                monitor.train(
                    step=progress.step,
                    epoch=sampler.epoch,
                    loss=totals.loss,
                    learning_rate=rate,
                    grad_norm=grad_norm,
                    num_clouds=totals.num_clouds,
                    num_tokens=totals.num_tokens,
                    tokens_per_second=totals.num_tokens / seconds,
                    step_seconds=seconds,
                    data_wait_seconds=max(totals.data_wait_seconds),
                    idle_fraction=totals.idle_fraction,
                    peak_memory_bytes=peak_memory_bytes(accelerator.device),
                )
            monitor.progress(progress.step, total_steps, totals.loss, totals.num_tokens, share_done)
            if progress.step % eval_every == 0 or progress.finished:
                evaluate()
            if progress.step % save_every == 0 or progress.finished or totals.stop:
                save()
            if totals.stop:
                monitor.print(f"Stopped at step {progress.step} and saved; run again to continue.")
                break


def micro_batch_losses(
    model: torch.nn.Module, batch: Batch, accelerator: Accelerator, config: TrainConfig
) -> torch.Tensor:
    """Loss (B,) of each cloud; an empty batch has none, joined to the weights all the same."""
    batch = batch.to(accelerator.device, non_blocking=True)
    ratio = training_ratio(batch, config.ratio, config.max_ratio)
    output = model(batch.pos, batch.ptr, ratio)
    spacing = target_spacing(batch.pos, batch.ptr, ratio)
    return cloud_losses(output, batch, spacing, config.loss)


if __name__ == "__main__":
    sys.exit(main())
