"""Kernels that fail or give wrong results are detected before use and replaced; the switch."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from test_kernels import (
    DEVICE,
    IS_INTERPRETED,
    KERNEL_FILES,
    expect_knn,
    expect_nearest,
    long,
    needs_device,
    needs_triton,
    ragged,
)

from pointup.errors import ConfigError, PointupError
from pointup.geometry import kernels, neighbors
from pointup.geometry.neighbors import nearest
from pointup.geometry.thinning import insertion_radii

CPU = torch.device("cpu")
HERE = torch.device(DEVICE)
pytestmark = needs_triton


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    kernels.is_available.cache_clear()
    kernels.warn_of_many.cache_clear()
    yield
    kernels.is_available.cache_clear()


@pytest.fixture
def as_on_cuda() -> Iterator[None]:
    """Tensors of the CPU are searched as those on CUDA: by kernels that passed the trial."""

    def take(pos: torch.Tensor, k: int) -> bool:
        return kernels.is_available(pos.device)

    with (
        mock.patch.object(neighbors, "_search_trees", neighbors._search_accelerator),
        mock.patch.object(kernels, "take", take),
    ):
        yield


@pytest.fixture
def small_trial() -> Iterator[None]:
    """Few points, for the slow interpreter; the last cloud still has several tiles."""
    from pointup.geometry.kernels import trial

    if not IS_INTERPRETED:
        yield
        return
    few = {"SIZES": (40, 0, 1), "TARGET_SIZES": (9, 3, 1), "NUM_NEIGHBORS": (5,)}
    with mock.patch.multiple(trial, **few):
        yield


def expect_right_answers(device: str = "cpu") -> None:
    sets = ragged([(20, 50), (0, 3), (3, 9)], device=device)
    expect_nearest(sets, *nearest(*sets))
    expect_knn(sets, 4, *neighbors._search(*sets, 4))
    counts = torch.tensor([7, 0, 3])
    radii = insertion_radii(*sets[:2], counts)
    with mock.patch.object(kernels, "take", return_value=False):
        assert torch.equal(radii, insertion_radii(*sets[:2], counts))


@needs_device
@pytest.mark.usefixtures("small_trial")
def test_kernels_that_work_are_used_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.is_available(HERE)


def broken(kernel: Any, result: int) -> Any:
    """The kernel with a wrong first value in its result."""

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*arguments: Any, **options: Any) -> None:
                kernel[grid](*arguments, **options)
                written = [a for a in arguments if isinstance(a, torch.Tensor)][result]
                written.view(-1)[0] += 1

            return launch

    return Broken()


# Position of the result among the tensors passed to the kernel.
RESULTS = {
    "knn.knn_kernel": -1,
    "insertion.insertion_kernel": 4,
}


@needs_device
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=long if name.startswith("insertion") else ()) for name in RESULTS],
)
@pytest.mark.usefixtures("small_trial", "as_on_cuda")
def test_a_kernel_with_wrong_results_is_detected_and_results_stay_right(name):
    file, kernel = name.split(".")
    module = importlib.import_module(f"pointup.geometry.kernels.{file}")
    bad = broken(getattr(module, kernel), RESULTS[name])
    with mock.patch.object(module, kernel, bad):
        with pytest.warns(
            UserWarning, match=rf"kernel {file} gives wrong results.*many times slower"
        ):
            assert not kernels.is_available(HERE)
        # One warning; the broken kernel is not launched again.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expect_right_answers(DEVICE)


def failing_trial(monkeypatch: pytest.MonkeyPatch, *outcomes: object) -> None:
    """The first kernel's trial has these outcomes; the others are not tried."""
    from pointup.geometry.kernels import trial

    monkeypatch.setattr(trial, "TRIALS", {"knn": mock.Mock(side_effect=outcomes)})


@pytest.mark.parametrize(
    "error", [RuntimeError("Triton Error [CUDA]: out of memory"), MemoryError()], ids=repr
)
def test_a_full_memory_is_no_fault_of_the_kernels_and_they_are_tried_again(error, monkeypatch):
    failing_trial(monkeypatch, error, True)
    with pytest.raises(type(error)):
        kernels.is_available(CPU)
    assert kernels.is_available(CPU)


def test_an_unusable_device_after_a_kernel_is_an_error_that_names_the_switch(monkeypatch):
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    failing_trial(monkeypatch, error)
    with (
        mock.patch("pointup.geometry.kernels.trial.torch.zeros", side_effect=error),
        pytest.raises(PointupError, match=r"illegal memory access.*POINTUP_KERNELS=0"),
    ):
        kernels.is_available(CPU)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RuntimeError("the provided PTX was compiled with an unsupported toolchain."), "driver"),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), "driver"),
        (subprocess.CalledProcessError(1, "gcc"), "python3-dev"),
        (RuntimeError("something else"), "version of triton"),
    ],
    ids=str,
)
def test_the_remedy_follows_from_the_error_of_triton(error, remedy, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    failing_trial(monkeypatch, error)
    with pytest.warns(UserWarning, match=f"kernel knn fails.*{remedy}"):
        assert not kernels.is_available(CPU)


@pytest.mark.usefixtures("as_on_cuda")
def test_without_a_c_compiler_a_warning_names_it_and_results_are_right(monkeypatch):
    failing_trial(monkeypatch, RuntimeError("Failed to find C compiler."))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.warns(UserWarning, match="Failed to find C compiler.*apt install gcc"):
        expect_right_answers()


@pytest.mark.usefixtures("as_on_cuda")
def test_without_triton_one_warning_says_so_and_results_are_right(monkeypatch):
    # Neither triton nor a module that imports it can be imported any more.
    for name in ("triton", *(f"pointup.geometry.kernels.{name}" for name in KERNEL_FILES)):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.warns(UserWarning, match="pip install triton") as warned:
        expect_right_answers()
    assert len(warned) == 1


def test_the_environment_switches_the_kernels_off(monkeypatch):
    from pointup.geometry.kernels import trial

    tried = mock.Mock(return_value=None)
    monkeypatch.setattr(trial, "problem", tried)
    monkeypatch.setenv("POINTUP_KERNELS", "0")
    assert not kernels.is_available(CPU) and not tried.called
    kernels.is_available.cache_clear()
    monkeypatch.setenv("POINTUP_KERNELS", "off")
    with pytest.raises(ConfigError, match="POINTUP_KERNELS is 'off'; set it to 0"):
        kernels.is_available(CPU)
    monkeypatch.setenv("POINTUP_KERNELS", "1")
    assert kernels.is_available(CPU) and tried.called


def test_more_neighbours_than_the_kernels_find_give_one_warning():
    pos: Any = SimpleNamespace(device=torch.device("cuda:0"), shape=torch.Size([5, 3]))
    with (
        mock.patch.object(kernels, "is_available", return_value=True),
        pytest.warns(UserWarning, match="129 neighbours.*more than the 128") as warned,
    ):
        assert not kernels.take(pos, 129) and not kernels.take(pos, 129)
        assert kernels.take(pos, 128)
    assert len(warned) == 1
