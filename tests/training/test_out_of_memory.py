"""Out-of-memory errors: the halves of a batch have its gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import wavy_pair
from torch import Tensor
from torch_geometric.data import Batch

from pointup.datasets.batch import collate, num_tokens
from pointup.datasets.opening import open_samples
from pointup.datasets.pair_dataset import PairDataset
from pointup.datasets.pair_writer import write_pairs
from pointup.errors import TrainingError
from pointup.training.faults.out_of_memory import halves, in_pieces


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> PairDataset:
    rng = np.random.default_rng(0)
    pairs = [wavy_pair(f"cloud_{i}", size, 2.0, rng) for i, size in enumerate((9, 30, 5, 8, 12))]
    pairs[2].resample = None
    directory = tmp_path_factory.mktemp("data") / "pairs"
    write_pairs(pairs, pairs[:1], directory, info={})
    return PairDataset(open_samples(directory, "train"))


def batch_of(dataset: PairDataset, *indices: int) -> Batch:
    return collate([dataset[index] for index in indices])


def test_halves_equal_the_collation_of_the_same_clouds(dataset):
    first, second = halves(batch_of(dataset, 0, 1, 2, 3, 4))
    for half, expected in (
        (first, batch_of(dataset, 0, 1)),
        (second, batch_of(dataset, 2, 3, 4)),
    ):
        assert half.name == expected.name and half.num_graphs == expected.num_graphs
        # Halves have no reading time, and pairs that are trained on no core.
        assert set(half.keys()) == set(expected.keys()) - {"seconds", "faults", "core"}
        for key in half.keys():  # noqa: SIM118
            if key != "name":
                assert torch.equal(half[key], expected[key]), key


@pytest.mark.parametrize("most", [1000, 70, 95])
def test_each_cloud_is_processed_once_in_parts_that_fit(dataset, most):
    done: list[str] = []
    pending: list[str] = []

    def work(batch: Batch) -> Tensor:
        pending.extend(batch.name)
        if num_tokens(batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.zeros(batch.num_graphs)

    pieces = in_pieces(batch_of(dataset, 0, 2, 3, 4, 0, 2), work, pending.clear)
    for piece, losses in pieces:
        assert pending == piece.name and len(losses) == piece.num_graphs
        pending.clear()
        done += piece.name
    assert done == [f"cloud_{i}" for i in (0, 2, 3, 4, 0, 2)]


def test_a_cloud_too_large_by_itself_is_named_and_other_errors_pass(dataset):
    def fails(error: Exception) -> None:
        def work(batch: Batch) -> Tensor:
            raise error

        list(in_pieces(batch_of(dataset, 1, 0), work, lambda: None))

    message = "cloud_1: out of memory with this cloud alone, of 90 points"
    with pytest.raises(TrainingError, match=message):
        fails(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(TrainingError, match=message):
        fails(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"))
    with pytest.raises(RuntimeError, match="shape"):
        fails(RuntimeError("shape mismatch"))
