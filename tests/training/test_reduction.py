from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from multiprocessing import current_process
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from pointup.benchmark.training_step import SingleProcess
from pointup.datasets.batch import collate, make_loader
from pointup.errors import TrainingError
from pointup.training.distributed.reduction import StepReduction, StepTotals, loss_divisor


class SlowPairs(torch.utils.data.Dataset[Data]):
    """Pairs that take long to read, by their recorded time and by the clock."""

    def __getitem__(self, index: int) -> Data:
        time.sleep(0.05)
        seconds = {"reading": 0.05, "augmenting": 0.01}
        points = torch.rand(5, 3)
        return Data(pos=points, target=points, name=str(index), index=index, seconds=seconds)

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_step_that_waits_for_data_reports_the_stage(num_workers: int) -> None:
    loader = make_loader(SlowPairs(), [[0, 1], [2, 3]], num_workers)  # type: ignore[arg-type]
    reduction = StepReduction(SingleProcess(torch.device("cpu")), [])
    reduction.start()
    batch = reduction.next_batch(iter(loader))
    reduction.busy_seconds = 0.1
    totals = reduction.finish(stop=False, elapsed_seconds=0.0)
    assert batch.num_graphs == 2
    assert totals.data_seconds["reading"] == pytest.approx(0.1)
    assert totals.data_seconds["augmenting"] == pytest.approx(0.02)
    assert totals.data_seconds["packing"] > 0
    assert totals.limited_by == "reading"


def test_a_worker_whose_temporary_files_were_deleted_is_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, object] = current_process()._config  # type: ignore[attr-defined]
    folder = tmp_path / "sockets"
    folder.mkdir()
    monkeypatch.setitem(config, "tempdir", str(folder))
    batches = iter(make_loader(SlowPairs(), [[0], [1], [2], [3]], num_workers=1))  # type: ignore[arg-type]
    reduction = StepReduction(SingleProcess(torch.device("cpu")), [])
    reduction.start()
    reduction.next_batch(batches)
    shutil.rmtree(folder)
    with pytest.raises(TrainingError, match="continues from the last checkpoint"):
        for _ in range(3):
            reduction.next_batch(batches)


class TimedOut:
    """Batches of a loader that pins them, of which none arrives."""

    def __init__(self, thread: threading.Thread) -> None:
        self._pin_memory_thread = thread

    def __iter__(self) -> TimedOut:
        return self

    def __next__(self) -> Batch:
        raise RuntimeError("DataLoader timed out after 120 seconds")


def test_a_timeout_is_a_lost_worker_only_where_the_thread_that_pins_batches_has_ended() -> None:
    reduction = StepReduction(SingleProcess(torch.device("cpu")), [])
    ended = threading.Thread(target=str)
    ended.start()
    ended.join()
    with pytest.raises(
        TrainingError, match=r"no connection to a data worker \(.*timed out.*emptied"
    ):
        reduction.next_batch(TimedOut(ended))
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out"):
        reduction.next_batch(TimedOut(threading.current_thread()))


class MissingPairs(SlowPairs):
    """Pairs whose file is gone."""

    def __getitem__(self, index: int) -> Data:
        Path(f"pair_{index}.npy").read_bytes()
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_missing_file_of_the_data_is_not_taken_for_a_missing_worker(num_workers: int) -> None:
    loader = make_loader(MissingPairs(), [[0], [1]], num_workers)  # type: ignore[arg-type]
    reduction = StepReduction(SingleProcess(torch.device("cpu")), [])
    reduction.start()
    with pytest.raises(FileNotFoundError, match=r"pair_0\.npy"):
        reduction.next_batch(iter(loader))


@pytest.mark.parametrize(
    ("busy", "waits", "limit"),
    [
        ((1.0, 1.0), (0.01, 0.0), "training"),
        ((1.0, 0.9), (0.0, 0.0), "other processes"),
        ((1.0, 0.9), (0.0, 0.1), "augmenting"),
    ],
)
def test_a_step_reports_what_limits_it(
    busy: tuple[float, ...], waits: tuple[float, ...], limit: str
) -> None:
    totals = StepTotals(
        num_clouds=1, num_tokens=1, loss=0.0, stop=False, elapsed_seconds=0.0, busy_seconds=busy,
        data_wait_seconds=waits, out_of_memory=0, data_seconds={"reading": 1.0, "augmenting": 2.0},
    )  # fmt: skip
    assert totals.limited_by == limit


def test_a_batch_without_samples_has_only_packing_time() -> None:
    assert collate([]).seconds.keys() == {"packing"}


def test_gradients_are_summed_in_double_precision_so_that_their_order_does_not_show() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    sums = []
    for order in ((1e8, 1.0, -1e8, 1.0), (1.0, 1.0, 1e8, -1e8), (-1e8, 1.0, 1.0, 1e8)):
        reduction = StepReduction(SingleProcess(torch.device("cpu")), [weight])
        reduction.start()
        for gradient in order:
            weight.grad = torch.tensor([gradient])
            reduction.add(torch.tensor([gradient]), num_tokens=1)
        totals = reduction.finish(stop=False, elapsed_seconds=0.0)
        sums.append((weight.grad.item(), totals.loss))
    # In single precision the four clouds sum to 0.25, 0 or 0.5, depending on their order.
    assert sums == [(0.5, 0.5)] * 3


@pytest.mark.parametrize("num_clouds", [1, 3, 100, 5000])
def test_fp16_gradients_of_many_clouds_do_not_overflow(num_clouds: int) -> None:
    def gradient(scaler: object) -> float:
        accelerator = SimpleNamespace(
            device=torch.device("cpu"), num_processes=1, process_index=0, scaler=scaler,
            reduce=lambda buffer, reduction: buffer,
        )  # fmt: skip
        weight = torch.nn.Parameter(torch.zeros(1))
        reduction = StepReduction(accelerator, [weight])
        reduction.start()
        scale = 2.0**14
        half = weight.half()
        # The gradient of each cloud is 0.25, in half precision.
        losses = (half * torch.full((num_clouds,), 0.25, dtype=torch.float16)).float()
        divisor = loss_divisor(accelerator, num_clouds)
        (scale * losses.sum() / divisor).backward()
        reduction.add(losses, num_tokens=1)
        reduction.finish(stop=False, elapsed_seconds=0.0)
        assert weight.grad is not None
        return weight.grad.item() / scale

    assert gradient(object()) == pytest.approx(0.25, rel=2e-3)
    assert loss_divisor(SimpleNamespace(scaler=None), num_clouds) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("requested", [(), (0,), (2,), (0, 1, 2)])
def test_a_stop_requested_on_one_process_stops_all(requested: tuple[int, ...]) -> None:
    buffers = []

    def finish(rank: int, reduce: Callable[[Tensor], Tensor]) -> StepTotals:
        processes = SimpleNamespace(
            device=torch.device("cpu"), num_processes=3, process_index=rank,
            scaler=None, reduce=lambda buffer, reduction: reduce(buffer),
        )  # fmt: skip
        reduction = StepReduction(processes, [])
        reduction.start()
        return reduction.finish(stop=rank in requested, elapsed_seconds=float(rank == 0))

    for rank in range(3):
        finish(rank, lambda buffer: buffers.append(buffer) or buffer)  # type: ignore[func-returns-value]
    totals = finish(0, lambda buffer: torch.stack(buffers).sum(0))
    assert totals.stop == bool(requested) and totals.elapsed_seconds == 1.0
