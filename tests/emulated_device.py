"""Emulates a GPU on the CPU, with CUDA's rules for devices, synchronisation and autocast.

`torch.device("gpu")` is a Python backend of torch. A tensor there wraps a tensor on the CPU, and
each operation on it runs on the wrapped tensor, with these rules:

- an operation can't mix tensors of one dimension or more on the CPU and on the device, except for a
  copy;
- operations that make the host wait (reading a value, a shape that depends on values, a copy to the
  CPU), blocking copies to the device, and operations that launch work are recorded with the line
  that called them;
- autocast casts the same operations as CUDA's: the lists are read from the header of the installed
  torch;
- the device has its own random generator;
- memory is counted, and beyond a limit `torch.OutOfMemoryError` is raised;
- each Triton kernel is replaced by a counted launch; the results are those of the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from emulated_autocast import cast_operations, clear_casts
from emulated_log import note_kernel, quietly
from emulated_tensor import DeviceTensor, aten, copy_values, factory, module, on_host_of, to_wrapped
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


def _register() -> list[torch.library.Library]:
    _setup_privateuseone_for_python_backend("gpu", backend_module=module)
    factories = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in (
        "empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step",
        "linspace", "eye", "eye.m", "randperm",
    ):  # fmt: skip
        packet, _, overload = name.partition(".")
        factories.impl(name, factory(getattr(getattr(aten, packet), overload or "default")))
    factories.impl(
        "_copy_from",
        lambda source, target, non_blocking=False: copy_values(target, source, non_blocking),
    )
    fallback = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel)
    casts = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name, operation in cast_operations():
        casts.impl(name, operation)
    return [factories, fallback, casts]


_libraries = _register()
DEVICE = torch.device("gpu", 0)


@contextlib.contextmanager
def like_mps() -> Iterator[None]:
    """In this context, within `emulated`, the device has no float64 and copies must be complete."""
    from pointup import metrics
    from pointup.geometry import packed
    from pointup.training.distributed import reduction

    def widest_float(device: torch.device) -> torch.dtype:
        return torch.float64 if device.type == "cpu" else torch.float32

    with contextlib.ExitStack() as stack:
        for place in (packed, metrics, reduction):
            stack.enter_context(mock.patch.object(place, "widest_float", widest_float))
        stack.enter_context(mock.patch.object(packed, "COPIED_AHEAD", ()))
        stack.enter_context(mock.patch.object(module, "has_float64", False))
        yield


def _from_host(save: Callable[..., Any]) -> Callable[..., Any]:
    """A writing function that unwraps tensors of the device first."""

    def run(values: Any, *rest: Any, **options: Any) -> Any:
        return save(tree_map(lambda value: on_host_of(value), values), *rest, **options)

    return run


def _launch_nothing(kernel: Any, grid: Any) -> Callable[..., None]:
    """Replaces `kernel[grid]`: checks the kernel's arguments and counts the launch."""

    def launch(*args: Any, **options: Any) -> None:
        for value in args:
            assert not isinstance(value, Tensor) or (
                isinstance(value, DeviceTensor) and value.is_contiguous()
            ), f"{kernel.fn.__name__} needs contiguous tensors of the device, not {value!r}"
        note_kernel(kernel.fn.__name__)

    return launch


def _answered(wrapper: Callable[..., Any], search: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper of a kernel: records its operations and returns the result of the CPU."""

    def run(*args: Any) -> Any:
        if not isinstance(args[0], DeviceTensor):
            return wrapper(*args)
        wrapper(*args)
        with quietly():
            result = search(*tree_map(lambda value: on_host_of(value), args))
            return tree_map(to_wrapped, result)

    return run


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """In this context the emulated device is installed: memory, waits, kernels."""
    from triton.runtime.jit import JITFunction

    from pointup.geometry import kernels, neighbors, packed, thinning
    from pointup.geometry import thinning as insertion
    from pointup.geometry.kernels import farthest, knn, nearest
    from pointup.geometry.kernels import insertion as kernels_of_insertion
    from pointup.model import upsampler as model
    from pointup.training import training_state
    from pointup.training.run_directory import checkpoint
    from pointup.upsampling.single_pass import candidates

    def take(pos: Tensor, k: int) -> bool:
        return pos.device.type == "gpu" and pos.shape[1:] == (3,) and k <= kernels.MAX_K

    def search_one(query: Any, query_ptr: Any, pos: Any, ptr: Any) -> Tensor:
        return neighbors._search_trees(query, query_ptr, pos, ptr, 1)[1].squeeze(1)

    def search_both(points: Any, num_pos: int, ptr: Any, target_ptr: Any) -> Tensor:
        pos, target = points[:num_pos], points[num_pos:]
        to_target = search_one(pos, ptr, target, target_ptr)
        to_target = torch.where(to_target < 0, to_target, to_target + num_pos)
        return torch.cat([to_target, search_one(target, target_ptr, pos, ptr)])

    def search_own_first(*arguments: Any) -> tuple[Tensor, Tensor]:
        squared, index = neighbors._search_trees(*arguments)
        if arguments[0] is arguments[2]:
            neighbors.put_own_first(index)
        return squared, index

    def radii(*arguments: Any) -> Tensor:
        return insertion.settle(*arguments[:4])

    def sample(pos: Tensor, ptr: Tensor, bounds: list[int], counts: list[int]) -> Tensor:
        return thinning._sample_buckets(pos, bounds, counts)

    accelerator = torch.accelerator
    patches = [
        (accelerator, "synchronize", module.synchronize),
        (torch, "clear_autocast_cache", clear_casts),
        # Files are written from the wrapped tensors, like a device's own serialisation.
        (checkpoint, "save_file", _from_host(checkpoint.save_file)),
        (torch, "save", _from_host(torch.save)),
        # Inference tensors can't be wrapped.
        (candidates, "_run", torch.no_grad()(candidates._run.__wrapped__)),
        (JITFunction, "__getitem__", _launch_nothing),
        (_foreach_utils, "_foreach_supported_types", [Tensor, torch.nn.Parameter, DeviceTensor]),
        (training_state, "FUSED", {"gpu"}),
        (packed, "COPIED_AHEAD", ("gpu",)),
        (kernels, "take", take),
        (knn, "knn_search", _answered(knn.knn_search, search_own_first)),
        (nearest, "nearest_index", _answered(nearest.nearest_index, search_one)),
        (nearest, "nearest_index_both", _answered(nearest.nearest_index_both, search_both)),
        (farthest, "farthest_points", _answered(farthest.farthest_points, sample)),
        (kernels_of_insertion, "settle", _answered(kernels_of_insertion.settle, radii)),
        # Thinning on a GPU keeps other points; with the CPU's, the results can be compared.
        (model, "sample_by_spacing", _answered(model.sample_by_spacing, model.sample_by_spacing)),
    ]
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    with contextlib.ExitStack() as stack:
        for place, name, value in patches:
            stack.enter_context(mock.patch.object(place, name, value))
        try:
            yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
