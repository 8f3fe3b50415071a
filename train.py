"""Train a point cloud upsampler.

    accelerate launch --config_file accelerate_configs/cpu.yaml train.py
    accelerate launch --config_file accelerate_configs/8gpu.yaml train.py --data pairs/ --hours 7

The same command continues the run in --output-dir from its newest checkpoint.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor
from torch_geometric.data import Batch

from pointup.cli.next_commands import commands_after_training
from pointup.datasets.batch import move
from pointup.geometry.packed import assume_valid
from pointup.model.upsampler import Upsampler
from pointup.terminal import open_closed_streams
from pointup.training.config import (
    TrainConfig,
    claim_output_dir,
    parse_command_line,
    quick_config,
)
from pointup.training.datasets import open_training_data, training_loader, training_sampler
from pointup.training.distributed.accelerator import (
    enable_debug_checks,
    fix_order_of_sums,
    make_accelerator,
    seed_micro_batch,
)
from pointup.training.distributed.preemption import StopRequest
from pointup.training.distributed.process_group import exit_status
from pointup.training.distributed.reduction import StepReduction, loss_divisor
from pointup.training.evaluation import ABORTED, Evaluation, Record
from pointup.training.faults.consistency import check_consistency, facts_of_epoch, facts_of_start
from pointup.training.faults.non_finite_steps import NonFiniteSteps
from pointup.training.faults.out_of_memory import in_pieces, num_tokens
from pointup.training.faults.token_budget import lower_budget_if_needed, settle_token_budget
from pointup.training.faults.watchdog import Watchdog
from pointup.training.initialization import initial_model
from pointup.training.objective import losses_of_model
from pointup.training.progress import RunSchedule
from pointup.training.resuming import continue_run, state_of_run
from pointup.training.run import Run
from pointup.training.run_directory.checkpoint import Saver
from pointup.training.run_directory.lock import RunLock
from pointup.training.run_directory.rank_log import RankLog
from pointup.training.run_plan import plan_of_run
from pointup.training.tracking.monitor import Monitor
from pointup.training.training_state import TrainingState, make_optimizer, set_learning_rate


def main(args: Sequence[str] | None = None, prog: str = "train.py") -> int:
    """Train with the given options; returns the exit status (see `exit_status`)."""
    open_closed_streams()
    fix_order_of_sums()
    return exit_status(partial(start, args, prog), prog)


def start(args: Sequence[str] | None, prog: str) -> None:
    """Parse the options, form the group of processes, and train."""
    config = parse_command_line(args, __doc__ or "", prog)
    if config.debug:
        enable_debug_checks()
    accelerator = make_accelerator(config.output_dir, config.log_with, config.collective_timeout)
    with RunLock(config.output_dir, accelerator):
        if config.quick:
            check_setup(config, accelerator)
        else:
            train(config, accelerator)
    accelerator.end_training()


def check_setup(config: TrainConfig, accelerator: Accelerator) -> None:
    """Train a few steps, evaluate, save a checkpoint, and continue from it (`--quick`)."""
    config = quick_config(config)
    if accelerator.is_main_process:
        shutil.rmtree(config.output_dir, ignore_errors=True)
    accelerator.wait_for_everyone()
    train(config, accelerator, stop_after=2)
    accelerator.free_memory()
    train(config, accelerator)
    accelerator.print("The setup works: trained, evaluated, saved, continued.")


def train(config: TrainConfig, accelerator: Accelerator, stop_after: int | None = None) -> None:
    """Train until the end of the run that `config` defines, or until step `stop_after`."""
    check_consistency(accelerator, facts_of_start(config, accelerator.mixed_precision))
    config, weights = initial_model(config)
    rank = accelerator.process_index, accelerator.num_processes
    with (
        RankLog(config.output_dir, *rank, is_verbose=config.debug),
        torch.autograd.set_detect_anomaly(config.debug),
    ):
        claim_output_dir(config, accelerator)
        run = set_up(config, weights, accelerator)
        with run.stop, run.monitor, run.watchdog, run.data.worker_faults():
            training_loop(run, stop_after)
        run.progress.check_trained()


def set_up(config: TrainConfig, weights: Upsampler, accelerator: Accelerator) -> Run:
    """Open the data, prepare the model, and load the newest checkpoint."""
    data = open_training_data(config, accelerator)
    optimizer = make_optimizer(weights.parameters(), accelerator.device, config.weight_decay)
    model, optimizer = accelerator.prepare(weights, optimizer)
    reduction = StepReduction(accelerator, weights.parameters(), len(data.sources))
    work = partial(forward_backward, model=model, accelerator=accelerator, config=config)

    token_budget = settle_token_budget(
        config, data.train, accelerator, work, reduction.drop_gradients, data.validation
    )
    sampler = training_sampler(config, data, token_budget, accelerator)
    schedule = RunSchedule.of(config, sampler)
    trained = TrainingState(weights, optimizer, accelerator.scaler, config.ema_decay)
    progress, checkpoint = continue_run(config, trained, sampler, data)
    saver = Saver(
        accelerator,
        trained,
        partial(state_of_run, progress, sampler, data),
        config.output_dir,
        config.keep_checkpoints,
        config.on_save_error,
        saved_at=progress.elapsed_seconds,
    )
    return Run(
        config=config,
        accelerator=accelerator,
        data=data,
        model=model,
        forward_backward=work,
        trained=trained,
        reduction=reduction,
        token_budget=token_budget,
        sampler=sampler,
        schedule=schedule,
        evaluation=Evaluation(data, accelerator, config, token_budget),
        progress=progress,
        started=time.monotonic() - progress.elapsed_seconds,
        checkpoint=checkpoint,
        saver=saver,
        monitor=Monitor(accelerator, config, progress.step, progress.evaluation_due, data.labels),
        watchdog=Watchdog(accelerator, config.hang_timeout),
        non_finite=NonFiniteSteps(accelerator),
        stop=StopRequest(),
    )


def training_loop(run: Run, stop_after: int | None) -> None:
    """Train, log, evaluate and save, step by step, until the run ends or a stop is requested."""
    config, progress, sampler = run.config, run.progress, run.sampler
    run.monitor.plan(plan_of_run(run), [source.name for source in run.data.sources])
    run.watchdog.step = progress.step
    is_stopped = progress.evaluation_due and evaluate_and_save(run, is_stopped=False)
    loader = batches = None

    while not (progress.finished or is_stopped or progress.step == stop_after):
        if batches is None or not len(sampler):
            if not len(sampler):
                sampler.set_epoch(sampler.epoch + 1)
            run.watchdog.enter_phase("consistency check")
            check_consistency(run.accelerator, facts_of_epoch(sampler, run.data))
            if loader is None:
                loader = training_loader(config, run.data.train, sampler, run.accelerator.device)
            batches = iter(loader)

        is_stopped = train_step(run, batches)
        if lower_budget_if_needed(sampler, progress, run.token_budget):
            loader = batches = None
        is_stopped = evaluate_and_save(run, is_stopped)

    if progress.finished and not (progress.evaluation_due or config.quick):
        run.monitor.print(progress.end_of_run(config, sampler))
        for command in commands_after_training(config):
            run.monitor.print(f"next: {command}")


def train_step(run: Run, batches: Iterator[Batch]) -> bool:
    """Take one optimizer step over `accumulation_steps` micro-batches per process.

    Returns whether a stop was requested on any process.
    """
    config, accelerator, reduction = run.config, run.accelerator, run.reduction
    progress, sampler, watchdog, trained = run.progress, run.sampler, run.watchdog, run.trained
    share_done = progress.share_done(config, sampler)
    work = partial(run.forward_backward, share=share_done)
    learning_rate = run.schedule.learning_rate(progress.step, share_done)
    set_learning_rate(trained.optimizer, learning_rate)

    step_began = time.monotonic()
    reduction.start()
    for micro_step in range(config.accumulation_steps):
        watchdog.enter_phase("waiting for data")
        batch = reduction.next_batch(batches)
        watchdog.enter_phase("forward and backward")
        with reduction.timed_work():
            slot = micro_step * accelerator.num_processes + accelerator.process_index
            seed_micro_batch(config.seed, progress.step, slot)
            for piece, losses in in_pieces(batch, work, reduction.drop_failed):
                reduction.add(losses, num_tokens(piece), piece.name, run.data.source_of(piece))
    watchdog.enter_phase("reduction")
    totals = reduction.finish(run.stop.requested, elapsed_seconds=time.monotonic() - run.started)

    run.data.unreadable.report(progress.step, totals.num_unreadable, reduction.faults)
    grad_norm, is_taken = 0.0, False
    if totals.num_clouds:  # Else momentum and weight decay alone would change the weights.
        parameters = trained.weights.parameters()
        grad_norm = accelerator.clip_grad_norm_(parameters, config.clip_norm).item()
        is_taken = run.non_finite.may_step(
            progress.step, totals.loss, grad_norm, learning_rate, reduction.non_finite_clouds
        ) and trained.step(grad_norm)
    progress.skipped += not is_taken
    sampler.advance(1)
    share_done = progress.advance(totals, config, sampler, run.schedule.eval_every)
    watchdog.step = progress.step

    if progress.step % config.log_every == 0 or progress.evaluation_due:  # It may end the run.
        run.monitor.train(
            progress.step,
            totals,
            epoch=sampler.epoch,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            step_seconds=time.monotonic() - step_began,
            fill=totals.num_tokens / (sampler.token_budget * sampler.slots),
            progress=progress,
        )
        progress.unlogged_out_of_memory = 0
    run.monitor.progress(progress.step, run.schedule.total_steps, totals, share_done)
    return totals.stop


def forward_backward(
    batch: Batch,
    model: torch.nn.Module,
    accelerator: Accelerator,
    config: TrainConfig,
    share: float = 0.5,  # of the run: in its middle every term of the loss counts
) -> Tensor:
    """Losses (B,) of a micro-batch; adds its gradients to the parameters of this process only."""
    # `StepReduction` reduces gradients, in place of DistributedDataParallel.
    with accelerator.no_sync(model), assume_valid():
        batch = move(batch, accelerator.device)
        losses = losses_of_model(model, batch, config.ratio, config.max_ratio, config.loss, share)
        total, divisor = losses.sum(), loss_divisor(accelerator, len(losses))
        accelerator.backward(total / divisor if divisor > 1 else total)
    return losses.detach()


def evaluate_and_save(run: Run, is_stopped: bool) -> bool:
    """Evaluate and save when due; returns whether a stop was requested."""
    progress = run.progress
    is_time = run.is_save_due
    if progress.evaluation_due and not is_stopped:
        if is_time:
            # An evaluation that fails must not lose the steps before it.
            run.save(must_succeed=False)
        evaluate(run)
        is_stopped = progress.evaluation_due
    if is_time or progress.finished or is_stopped:
        run.save(must_succeed=progress.finished or is_stopped)
    if is_stopped:
        run.monitor.print(f"Stopped at step {progress.step} and saved; run again to continue.")
    return is_stopped


def evaluate(run: Run) -> None:
    """Evaluate the model on the validation set; a stop request defers this to the next start."""
    records: list[Record] = []
    for batch in run.evaluation.batches:
        run.watchdog.enter_phase("evaluation")
        if run.stop.requested:
            records.append({"index": ABORTED})
            break
        records += run.evaluation.records_of(move(batch, run.accelerator.device), run.trained.model)
    run.watchdog.enter_phase("gathering the evaluation")
    records = run.accelerator.gather_for_metrics(records, use_gather_object=True)
    result = run.evaluation.result_of(records)
    if result is None:
        return
    run.progress.evaluation_due = False
    run.monitor.validation(run.progress.step, result)
    run.judge(result.score)


if __name__ == "__main__":
    sys.exit(main())
