from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch

from pointup.benchmark import data_loading as reading
from pointup.benchmark import data_path, timing
from pointup.benchmark import neighbor_search as searches
from pointup.benchmark import reference_training as reference
from pointup.benchmark import training_speed as steps
from pointup.benchmark import upsampling as upsampled
from pointup.benchmark.clouds import one_cloud, ragged, sheet, training_batch
from pointup.benchmark.machine import WARNINGS, device_named, machine_differences
from pointup.benchmark.peak_memory import PeakMemory
from pointup.benchmark.reference_training import (
    reference_chamfer_distance,
    reference_farthest_point_sample,
    reference_knn,
    reference_upsample,
)
from pointup.benchmark.scaling import idle, run_group, samples_for, summary
from pointup.benchmark.sections import ALL
from pointup.benchmark.tables import Column, Row, Section
from pointup.benchmark.timing import Bound, Effort, compare
from pointup.cli.bench import SECTIONS, Bench
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.errors import ConfigError, FileError
from pointup.geometry.neighbors import knn
from pointup.losses import chamfer_distance
from pointup.model.upsampler import Upsampler

CPU = torch.device("cpu")
SMALL = Effort(quick=True, device=CPU, seconds=60.0)


def model_that_moves(**options: object) -> Upsampler:
    """A model with random weights, so that its offsets are not zero."""
    torch.manual_seed(0)
    model = Upsampler(**options)
    for weight in model.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.1)
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"concat": False, "beta": False, "num_refinements": 2, "feature_dim": 8, "heads": 2}],
    ids=["default", "other options"],
)
@pytest.mark.parametrize("num_points", [5, 300])
def test_the_reference_model_makes_the_same_children_with_the_same_gradients(
    options: dict[str, object], num_points: int
) -> None:
    model = model_that_moves(**options)
    pos = sheet(num_points, 0, 0.01)
    ours = model(pos, one_cloud(pos), 4.0)
    kept, children = reference_upsample(model, pos, 4.0)
    torch.testing.assert_close(children, ours.candidates, rtol=1e-5, atol=1e-5)
    assert len(kept) == len(ours.pos) == 4 * num_points
    away = torch.randn(children.shape, generator=torch.Generator().manual_seed(0))
    gradients = []
    for made in (ours.candidates, children):
        model.zero_grad()
        (made * away).sum().backward()
        # Weights that choose which children are kept have no part in where they lie.
        moved = [weight.grad for weight in model.parameters() if weight.grad is not None]
        gradients.append(torch.cat([grad.flatten() for grad in moved]))
    scale = gradients[1].abs().max()
    torch.testing.assert_close(gradients[0] / scale, gradients[1] / scale, rtol=1e-3, atol=1e-4)


def test_brute_force_finds_what_the_package_finds() -> None:
    pos, target = sheet(150, 0, 0.05).requires_grad_(), sheet(400, 1)
    ours = chamfer_distance(pos, one_cloud(pos), target, one_cloud(target)).sum()
    for recompute in (False, True):
        expected = reference_chamfer_distance(pos, target, recompute)
        torch.testing.assert_close(ours, expected)
        (gradient,) = torch.autograd.grad(expected, pos)
        torch.testing.assert_close(torch.autograd.grad(ours, pos, retain_graph=True)[0], gradient)
    squared, index = knn(target, one_cloud(target), 7)
    plain_squared, plain_index = reference_knn(target, 7)
    torch.testing.assert_close(plain_squared, squared)
    assert torch.equal(plain_index, index)
    assert reference_knn(target[:3], 5)[1][:, 3:].eq(-1).all()


def test_the_loop_of_picks_takes_the_farthest_point_each_time() -> None:
    pos = torch.tensor([[0.0, 0, 0], [1, 0, 0], [9, 0, 0], [5, 0, 0]])
    assert reference_farthest_point_sample(pos, 4).tolist() == [0, 2, 3, 1]


def test_clouds_have_the_requested_sizes() -> None:
    pos, ptr = ragged(1000, 8, 0)
    assert len(pos) == 1000
    assert (ptr[1:] - ptr[:-1]).tolist() == [28, 55, 84, 111, 139, 166, 195, 222]
    batch = training_batch([10, 20])
    assert batch.ptr.tolist() == [0, 10, 30]
    assert batch.target_ptr.tolist() == [0, 40, 120]


def test_a_slow_variant_runs_once_if_time_is_short() -> None:
    calls: list[str] = []
    compare(lambda: calls.append("quick"), lambda: calls.append("slow"), 0.0, CPU)
    assert calls == ["quick", "quick", "slow", "quick"]
    calls.clear()
    compare(lambda: calls.append("quick"), lambda: calls.append("slow"), 60.0, CPU)
    assert calls.count("slow") == 7


