"""Emulates a GPU on the CPU, with CUDA's rules for the places of tensors and for waits.

`torch.device("gpu")` is a Python backend of torch. A tensor there wraps a tensor on the CPU, and
each operation on it runs on the wrapped tensor, with these rules:

- an operation can't mix tensors of one dimension or more on the CPU and on the device, except for a
  copy;
- operations that make the host wait (reading a value, a shape that depends on values, a copy to the
  CPU) and blocking copies to the device are recorded with the line that called them;
- memory that was not written is NaN;
- each Triton kernel is replaced by a check of its arguments; the results are those of the CPU.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ROOT = Path(__file__).parent.parent
aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default,
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_consecutive.default, aten.unique_dim.default, aten.bincount.default,
}  # fmt: skip
has_float64 = True
waits: list[str] | None = None
operations: list[str] = []
"""Names of the operations that ran on the device, but for views and allocations."""


def note_wait(kind: str) -> None:
    if waits is None:
        return
    for frame in reversed(traceback.extract_stack(limit=60)):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "tests"):
            waits.append(f"{kind} in {path.relative_to(ROOT)}: {frame.line}")
            return
    waits.append(kind)


@contextlib.contextmanager
def recorded_waits(found: list[str] | None) -> Iterator[list[str] | None]:
    """Record the waits of the block in a list; with None, record none."""
    global waits
    outside, waits = waits, found
    try:
        yield found
    finally:
        waits = outside


class DeviceTensor(Tensor):
    """A tensor on the device; `host` has its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        if host.dtype == torch.float64 and not has_float64:
            raise TypeError("the device has no float64")
        wrapper = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, device=DEVICE, requires_grad=False,
        )  # fmt: skip
        wrapper.host = host
        return wrapper

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a tensor of the device to numpy; use Tensor.cpu() first")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def on_host_of(value: Any) -> Any:
    return value.host if isinstance(value, DeviceTensor) else value


def to_wrapped(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) else value


