"""Train a point cloud upsampler.

    accelerate launch --config_file accelerate_configs/cpu.yaml train.py
    accelerate launch --config_file accelerate_configs/8gpu.yaml train.py --data pairs/ --hours 7

The same command continues the run in --output-dir from its newest checkpoint.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from functools import partial

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn
from torch_geometric.data import Batch

from pointup.cli.next_commands import commands_after_training
from pointup.datasets.batch import move
from pointup.model.upsampler import Upsampler
from pointup.training.calibration import calibrate_kept_model
from pointup.training.config import TrainConfig, parse_command_line
from pointup.training.datasets import TrainingBatches, open_training_data
from pointup.training.distributed.accelerator import (
    checked_launch,
    make_optimizer,
    seed_micro_batch,
)
from pointup.training.distributed.preemption import StopRequest
from pointup.training.distributed.process_group import exit_status
from pointup.training.distributed.reduction import StepReduction
from pointup.training.evaluation import Evaluation
from pointup.training.faults.non_finite_steps import NonFiniteSteps
from pointup.training.faults.out_of_memory import in_pieces
from pointup.training.faults.token_budget import settle_token_budget
from pointup.training.faults.watchdog import Watchdog
from pointup.training.initialization import initial_model
from pointup.training.objective import losses_of_model
from pointup.training.progress import RunSchedule
from pointup.training.run_start import check_setup, open_run
from pointup.training.step_totals import StepMeter
from pointup.training.tracking.monitor import Monitor
from pointup.training.training_state import RunState


def main(args: Sequence[str] | None = None, prog: str = "train.py") -> int:
    """Train with the given options; returns the exit status (see `exit_status`)."""
    return exit_status(partial(start, args, prog), prog)


def start(args: Sequence[str] | None, prog: str) -> None:
    """Parse the options, form the group of processes, and train."""
    config = parse_command_line(args, __doc__ or "", prog)
    accelerator = make_accelerator(config)
    if config.quick:
        check_setup(train, config, accelerator)
    else:
        train(config, accelerator)
    accelerator.end_training()


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The Accelerator for the configuration of the launcher, which `checked_launch` checks."""
    run = str(config.output_dir)
    with checked_launch(config.log_with, config.collective_timeout, config.debug):
        return Accelerator(
            log_with=list(config.log_with) or None,
            project_config=ProjectConfiguration(run, logging_dir=run),
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
        )


def train(config: TrainConfig, accelerator: Accelerator, stop_after: int | None = None) -> None:
    """Train until the end of the run that `config` defines, or until step `stop_after`."""
    config, weights = initial_model(config)
    with open_run(config, accelerator):
        train_model(weights, config, accelerator, stop_after)