def test_a_bound_refuses_what_takes_longer_than_is_left() -> None:
    effort = Effort(quick=True, device=CPU, seconds=100.0)
    assert effort.bound().refusal(50.0) is None
    assert "would take 200 s" in (effort.bound().refusal(200.0) or "")
    assert Bound(0.0).refusal(0.0) == "no time left"


def test_peak_memory_is_that_of_the_work_inside() -> None:
    with PeakMemory(CPU) as memory:
        ones = torch.ones(25_000_000)
        for _ in range(10):  # For longer than several samples of a busy machine.
            ones.add_(1)
        del ones
    assert 95e6 < memory.bytes < 140e6


def test_idle_is_the_share_of_time_that_faster_processes_wait() -> None:
    assert idle(np.array([[1.0, 1.0], [2.0, 1.0]])) == pytest.approx(1 / 6)


def test_small_sizes_of_every_section_give_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_ROUNDS", 1)
    for module in (steps, reference):
        monkeypatch.setattr(module, "QUICK_SIZES", (30,))
        monkeypatch.setattr(module, "token_budget", lambda device: 600)
    monkeypatch.setattr(upsampled, "QUICK_SIZES", (200,))
    monkeypatch.setattr(searches, "QUICK_POINTS", 200)
    monkeypatch.setattr(reading, "QUICK_PAIRS", 4)
    monkeypatch.setattr(data_path, "NUM_PAIRS", 40)
    for module in (steps, reference, upsampled, searches, reading, data_path):
        section = module.SECTION
        rows = list(section.measure(SMALL))
        assert rows
        for row in rows:
            assert "left_out" not in row, section.name
            assert {column.name for column in section.columns} <= row.keys(), section.name
            assert all(row[c.name] > 0 for c in section.columns if c.better == "higher"), row
            assert section.line(row)


def batches(number: int, num_tokens: int, making: float) -> Iterator[Batch]:
    for _ in range(number):
        time.sleep(making)
        points = torch.zeros((num_tokens // 2, 3))
        seconds = {"reading": 3 * making, "packing": making}
        yield Batch(pos=points, target=points, seconds=seconds)


def test_a_consumer_waits_for_batches_that_are_made_more_slowly_than_it_consumes() -> None:
    # 0.02 s to consume a batch of 1,000 tokens, 0.02 s to make it, one after the other.
    row = data_path.consume(batches(30, 1000, 0.02), rate=50_000, seconds=0.6, skipped=2)
    assert 0.3 < row["wait"] < 0.7
    assert row["delivered"] < 26_000
    assert row["reading"] == pytest.approx(0.75) and row["augmenting"] == 0
    fast = data_path.consume(batches(30, 1000, 0.0), rate=50_000, seconds=0.4, skipped=2)
    assert fast["wait"] < 0.2 and fast["delivered"] < 51_000


@pytest.mark.slow
def test_two_processes_are_measured_against_one() -> None:
    first, second = run_group(2, on_gpus=False, budget=600, steps=2, rounds=1)
    assert first["busy"] == second["busy"]
    assert len(first["cpu"]) == len(second["cpu"]) == len(first["same"]) == 2
    # Nearly full batches, of both processes together in every step.
    assert all(1000 < tokens <= 1200 for tokens in first["tokens"])
    assert summary([first, second])["speedup"] > 0


@pytest.mark.parametrize(("num_processes", "budget"), [(8, 1_000_000), (8, 40_000), (2, 6_000_000)])
def test_scaling_has_enough_clouds_for_all_steps(num_processes: int, budget: int) -> None:
    tokens, _ = samples_for(3 * budget * num_processes, budget)
    plan = TokenBudgetBatchSampler(tokens, budget, num_processes=num_processes).plan
    for step in range(3):
        assert all(len(plan.batch(step, slot)) for slot in range(num_processes))


def test_scaling_is_tokens_together_over_tokens_alone_in_the_same_time() -> None:
    first = {"tokens_alone": 100, "alone": [1.0, 1.0], "together": [1.0, 1.0]}
    first |= {"tokens": [90, 90, 90, 90], "busy": [[1.0, 1.0]] * 4, "cpu": [1.0] * 4}
    first |= {"same": [[1.0, 0.6], [0.6, 1.0]]}
    row = summary([first, {"cpu": [0.8] * 4}])
    assert row["processes"] == 2
    assert row["speedup"] == pytest.approx(1.8)
    assert row["idle"] == 0
    assert row["idle_cpu"] == pytest.approx(0.1)
    assert row["idle_same"] == pytest.approx(0.2)


def table(name: str, rows: list[Row]) -> Section:
    def measure(effort: Effort) -> Iterator[Row]:
        yield from rows

    columns = (
        Column("size", "points", ",", is_key=True),
        Column("rate", "points/s", ",.0f", "higher"),
        Column("seconds", "seconds", ".1f", "lower"),
    )
    return Section(name, "A table", columns, measure)


def test_changes_are_reported_with_their_direction() -> None:
    before = [
        {"size": 10, "rate": 100.0, "seconds": 1.0},
        {"size": 20, "rate": 100.0, "seconds": 1.0},
        {"size": 30, "rate": 100.0, "seconds": 1.0},
    ]
    after = [
        {"size": 10, "rate": 200.0, "seconds": 2.0},
        {"size": 20, "rate": 101.0, "seconds": 1.0},
        {"size": 1000, "left_out": "no time left"},
    ]
    assert table("reading", after).changes(before, after) == [
        "10: points/s 100 -> 200, 2.00x, better",
        "10: seconds 1.0 -> 2.0, 2.00x, worse",
        "1,000: new",
        "30: not measured now",
    ]


def test_figures_are_printed_written_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"size": 10, "rate": 1000.0, "seconds": 1.0}, {"size": 20, "left_out": "no time left"}]
    monkeypatch.setattr("pointup.benchmark.sections.ALL", (table("reading", rows),))
    old = tmp_path / "old.json"
    assert Bench(quick=True, json=old).run() == 0
    printed = capsys.readouterr().out
    assert "torch " + torch.__version__ in printed
    assert "10           1,000       1.0" in printed
    assert "left out: no time left" in printed
    written = json.loads(old.read_text())
    assert written["sections"]["reading"] == rows
    assert written["machine"]["quick"] is True
    monkeypatch.setattr(
        "pointup.benchmark.sections.ALL", (table("reading", [{**rows[0], "rate": 500.0}]),)
    )
    Bench(compare=old).run()
    printed = capsys.readouterr().out
    assert "reading: 10: points/s 1,000 -> 500, 0.50x, worse" in printed
    # Before the sections and with the figures.
    assert printed.count("old.json was not measured in the same way:\nwarning: quick: True ->") == 2
    Bench(compare=old, quick=True).run()
    assert "quick" not in capsys.readouterr().out
    Bench(compare=old, only="sampler").run()
    assert "reading" not in capsys.readouterr().out


