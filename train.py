"""Train a point cloud upsampler.

    accelerate launch --config_file accelerate_configs/cpu.yaml train.py
    accelerate launch --config_file accelerate_configs/8gpu.yaml train.py --data pairs/ --hours 7

The same command again continues the run in --output-dir.
"""

from __future__ import annotations

import logging
import math
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import tyro
from accelerate import Accelerator
from torch_geometric.data import Batch

from pointup.data.batch import make_loader, move
from pointup.errors import NonFiniteError, PointupError
from pointup.geometry.validity import assume_valid
from pointup.model import Upsampler
from pointup.training.agreement import check_agreement, facts_of_epoch, facts_of_start
from pointup.training.badsteps import BadSteps
from pointup.training.budget import EVENTS_BEFORE_LOWERING, lower_budget, settle_token_budget
from pointup.training.commands import commands_after_training
from pointup.training.config import TrainConfig, claim_output_dir
from pointup.training.datasets import open_training_data, training_sampler
from pointup.training.evaluation import Evaluation
from pointup.training.fingerprint import fingerprint_of
from pointup.training.group import tell_error
from pointup.training.initial import initial_model
from pointup.training.launch import (
    check_closely,
    fix_order_of_sums,
    make_accelerator,
    peak_memory_bytes,
    seed_micro_batch,
)
from pointup.training.lock import RunLock
from pointup.training.logs import RankLog
from pointup.training.memory import in_pieces, num_tokens
from pointup.training.monitor import Monitor
from pointup.training.objective import cloud_losses, target_spacing, training_ratio
from pointup.training.optimizer import make_optimizer, set_learning_rate
from pointup.training.plan import plan_of_run
from pointup.training.progress import length_in_steps
from pointup.training.reduction import StepReduction
from pointup.training.resuming import continue_run, state_of_run
from pointup.training.saving import Saver
from pointup.training.schedule import learning_rate_at, scaled_learning_rate
from pointup.training.stopping import EXIT_INTERRUPTED, StopRequest
from pointup.training.terminal import open_closed_streams
from pointup.training.watchdog import Watchdog

logger = logging.getLogger("pointup")


def main() -> int:
    """Read the options and train; what a user can mend becomes one line and an exit status."""
    open_closed_streams()
    fix_order_of_sums()
    try:
        config = tyro.cli(TrainConfig, description=__doc__)
        if config.debug:
            check_closely()
        accelerator = make_accelerator(
            config.output_dir, config.log_with, config.collective_timeout
        )
        with RunLock(config.output_dir, accelerator):
            if config.quick:
                check_setup(config, accelerator)
            else:
                train(config, accelerator)
        accelerator.end_training()
    except (PointupError, ValueError) as error:
        logger.debug("the run ends with an error", exc_info=True)
        tell_error(f"train.py: error: {error}")
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # During the start: there is nothing to save.
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
    check_agreement(accelerator, facts_of_start(config))
    config, weights = initial_model(config)
    rank = accelerator.process_index, accelerator.num_processes
    with (
        RankLog(config.output_dir, *rank, is_verbose=config.debug),
        torch.autograd.set_detect_anomaly(config.debug),
    ):
        claim_output_dir(config, accelerator)
        run(config, weights, accelerator, stop_after)


