"""Kernels that fail or give wrong results are detected before use and replaced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_kernels import (
    DEVICE,
    IS_INTERPRETED,
    expect_knn,
    expect_nearest,
    long,
    needs_device,
    needs_triton,
    ragged,
)
from test_kernels_thinning import expect_farthest

from pointup.geometry import kernels, neighbors, thinning
from pointup.geometry.neighbors import knn, nearest, nearest_both
from pointup.geometry.thinning import farthest_point_sample, insertion_radii

CPU = torch.device("cpu")
HERE = torch.device(DEVICE)
KERNEL_FILES = ("farthest", "insertion", "knn", "nearest")
pytestmark = needs_triton


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    kernels.is_available.cache_clear()
    kernels.warn_of_many.cache_clear()
    yield
    kernels.is_available.cache_clear()


@pytest.fixture
def small_trial() -> Iterator[None]:
    """Few points, for the slow interpreter; the last cloud still has several tiles."""
    from pointup.geometry.kernels import farthest, trial

    if not IS_INTERPRETED:
        yield
        return
    with (
        mock.patch.multiple(trial, SIZES=(40, 0, 1), TARGET_SIZES=(9, 3, 1), LARGE=70, NUM_PICKS=5),
        mock.patch.multiple(farthest, MAX_IN_REGISTERS=64, TILE=8, BLOCK=64),
    ):
        yield


@pytest.fixture
def as_on_cuda() -> Iterator[None]:
    """Tensors of the CPU are searched as those on CUDA: by kernels that passed the trial."""

    def take(pos: torch.Tensor, k: int) -> bool:
        return kernels.is_available(pos.device)

    def sample(pos: torch.Tensor, bounds: list[int], counts: list[int]) -> torch.Tensor:
        return thinning._sample_elsewhere(pos, torch.tensor(bounds), bounds, counts)

    with (
        mock.patch.object(neighbors, "_search_trees", neighbors._search_accelerator),
        mock.patch.object(thinning, "_sample_buckets", sample),
        mock.patch.object(kernels, "take", take),
    ):
        yield


def expect_right_answers(device: str = "cpu") -> None:
    sets = ragged([(20, 50), (0, 3), (3, 9)], device=device)
    expect_nearest(sets, *nearest(*sets))
    (to_target, there), _ = nearest_both(*sets)
    expect_nearest(sets, to_target, there)
    expect_knn(sets, 4, *knn(*sets[2:], 4, *sets[:2]))
    counts = torch.tensor([7, 0, 3])
    expect_farthest(*sets[:2], counts, farthest_point_sample(*sets[:2], counts))
    radii = insertion_radii(*sets[:2], counts)
    with mock.patch.object(kernels, "take", return_value=False):
        assert torch.equal(radii, insertion_radii(*sets[:2], counts))


@needs_device
@pytest.mark.usefixtures("small_trial")
def test_kernels_that_work_are_used_without_a_warning() -> None:
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
    "nearest.nearest_kernel": -1,
    "knn.knn_kernel": -1,
    "farthest.farthest_kernel": -1,
    "farthest.farthest_tiles_kernel": 6,
    "insertion.insertion_kernel": 4,
}


@needs_device
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=long if name.startswith(("farthest", "insertion")) else ())
        for name in RESULTS
    ],
)
@pytest.mark.usefixtures("small_trial", "as_on_cuda")
def test_a_kernel_with_wrong_results_is_detected_and_results_stay_right(name: str) -> None:
    import importlib

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


@needs_device
@pytest.mark.usefixtures("small_trial")
def test_a_kernel_that_puts_a_copy_before_the_point_itself_is_found_out() -> None:
    from pointup.geometry.kernels import knn as module

    kernel = module.knn_kernel

    class Careless:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **options: kernel[grid](*given, **options | {"OWN_FIRST": False})

    with (
        mock.patch.object(module, "knn_kernel", Careless()),
        pytest.warns(UserWarning, match="kernel knn gives wrong results"),
    ):
        assert not kernels.is_available(HERE)


def without_compiler(**environment: str) -> BaseException:
    """The error of Triton when it compiles its launcher in such an environment."""
    from triton.runtime import build

    build._find_compiler.cache_clear()
    try:
        with (
            mock.patch.dict(os.environ, environment),
            pytest.raises((RuntimeError, subprocess.CalledProcessError, OSError)) as caught,
        ):
            os.environ.pop("CC", None)
            source = "#include <Python.h>\n"
            build.compile_module_from_src(source, "a_name", [], [], [])
        return caught.value
    finally:
        build._find_compiler.cache_clear()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        MemoryError(),
    ],
    ids=lambda error: str(error) or type(error).__name__,
)
def test_a_full_memory_is_no_fault_of_the_kernels_and_they_are_tried_again(
    error: Exception,
) -> None:
    from pointup.geometry.kernels import trial

    attempts = mock.Mock(side_effect=[error, True])
    with mock.patch.dict(trial.TRIALS, {"nearest": attempts}, clear=True):
        with pytest.raises(type(error)) as caught:
            kernels.is_available(CPU)
        assert caught.value is error
        assert kernels.is_available(CPU)


def test_a_full_memory_after_a_kernel_failed_does_not_make_the_device_unusable() -> None:
    from pointup.geometry.kernels import trial

    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
    with (
        mock.patch.object(trial.torch, "zeros", side_effect=full),
        pytest.raises(torch.OutOfMemoryError),
    ):
        trial.expect_usable(CPU, "nearest", ValueError("not compiled"))


@pytest.mark.skipif(IS_INTERPRETED, reason="nothing is compiled there")
@pytest.mark.usefixtures("as_on_cuda")
def test_without_a_c_compiler_a_warning_names_it_and_results_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    error = without_compiler(PATH=str(tmp_path))
    from pointup.geometry.kernels import trial

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setitem(trial.TRIALS, "nearest", mock.Mock(side_effect=error))
    with pytest.warns(UserWarning, match="Failed to find C compiler.*apt install gcc"):
        expect_right_answers()


@pytest.mark.skipif(IS_INTERPRETED, reason="nothing is compiled there")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_without_pythons_headers_the_remedy_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pointup.geometry.kernels import trial

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    paths = {"include": str(tmp_path / "include")}
    with mock.patch("sysconfig.get_paths", return_value=paths):
        error = without_compiler()
        assert isinstance(error, subprocess.CalledProcessError)
        assert "python3-dev" in trial.remedy(error)


@pytest.mark.usefixtures("as_on_cuda")
def test_without_triton_one_warning_says_so_and_results_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Neither triton nor a module that imports it can be imported any more.
    for name in ("triton", *(f"pointup.geometry.kernels.{name}" for name in KERNEL_FILES)):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.warns(UserWarning, match="pip install triton") as warned:
        expect_right_answers()
    assert len(warned) == 1
