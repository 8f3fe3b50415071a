"""Errors of reading batches: of data workers that can't be reached, and of the data themselves."""

from __future__ import annotations

import shutil
import threading
from multiprocessing import current_process
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from pointup.datasets import batch
from pointup.errors import TrainingError


class Pairs(torch.utils.data.Dataset[Data]):
    """Four pairs of random points, or of files that are gone."""

    def __init__(self, are_gone: bool = False) -> None:
        self.are_gone = are_gone

    def __getitem__(self, index: int) -> Data:
        if self.are_gone:
            Path(f"pair_{index}.npy").read_bytes()
        points = torch.rand(5, 3)
        return Data(pos=points, target=points, name=str(index), index=index)

    def __len__(self) -> int:
        return 4


def test_a_worker_whose_temporary_files_were_deleted_is_an_error_with_the_remedy(
    tmp_path, monkeypatch, loader
):
    config: dict[str, object] = current_process()._config  # type: ignore[attr-defined]
    folder = tmp_path / "sockets"
    folder.mkdir()
    monkeypatch.setitem(config, "tempdir", str(folder))
    batches = iter(loader(Pairs(), [[0], [1], [2], [3]], num_workers=1))
    next(batches)
    shutil.rmtree(folder)
    with pytest.raises(TrainingError, match="continues from the last checkpoint"):
        for _ in range(3):
            next(batches)


def test_a_timeout_is_a_lost_worker_only_where_the_thread_that_pins_batches_has_ended():
    ended = threading.Thread(target=str)
    ended.start()
    ended.join()
    for thread, error, message in (
        (ended, TrainingError, r"no connection to a data worker \(.*timed out.*emptied"),
        (threading.current_thread(), RuntimeError, r"^DataLoader timed out"),
    ):
        with pytest.raises(error, match=message), batch._lost_workers_named(thread):
            raise RuntimeError("DataLoader timed out after 120 seconds")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_missing_file_of_the_data_is_not_taken_for_a_missing_worker(num_workers, loader):
    with pytest.raises(FileNotFoundError, match=r"pair_0\.npy"):
        next(iter(loader(Pairs(are_gone=True), [[0], [1]], num_workers)))