def train_model(
    weights: Upsampler, config: TrainConfig, accelerator: Accelerator, stop_after: int | None
) -> None:
    """Train from the newest checkpoint in the run directory, or from `weights`, step by step."""
    data = open_training_data(config, accelerator)
    optimizer = make_optimizer(weights.parameters(), accelerator.device, config.weight_decay)
    model, optimizer = accelerator.prepare(weights, optimizer)
    reduction = StepReduction(accelerator, weights.parameters())
    work = partial(forward_backward, model=model, reduction=reduction, config=config)

    token_budget = settle_token_budget(config, data.train, accelerator, work, optimizer.zero_grad)
    sampler = data.sampler(config, token_budget, accelerator)
    schedule = RunSchedule(config, sampler)
    state = RunState(config, accelerator, data, weights, optimizer, sampler)
    checkpoint = state.load_latest(schedule)
    evaluation = Evaluation(data, accelerator, config, state.progress.validated)
    progress, began = state.progress, time.monotonic() - state.progress.elapsed_seconds
    batches = TrainingBatches(config, data, sampler, accelerator)

    monitor = Monitor(accelerator, config, data, progress)
    watchdog = Watchdog(accelerator, config.hang_timeout)
    stop, non_finite = StopRequest(), NonFiniteSteps(accelerator)
    with stop, monitor, watchdog, data.worker_faults():
        monitor.plan(schedule, reduction.num_weights, checkpoint)
        watchdog.step, is_stopped = progress.step, False
        while not (progress.is_complete or is_stopped or progress.step == stop_after):
            if not progress.evaluation_due:  # Else a stop request came before the evaluation.
                watchdog.enter_phase("consistency check")
                batches.begin_epoch_if_due()
                learning_rate = schedule.set_learning_rate(optimizer, progress)
                share_done = schedule.share_done(progress)
                step = StepMeter(accelerator, len(data.sources))
                for micro_step in range(config.accumulation_steps):
                    watchdog.enter_phase("waiting for data")
                    batch = step.next_of(batches)
                    watchdog.enter_phase("forward and backward")
                    with step.work():
                        slot = micro_step * accelerator.num_processes + accelerator.process_index
                        seed_micro_batch(config.seed, progress.step, slot)
                        # In halves after an out-of-memory error, with the same gradient.
                        for piece, losses in in_pieces(
                            batch, partial(work, share=share_done), optimizer.zero_grad
                        ):
                            reduction.add(losses)
                            step.add(piece, losses, data.source_of(piece), reduction.sums)
                # It waits for the device: a kernel that hangs is no wait for other processes.
                numbers = step.numbers(stop.requested, elapsed_seconds=time.monotonic() - began)
                watchdog.enter_phase("reduction")
                totals = step.totals(reduction.reduce(numbers))

                number = progress.step + 1  # As in metrics.jsonl.
                data.unreadable.report(number, totals.num_unreadable, step.faults)
                grad_norm, is_taken = 0.0, False
                if totals.num_clouds:  # Else momentum and decay alone would change the weights.
                    grad_norm = accelerator.clip_grad_norm_(
                        weights.parameters(), config.clip_norm
                    ).item()
                    if non_finite.may_step(
                        number, totals.loss, grad_norm, learning_rate, step.pieces
                    ):
                        optimizer.step()
                        # With fp16 the scaler skips a step whose gradients overflowed.
                        is_taken = math.isfinite(grad_norm)
                if is_taken:
                    state.average.update()
                optimizer.zero_grad()

                schedule.advance(progress, totals, is_taken)
                monitor.step(schedule, step, totals, learning_rate, grad_norm)
                batches.lower_budget_if_needed(progress, token_budget)
                watchdog.step, is_stopped = progress.step, totals.stop

            is_save_due = schedule.is_save_due(progress, state.saved_at)
            if progress.evaluation_due and not is_stopped:
                if is_save_due:  # An evaluation that fails must not lose the steps before it.
                    state.save(watchdog.enter_phase, must_succeed=False)
                is_stopped = not evaluate(evaluation, state, accelerator, monitor, watchdog, stop)
            if is_save_due or progress.finished or is_stopped:
                state.save(watchdog.enter_phase, must_succeed=progress.finished or is_stopped)

        if is_stopped or (progress.finished and not config.quick):
            monitor.print(schedule.end_of_run(progress, is_stopped))
            # The initial model has its calibration already.
            if not (is_stopped or progress.keeps_initial) and accelerator.is_main_process:
                device, enter_phase = accelerator.device, watchdog.enter_phase
                monitor.print(calibrate_kept_model(data, config, device, enter_phase))
            for command in [] if is_stopped else commands_after_training(config):
                monitor.print(f"next: {command}")
    progress.check_trained()


def forward_backward(
    batch: Batch,
    model: nn.Module,
    reduction: StepReduction,
    config: TrainConfig,
    share: float = 0.5,  # of the run: in its middle every term of the loss counts
) -> Tensor:
    """Losses (B,) of a micro-batch; adds its gradients to the parameters of this process only."""
    accelerator = reduction.accelerator
    # `StepReduction` reduces gradients, in place of DistributedDataParallel.
    with accelerator.no_sync(model):
        batch = move(batch, accelerator.device)
        losses = losses_of_model(model, batch, config.ratio, config.max_ratio, config.loss, share)
        accelerator.backward(reduction.total_of(losses))
    return losses.detach()


def evaluate(
    evaluation: Evaluation,
    state: RunState,
    accelerator: Accelerator,
    monitor: Monitor,
    watchdog: Watchdog,
    stop: StopRequest,
) -> bool:
    """Evaluate what `pointup upsample` makes with the model, and keep it if it is the best so far.

    Returns False if a stop request defers the evaluation to the next start.
    """
    records, model = [], state.average.model()
    model.eval()
    for batch in evaluation.batches:
        watchdog.enter_phase("evaluation")
        if stop.requested:
            records.append(evaluation.aborted)
            break
        records += evaluation.records_of(move(batch, accelerator.device), model)
    model.train()
    watchdog.enter_phase("gathering the evaluation")
    records = accelerator.gather_for_metrics(records, use_gather_object=True)
    result = evaluation.result_of(records)
    if result is None:
        return False
    state.progress.evaluation_due = False
    monitor.validation(result, is_kept=state.judge(result))
    return True


if __name__ == "__main__":
    sys.exit(main())
