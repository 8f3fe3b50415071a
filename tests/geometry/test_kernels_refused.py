"""Kernels that are not used: the remedy that a warning names, errors, and the switch."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from test_kernels import needs_triton
from test_kernels_trial import CPU
from test_kernels_trial import tried_anew as tried_anew

from pointup.errors import ConfigError, PointupError
from pointup.geometry import kernels

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        (
            "Triton Error [CUDA]: the provided PTX was compiled with an unsupported toolchain.",
            "driver",
        ),
        ("Triton Error [CUDA]: device kernel image is invalid", "driver"),
        ("libcuda.so cannot found!\nPlease make sure GPU is set up", "ldconfig"),
        ("out of resource: shared memory, Required: 300000", "too little shared memory"),
        ("something else", "version of triton"),
    ],
)
def test_the_remedy_follows_from_the_error_of_triton(message: str, remedy: str) -> None:
    from pointup.geometry.kernels import trial

    assert re.search(remedy, trial.remedy(RuntimeError(message)))


def test_on_amd_the_warning_names_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from pointup.geometry.kernels import trial

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setitem(trial.TRIALS, "nearest", mock.Mock(side_effect=KeyError("maxnreg")))
    problem = trial.problem(CPU)
    assert problem and re.search("kernel nearest fails.*maxnreg", problem.text)
    assert "ROCm" in problem.remedy


def test_an_unusable_device_after_a_kernel_is_an_error_that_names_the_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pointup.geometry.kernels import trial

    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setitem(trial.TRIALS, "nearest", mock.Mock(side_effect=error))
    with (
        mock.patch.object(trial.torch, "zeros", side_effect=error),
        pytest.raises(PointupError, match=r"illegal memory access.*POINTUP_KERNELS=0"),
    ):
        trial.problem(CPU)


def test_running_out_of_memory_in_a_trial_does_not_disable_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pointup.geometry.kernels import trial

    error = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setitem(trial.TRIALS, "nearest", mock.Mock(side_effect=error))
    with pytest.raises(torch.OutOfMemoryError):
        kernels.is_available(CPU)


def test_the_environment_switches_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_more_neighbours_than_the_kernels_find_give_one_warning() -> None:
    pos: Any = SimpleNamespace(device=torch.device("cuda:0"), shape=torch.Size([5, 3]))
    with (
        mock.patch.object(kernels, "is_available", return_value=True),
        pytest.warns(UserWarning, match="129 neighbours.*more than the 128") as warned,
    ):
        assert not kernels.take(pos, 129) and not kernels.take(pos, 129)
        assert kernels.take(pos, 128)
    assert len(warned) == 1