def test_unlike_measurements_are_named_and_those_that_cannot_be_compared_first() -> None:
    before = {"cores": 2, "load": 0.1, "device": "cpu", "quick": True, "old": 1}
    alike = {**before, "load": 0.5}
    assert machine_differences(before, alike) == []
    after = {"cores": 64, "load": 9.5, "device": "cuda", "quick": False, "gpu": "H"}
    assert machine_differences(before, after) == [
        "warning: device: cpu -> cuda: figures of different devices are compared",
        f"warning: quick: True -> False: {WARNINGS['quick']}",
        "cores: 2 -> 64",
        "load: 0.1 -> 9.5",
        "old: 1 -> None",
        "gpu: None -> H",
    ]


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:1", "meta", ""])
def test_a_device_that_torch_does_not_see_is_refused_in_a_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(ConfigError, match=r"^--device .*: give one that torch sees: cpu \(.+\)$"):
        Bench(device=name).run()


def test_devices_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for name in ("cpu", "cuda", "cuda:1"):
        assert device_named(name) == torch.device(name)
    with pytest.raises(ConfigError, match=r"torch sees: cpu, cuda:0, cuda:1$"):
        device_named("cuda:2")


@pytest.mark.parametrize("seconds", [0.0, -3.0, float("nan")])
def test_a_time_limit_that_leaves_no_time_is_refused(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointup.benchmark.sections.ALL", ())
    with pytest.raises(ConfigError, match=rf"--seconds {seconds:g}: must be above 0"):
        Bench(seconds=seconds).run()


def test_the_names_of_the_command_are_those_of_the_sections() -> None:
    assert tuple(section.name for section in ALL) == SECTIONS


def test_invalid_sections_and_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no section steps; there are sampler, reading"):
        Bench(only="sampler,steps").run()
    with pytest.raises(FileError, match=r"none\.json"):
        Bench(compare=tmp_path / "none.json").run()
    for content in ("[1]", '{"machine": [], "sections": {}}'):
        (tmp_path / "list.json").write_text(content)
        with pytest.raises(FileError, match=r"list\.json: not written by pointup bench"):
            Bench(compare=tmp_path / "list.json").run()
    with pytest.raises(FileError, match="there is no folder"):
        Bench(json=tmp_path / "missing" / "new.json").run()


@pytest.mark.parametrize("name", ["folder", "n" * 300])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()

    def measure(*_: object) -> None:
        pytest.fail("measured")

    monkeypatch.setattr("pointup.benchmark.machine.describe_machine", measure)
    with pytest.raises(FileError, match=f"{name}: "):
        Bench(json=tmp_path / name).run()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