def run(
    config: TrainConfig, weights: Upsampler, accelerator: Accelerator, stop_after: int | None
) -> None:
    """The run itself, every process keeping its log."""
    data = open_training_data(config, accelerator)
    optimizer = make_optimizer(weights.parameters(), accelerator.device, config.weight_decay)
    model, optimizer = accelerator.prepare(weights, optimizer)
    reduction = StepReduction(accelerator, weights.parameters())

    def propagate(batch: Batch) -> torch.Tensor:
        with accelerator.no_sync(model), assume_valid():
            losses = micro_batch_losses(model, batch, accelerator, config)
            accelerator.backward(losses.sum())
        return losses.detach()

    token_budget = settle_token_budget(
        config, data.train, accelerator, propagate, reduction.forget, data.validation
    )
    data.validation.max_tokens = token_budget if config.crop else None
    sampler = training_sampler(config, data.train, token_budget, accelerator)
    total_steps = length_in_steps(config, sampler.num_steps)
    quarter = math.ceil(total_steps / 4) if total_steps else 500
    eval_every, save_every = config.eval_every or quarter, config.save_every or quarter
    clouds_per_step = len(data.train) / sampler.num_steps
    peak_rate = scaled_learning_rate(
        config.learning_rate, config.lr_scaling, clouds_per_step, config.reference_clouds
    )

    evaluation = Evaluation(data, accelerator, config, token_budget)
    saver = Saver(
        accelerator, weights, optimizer, config.output_dir, config.keep_checkpoints,
        config.on_save_error,
    )  # fmt: skip
    fingerprint = fingerprint_of(data.name, data.train, data.validation)
    progress, checkpoint = continue_run(
        config.output_dir, weights, optimizer, accelerator.scaler, sampler, fingerprint
    )

    def evaluate() -> None:
        if (result := evaluation.run(model, goes_on=goes_on)) is None:
            return
        progress.evaluation_due = False
        monitor.validation(progress.step, result.rows, result.shares)
        for tag, picture in result.pictures.items():
            monitor.picture(progress.step, tag, picture)
        if progress.judge(result.score, config.patience, config.target_chamfer):
            saver.save_best()

    def goes_on(phase: str) -> bool:
        watchdog.at(phase)
        return not stop.asked

    def save(must_succeed: bool) -> None:
        watchdog.at("saving" if accelerator.is_main_process else "waiting for the checkpoint")
        monitor.flush()
        saver.save(state_of_run(progress, sampler, fingerprint), must_succeed)

    def end_step(is_stopped: bool) -> bool:
        """Save and evaluate where it is time to; returns whether the run was asked to stop."""
        is_time = progress.step % save_every == 0 or progress.finished
        if progress.evaluation_due and not is_stopped:
            if is_time:
                # Whatever becomes of the evaluation, the steps before it are not lost.
                save(must_succeed=False)
            evaluate()
            is_stopped = progress.evaluation_due
        if is_time or progress.finished or is_stopped:
            save(must_succeed=progress.finished or is_stopped)
        if is_stopped:
            monitor.print(f"Stopped at step {progress.step} and saved; run again to continue.")
        return is_stopped

    monitor = Monitor(accelerator, config, progress.step, progress.evaluation_due)
    watchdog = Watchdog(accelerator, config.hang_timeout)
    may_step = BadSteps(accelerator).may_step
    with StopRequest() as stop, monitor, watchdog, data.worker_faults():
        monitor.print(
            plan_of_run(
                config, data, accelerator, sampler, reduction.num_weights, total_steps, peak_rate
            )
        )
        if checkpoint:
            monitor.print(f"Continuing from {checkpoint}.")
        started = time.monotonic() - progress.elapsed_seconds
        batches: Iterator[Batch] | None = None
        share_done = progress.share_done(config, sampler)
        watchdog.step = progress.step
        is_stopped = progress.evaluation_due and end_step(is_stopped=False)

        while not (progress.finished or is_stopped or progress.step == stop_after):
            if batches is None or not len(sampler):
                if not len(sampler):
                    sampler.set_epoch(sampler.epoch + 1)
                watchdog.at("comparing")
                check_agreement(accelerator, facts_of_epoch(sampler, data.train, data.validation))
                if batches is None:
                    data.train.max_tokens = sampler.token_budget if config.crop else None
                    loader = make_loader(
                        data.train, sampler, config.num_workers, config.worker_timeout,
                        accelerator.device,
                    )  # fmt: skip
                batches = iter(loader)
            rate = learning_rate_at(progress.step, share_done, peak_rate, config.warmup_steps)
            set_learning_rate(optimizer, rate)

            step_began = time.monotonic()
            reduction.start()
            for micro_step in range(config.accumulation_steps):
                watchdog.at("waiting for data")
                batch = reduction.next_batch(batches)
                slot = micro_step * accelerator.num_processes + accelerator.process_index
                watchdog.at("forward and backward")
                with reduction.working():
                    seed_micro_batch(config.seed, progress.step, slot)
                    for piece, losses in in_pieces(batch, propagate, reduction.forget_failure):
                        reduction.add(losses, num_tokens(piece), piece.name)
            watchdog.at("reduction")
            totals = reduction.finish(stop.asked, elapsed_seconds=time.monotonic() - started)
            grad_norm = accelerator.clip_grad_norm_(weights.parameters(), config.clip_norm).item()
            is_sound = may_step(progress.step, totals.loss, grad_norm, rate, reduction.bad_clouds)
            if is_sound:
                optimizer.step()
            progress.skipped += not is_sound or optimizer.step_was_skipped  # By fp16's scaler.
            sampler.advance(1)
            progress.step += 1
            watchdog.step = progress.step
            progress.elapsed_seconds = totals.elapsed_seconds
            progress.out_of_memory += totals.out_of_memory
            share_done = progress.share_done(config, sampler)
            progress.finished = share_done >= 1.0
            progress.evaluation_due = progress.step % eval_every == 0 or progress.finished

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
                    data_seconds=totals.data_seconds,
                    limited_by=totals.limited_by,
                    idle_fraction=totals.idle_fraction,
                    peak_memory_bytes=peak_memory_bytes(accelerator.device),
                    fill=totals.num_tokens / (sampler.token_budget * sampler.slots),
                    out_of_memory=totals.out_of_memory,
                )
            monitor.progress(progress.step, total_steps, totals.loss, totals.num_tokens, share_done)
            if progress.out_of_memory >= EVENTS_BEFORE_LOWERING:
                lower_budget(sampler, progress, token_budget)
                batches = None
            is_stopped = end_step(totals.stop)
        if progress.finished and not config.quick:
            for command in commands_after_training(config):
                monitor.print(f"next: {command}")
    progress.check_trained()


def micro_batch_losses(
    model: torch.nn.Module, batch: Batch, accelerator: Accelerator, config: TrainConfig
) -> torch.Tensor:
    """Loss (B,) of each cloud; an empty batch has none, joined to the weights all the same."""
    batch = move(batch, accelerator.device)
    ratio = training_ratio(batch, config.ratio, config.max_ratio)
    try:
        output = model(batch.pos, batch.ptr, ratio)
        spacing = target_spacing(output.gaps, batch.ptr, ratio)
        return cloud_losses(output, batch, spacing, config.loss)
    except NonFiniteError:
        if not batch.pos.isfinite().all():
            raise
        # It is the model's output, of weights that have diverged.
        return math.nan * sum(weights.sum() for weights in model.parameters()).expand(len(ratio))


if __name__ == "__main__":
    sys.exit(main())
