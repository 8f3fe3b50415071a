"""The simulation of training on many processes, against arithmetic and a small real group."""

from __future__ import annotations

import numpy as np
import pytest

from pointup.benchmark import simulated_scaling
from pointup.benchmark.simulation import ReductionTimes, StepTimes, simulate
from pointup.cli.main import main

EXACT = StepTimes(fixed=0.1, per_token=1e-3, common=np.ones(1), own=np.ones(1), update=0.05)
NO_REDUCTION = ReductionTimes(0.0, 0.0)


def test_times_are_fitted_to_what_was_measured() -> None:
    tokens = np.array([100, 500, 900, 1500])
    group = np.array([[100, 300], [200, 900]])
    times = StepTimes.fitted(tokens, 0.1 + 1e-3 * tokens, 0.05, group, 0.1 + 1e-3 * group)
    assert (times.fixed, times.per_token) == pytest.approx((0.1, 1e-3))
    assert times.common == pytest.approx(1.0) and times.own == pytest.approx(1.0)
    falling = StepTimes.fitted(tokens, 2.0 - 1e-3 * tokens, 0.0, group, 0.1 + 1e-3 * group)
    assert falling.fixed == 0 and falling.per_token > 0


def test_what_slows_a_whole_machine_down_makes_none_of_its_processes_wait() -> None:
    # A step takes 1 s, or 2 s while the machine is slow.
    slow_at_times = StepTimes(1.0, 0.0, common=np.array([1.0, 2.0]), own=np.ones(1), update=0.0)
    loads = np.ones((100_000, 2))
    together = simulate(loads, slow_at_times, NO_REDUCTION)
    assert together.idle == pytest.approx(0.0, abs=1e-12)
    assert together.steps_per_second == pytest.approx(1 / 1.5, rel=0.01)
    # On two machines the times are (1, 1), (1, 2), (2, 1), (2, 2), equally often: 6 s of computing
    # for each process in 7 s.
    apart = simulate(loads, slow_at_times, NO_REDUCTION, per_machine=1)
    assert apart.idle == pytest.approx(1 / 7, rel=0.02)
    assert apart.steps_per_second == pytest.approx(4 / 7, rel=0.01)


def test_the_spread_of_a_machine_is_told_from_that_of_its_processes() -> None:
    # Steps of 10 s; the machine is slower by up to a half, and a process by up to 2 %.
    rng = np.random.default_rng(0)
    slow, own = rng.uniform(1, 1.5, (200, 1)), rng.uniform(0.98, 1.02, (200, 2))
    group_tokens = np.full((200, 2), 20_000)
    group_seconds = 10 * slow * own
    tokens, seconds = group_tokens[:, 0], group_seconds[:, 0]
    times = StepTimes.fitted(tokens, seconds, 0.0, group_tokens, group_seconds)
    assert np.log(times.own).std() == pytest.approx(np.log(own).std(), rel=0.15)
    assert np.log(times.common).std() == pytest.approx(np.log(slow).std(), rel=0.15)
    waited = 1 - group_seconds.sum() / (2 * group_seconds.max(axis=1).sum())
    found = simulate(group_tokens, times, NO_REDUCTION)
    assert found.idle == pytest.approx(waited, rel=0.3)
    assert 1 / found.steps_per_second == pytest.approx(group_seconds.max(axis=1).mean(), rel=0.05)
    # On machines of their own they wait ten times as long.
    assert simulate(group_tokens, times, NO_REDUCTION, per_machine=1).idle > 8 * waited


def test_a_spread_without_common_part_is_that_of_each_process() -> None:
    tokens = np.full(1000, 20_000)
    group = np.exp(np.random.default_rng(0).normal(0, 0.1, (1000, 2)))
    times = StepTimes.fitted(tokens, group[:, 0], 0.0, np.full((1000, 2), 20_000), group)
    assert np.log(times.common).std() < 0.03
    assert np.log(times.own).std() == pytest.approx(0.1, rel=0.1)


def test_a_step_takes_as_long_as_its_slowest_process_the_reduction_and_the_update() -> None:
    loads = np.array([[100, 300], [200, 200], [400, 0]])
    reduction = ReductionTimes(latency=0.01, transfer=0.2)
    found = simulate(loads, EXACT, reduction)
    # An empty batch takes no time.
    seconds = (0.4 + 0.3 + 0.5) + 3 * (0.05 + 0.02 + 0.2)
    assert found.steps_per_second == pytest.approx(3 / seconds)
    assert found.tokens_per_second == pytest.approx(1200 / seconds)
    assert found.idle == pytest.approx(1 - (0.2 + 0.4 + 0.3 + 0.3 + 0.5) / (2 * 1.2))
    assert found.reduction == pytest.approx(0.22)


def test_processes_that_share_cores_take_turns() -> None:
    loads = np.full((5, 4), 900)
    alone = simulate(loads, EXACT, NO_REDUCTION)
    crowded = simulate(loads, EXACT, NO_REDUCTION, cores=2)
    assert crowded.steps_per_second == pytest.approx(alone.steps_per_second / 2)


def test_the_reduction_grows_with_the_logarithm_of_the_processes_only() -> None:
    times = ReductionTimes.fitted(small=0.002, large=0.012, num_processes=2)
    assert times.seconds(1) == 0 and times.seconds(2) == pytest.approx(0.012)
    assert times.seconds(1024) == pytest.approx(0.001 * 20 + 0.01 * 2 * 1023 / 1024)


def test_more_varying_times_make_more_waiting() -> None:
    loads = simulated_scaling.loads_of(64)
    noisy = StepTimes(0.1, 1e-3, np.ones(1), np.linspace(0.8, 1.2, 50), 0.05)
    idle = [simulate(loads, times, NO_REDUCTION).idle for times in (EXACT, noisy)]
    assert idle[0] < 0.05 < 0.1 < idle[1] < 0.3


def test_the_table_has_a_row_for_each_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def group(number: int, steps: int) -> list[dict]:
        tokens = [15_000, 18_000, 20_000]
        busy = [0.1 + 1e-5 * each for each in tokens]
        process = {"tokens": tokens, "busy": busy, "wall": [each + 0.05 for each in busy]}
        repeated = {
            "reductions": [0.012] * (number > 1),
            "small_reductions": [0.002] * (number > 1),
        }
        return [process | repeated] * number

    monkeypatch.setattr(simulated_scaling, "run_group", group)
    assert main(["bench", "--only", "scaling", "--simulate", "100", "--device", "cpu"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line for line in lines if line and line[0].isdigit()}
    assert list(rows) == ["1", "2", "4", "8", "64", "100"]
    # Real and predicted steps per second of one process are the same.
    assert rows["1"][1] == rows["1"][2]
    assert main(["bench", "--only", "knn", "--simulate", "100"]) == 1


# The real groups of the command are run by hand: docs/performance.md.
@pytest.mark.slow
def test_a_real_group_measures_what_the_simulation_needs() -> None:
    groups = {number: simulated_scaling.run_group(number, 2) for number in (1, 2)}
    steps, reduction = simulated_scaling.fitted(groups)
    assert steps.per_token > 0 and reduction.seconds(2) > 0
    rate, idle, seconds = simulated_scaling.observed(groups[2])
    assert rate > 0 and 0 <= idle < 1 and seconds > 0