def copy_values(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, DeviceTensor):
        note_wait("copy to the CPU")
    elif not isinstance(source, DeviceTensor) and not non_blocking and source.numel():
        note_wait("blocking copy")
    on_host_of(target).copy_(on_host_of(source))
    return target


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.copy_.default:
        return copy_values(*args, **kwargs)
    if func is aten._to_copy.default and torch.device(kwargs.get("device", "gpu")).type == "cpu":
        note_wait("copy to the CPU")
        with torch.no_grad():
            return func(args[0].host, **kwargs)
    _expect_one_device(func, args, kwargs)
    is_device = torch.device(kwargs.get("device") or "gpu").type == "gpu"
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    name, schema = func._schema.name.removeprefix("aten::"), func._schema
    if func in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        note_wait(name)
    host_args, host_kwargs = tree_map(on_host_of, (args, kwargs))
    result = _uninitialised(name, func(*host_args, **host_kwargs))
    aliases = [each.alias_info for each in schema.returns]
    if all(alias is None or alias.is_write for alias in aliases) and not name.startswith(
        ("empty", "new_empty", "_unsafe_view")
    ):
        operations.append(name)
    if not is_device:
        return result
    # An operation that writes to an argument returns that same tensor.
    written = [
        kwargs.get(argument.name, args[place] if place < len(args) else None)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written and schema.returns:
        return written[0] if len(schema.returns) == 1 else tuple(written)
    return tree_map(to_wrapped, result)


def _expect_one_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse tensors of one dimension or more on both; record masks, which wait for their count."""
    values: list[Any] = []
    tree_map(values.append, (args, kwargs))
    if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        for index in args[1]:
            if isinstance(index, Tensor) and not isinstance(index, DeviceTensor):
                note_wait("blocking copy")
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                note_wait("a mask as an index")
        values = [args[0]]
    for value in values:
        if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) and value.dim() > 0:
            raise RuntimeError(f"tensor of shape {tuple(value.shape)} on the CPU in {func}")


def _uninitialised(name: str, values: Any) -> Any:
    """Fresh memory: NaN, so that tests detect reading it; 0 for types that may be indices."""
    if name.startswith(("empty", "new_empty")):
        values.fill_(torch.nan if values.is_floating_point() else 0)
    return values


class Module:
    """The functions that torch calls on the module of a device."""

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        pass


def _factory(operation: Any) -> Callable[..., Tensor]:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        name = operation._schema.name.removeprefix("aten::")
        return DeviceTensor(_uninitialised(name, operation(*args, **kwargs)))

    return make


def _register() -> torch.library.Library:
    _setup_privateuseone_for_python_backend("gpu", backend_module=Module())
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in (
        "empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step",
        "linspace", "eye", "eye.m",
    ):  # fmt: skip
        packet, _, overload = name.partition(".")
        library.impl(name, _factory(getattr(getattr(aten, packet), overload or "default")))
    library.impl(
        "_copy_from",
        lambda source, target, non_blocking=False: copy_values(target, source, non_blocking),
    )
    return library


_library = _register()
DEVICE = torch.device("gpu", 0)


def _launch_nothing(kernel: Any, grid: Any) -> Callable[..., None]:
    """Replaces `kernel[grid]`, and checks the kernel's arguments."""

    def launch(*args: Any, **options: Any) -> None:
        for value in args:
            assert not isinstance(value, Tensor) or (
                isinstance(value, DeviceTensor) and value.is_contiguous()
            ), f"{kernel.fn.__name__} needs contiguous tensors of the device, not {value!r}"

    return launch


def _answered(wrapper: Callable[..., Any], search: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper of a kernel: runs its operations and returns the result of the CPU."""

    def run(*args: Any) -> Any:
        if not isinstance(args[0], DeviceTensor):
            return wrapper(*args)
        wrapper(*args)
        with recorded_waits(None):
            return tree_map(to_wrapped, search(*tree_map(on_host_of, args)))

    return run


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """In this context the kernels are emulated, and copies to the device need not be complete."""
    from pointup.geometry import kernels, neighbors, packed, thinning
    from pointup.geometry.kernels import insertion, knn
    from pointup.geometry.thinning import sample_by_spacing
    from pointup.model import upsampler
    from pointup.upsampling.single_pass import candidates

    def take(pos: Tensor, k: int) -> bool:
        return pos.device.type == "gpu" and pos.shape[1:] == (3,) and k <= kernels.MAX_K

    def search_own_first(*arguments: Any) -> tuple[Tensor, Tensor]:
        squared, index = neighbors._search_trees(*arguments)
        if arguments[0] is arguments[2]:
            neighbors.put_own_first(index)
        return squared, index

    patches = [
        # Inference tensors can't be wrapped.
        (candidates, "_run", torch.no_grad()(candidates._run.__wrapped__)),
        (torch.accelerator, "synchronize", lambda device=None: note_wait("synchronize")),
        (type(knn.knn_kernel), "__getitem__", _launch_nothing),
        (packed, "COPIED_AHEAD", ("gpu",)),
        (kernels, "take", take),
        (knn, "knn_search", _answered(knn.knn_search, search_own_first)),
        (insertion, "settle", _answered(insertion.settle, lambda *a: thinning.settle(*a[:4]))),
        # Thinning on a GPU keeps other points; with the CPU's, the results can be compared.
        (upsampler, "sample_by_spacing", _answered(sample_by_spacing, sample_by_spacing)),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, value in patches:
            stack.enter_context(mock.patch.object(place, name, value))
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)
        yield


@contextlib.contextmanager
def like_mps() -> Iterator[None]:
    """In this context, within `emulated`, the device has no float64 and copies must be complete."""
    from pointup import metrics
    from pointup.geometry import packed

    def widest_float(device: torch.device) -> torch.dtype:
        return torch.float64 if device.type == "cpu" else torch.float32

    with (
        mock.patch.object(packed, "widest_float", widest_float),
        mock.patch.object(metrics, "widest_float", widest_float),
        mock.patch.object(packed, "COPIED_AHEAD", ()),
        mock.patch(f"{__name__}.has_float64", False),
    ):
        yield
