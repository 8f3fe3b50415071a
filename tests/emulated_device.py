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
import re
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
ROOT = Path(__file__).parent.parent
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
RANDOM = re.compile(r"bernoulli|dropout|rand|uniform|normal|multinomial|exponential")
WAITING = {
    aten._local_scalar_dense.default: "value",
    aten.is_nonzero.default: "value",
    aten.equal.default: "equal",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.unique_consecutive.default: "unique",
    aten.unique_dim.default: "unique",
    aten.bincount.default: "bincount",
}
NO_LAUNCH = re.compile(
    r"^(empty|new_empty|empty_like|empty_strided|new_empty_strided|set_|resize_|_local_scalar_dense"
    r"|_unsafe_view|detach|lift_fresh|is_same_size|sym_)"
)


@dataclass
class Log:
    """The operations, waits and copies of a piece of work on the device."""

    operations: Counter[str] = field(default_factory=Counter)
    """Operations that launch work, by name; views and allocations launch none."""
    places: Counter[str] = field(default_factory=Counter)
    """The operations by the calling line of the package, if `trace` is on."""
    waits: list[tuple[str, str]] = field(default_factory=list)
    """Kind and place of each operation that the host waited for."""
    blocking_copies: list[tuple[int, str]] = field(default_factory=list)
    """Bytes and place of each copy to the device that the host waited for."""
    copied_bytes: int = 0
    """Total bytes copied to the device."""
    launches: Counter[str] = field(default_factory=Counter)
    """Launches of Triton kernels, which are part of the operations."""

    @property
    def num_operations(self) -> int:
        return self.operations.total()


class _State(threading.local):
    quiet = False
    """Whether operations of this thread belong to the emulation itself."""


class Memory:
    """Bytes of live storages, their peak, and a limit."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.storages: dict[int, list[int]] = {}
        self.allocated = self.peak = 0
        self.limit = 1 << 60

    def hold(self, host: Tensor) -> _Held:
        storage = host.untyped_storage()
        key = storage._cdata
        with self.lock:
            if key in self.storages:
                self.storages[key][1] += 1
            else:
                size = storage.nbytes()
                if self.allocated + size > self.limit:
                    raise torch.OutOfMemoryError(
                        f"CUDA out of memory. Tried to allocate {size} bytes"
                    )
                self.storages[key] = [size, 1]
                self.allocated += size
                self.peak = max(self.peak, self.allocated)
        return _Held(self, key, storage)

    def release(self, key: int) -> None:
        with self.lock:
            entry = self.storages[key]
            entry[1] -= 1
            if not entry[1]:
                del self.storages[key]
                self.allocated -= entry[0]


class _Held:
    """Keeps a storage counted while a tensor of it lives."""

    def __init__(self, memory: Memory, key: int, storage: Any) -> None:
        self.memory, self.key, self.storage = memory, key, storage

    def __del__(self) -> None:
        self.memory.release(self.key)


state, memory = _State(), Memory()
log, trace = Log(), False


class DeviceTensor(Tensor):
    """A tensor on the device; `host` has its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        wrapper = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, device=torch.device("gpu", 0), requires_grad=False,
        )  # fmt: skip
        wrapper.host = host
        wrapper.held = memory.hold(host)
        return wrapper

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy: Tensor = DeviceTensor(self.host.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        return copy

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


def _place() -> str:
    """The innermost line of the package, or of train.py, on the stack."""
    for frame in reversed(traceback.extract_stack(limit=60)):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and "tests" not in path.parts:
            return f"{path.relative_to(ROOT)}:{frame.name}: {frame.line}"
    return "elsewhere"


def _note_launch(name: str) -> None:
    if state.quiet:
        return
    log.operations[name] += 1
    if trace:
        log.places[f"{_place()}  [{name}]"] += 1


def _note_wait(what: str) -> None:
    if not state.quiet:
        log.waits.append((what, _place()))


def _note_copy(values: Tensor, non_blocking: bool) -> None:
    if state.quiet:
        return
    size = values.numel() * values.element_size()
    log.copied_bytes += size
    if not non_blocking and size:
        log.blocking_copies.append((size, _place()))


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, DeviceTensor):
        _note_wait("copy to the CPU")
    elif not isinstance(source, DeviceTensor):
        _note_copy(source, non_blocking)
    _note_launch("copy_")
    on_host_of(target).copy_(on_host_of(source))
    return target


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.copy_.default:
        return _copy(*args, **kwargs)
    if func is aten._to_copy.default and torch.device(kwargs.get("device", "gpu")).type == "cpu":
        _note_wait("copy to the CPU")
        with torch.no_grad():
            return func(args[0].host, **kwargs)
    schema = func._schema
    _check(func, args, kwargs)
    is_device = torch.device(kwargs.get("device") or "gpu").type == "gpu"
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    returns = schema.returns
    is_view = bool(returns) and all(
        value.alias_info is not None and not value.alias_info.is_write for value in returns
    )
    name = func._schema.name.removeprefix("aten::")
    if func in WAITING:
        _note_wait(WAITING[func])
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        _note_wait("repeat_interleave")
    if not is_view and not NO_LAUNCH.match(name):
        _note_launch(str(func).removeprefix("aten."))
    host_args, host_kwargs = tree_map(on_host_of, (args, kwargs))
    if RANDOM.search(name):
        with module.own_generator():
            result = func(*host_args, **host_kwargs)
    else:
        result = func(*host_args, **host_kwargs)
    if not is_device:
        return result
    _uninitialised(name, result)
    # An operation that writes to an argument returns that same tensor.
    written = [
        kwargs.get(argument.name, args[place] if place < len(args) else None)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if written and returns:
        return written[0] if len(returns) == 1 else tuple(written)
    return tree_map(to_wrapped, result)


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse tensors of one dimension or more on both; record masks, which wait for their count."""
    values: list[Any] = []
    tree_map(values.append, (args, kwargs))
    if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        for index in args[1]:
            if isinstance(index, Tensor) and not isinstance(index, DeviceTensor):
                _note_copy(index, non_blocking=False)
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                _note_wait("a mask as an index")
        values = [args[0]]
    strangers = [
        value
        for value in values
        if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) and value.dim() > 0
    ]
    if strangers:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but got one of shape "
            f"{tuple(strangers[0].shape)} on cpu in {func}"
        )


class Module:
    """The functions that torch calls on the module of a device."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0).get_state()

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def manual_seed_all(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed + 1).get_state()

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.generator.clone()

    def set_rng_state(self, new_state: Tensor, device: Any = None) -> None:
        self.generator = new_state.clone()

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return memory.limit - memory.allocated, memory.limit

    def memory_allocated(self, device: Any = None) -> int:
        return memory.allocated

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return memory.peak

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        memory.peak = memory.allocated

    def synchronize(self, device: Any = None) -> None:
        _note_wait("synchronize")

    @contextlib.contextmanager
    def own_generator(self) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.generator)
        try:
            yield
        finally:
            self.generator = torch.get_rng_state()
            torch.set_rng_state(outside)


module = Module()


def _factory(operation: Any) -> Callable[..., Tensor]:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        name = operation._schema.name.removeprefix("aten::")
        if not NO_LAUNCH.match(name):
            _note_launch(name)
        if RANDOM.search(name):
            with module.own_generator():
                return DeviceTensor(operation(*args, **kwargs))
        return DeviceTensor(_uninitialised(name, operation(*args, **kwargs)))

    return make


def _uninitialised(name: str, values: Any) -> Any:
    """Fresh memory: NaN, so that tests detect reading it; 0 for types that may be indices."""
    if name.startswith(("empty", "new_empty")):
        values.fill_(torch.nan if values.is_floating_point() else 0)
    return values


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "gpu"
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


_casts: dict[int, tuple[Tensor, Tensor]] = {}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """As `at::autocast::cached_cast`: weights are cast once while autocast is on."""
    if not _eligible(value) or value.dtype == dtype:
        return value
    can_cache = (
        dtype != torch.float32
        and value.dtype == torch.float32
        and value.requires_grad
        and value.is_leaf
        and torch.is_autocast_cache_enabled()
    )
    if not can_cache:
        return value.to(dtype)
    if id(value) not in _casts:
        _casts[id(value)] = value, value.to(dtype)
    return _casts[id(value)][1]


def _autocast(operation: Any, policy: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if policy == "lower":
                dtype = torch.get_autocast_dtype("gpu")
                args, kwargs = tree_map(lambda value: _cast(value, dtype), (args, kwargs))
            elif policy == "float32":
                args, kwargs = tree_map(lambda value: _cast(value, torch.float32), (args, kwargs))
            elif policy == "float32 unless reported" and kwargs.get("dtype") is None:
                if _eligible(args[0]):
                    kwargs["dtype"] = torch.float32
            elif policy == "widest":
                found: list[Any] = []
                tree_map(found.append, (args, kwargs))
                if any(_eligible(value) and value.dtype == torch.float32 for value in found):
                    args, kwargs = tree_map(lambda v: _cast(v, torch.float32), (args, kwargs))
            return operation(*args, **kwargs)

    return run


def _register() -> list[torch.library.Library]:
    _setup_privateuseone_for_python_backend("gpu", backend_module=module)
    factories = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in (
        "empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step",
        "linspace", "eye", "eye.m", "randperm",
    ):  # fmt: skip
        packet, _, overload = name.partition(".")
        factories.impl(name, _factory(getattr(getattr(aten, packet), overload or "default")))
    factories.impl(
        "_copy_from",
        lambda source, target, non_blocking=False: _copy(target, source, non_blocking),
    )
    fallback = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel)
    casts = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    text = HEADER.read_text().replace("\\\n", "\n")
    for macro, policy in (
        ("LOWER_PRECISION_FP", "lower"),
        ("FP32", "float32"),
        ("FP32_SET_OPT_DTYPE", "float32 unless reported"),
        ("PROMOTE", "widest"),
    ):
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?)\n\s*\n", text, re.DOTALL)
        assert body is not None
        for packet, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1]):
            operation = getattr(getattr(aten, packet, None), overload or "default", None)
            if operation is None:
                continue
            name = f"{packet}.{overload}" if overload else packet
            casts.impl(name, _autocast(operation, policy))
    return [factories, fallback, casts]


_libraries = _register()


DEVICE = torch.device("gpu", 0)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """In this context, operations of this thread belong to the emulation and are not recorded."""
    before, state.quiet = state.quiet, True
    try:
        yield
    finally:
        state.quiet = before


@contextlib.contextmanager
def recorded(places: bool = False) -> Iterator[Log]:
    """Log the work in this context; with `places` also the calling lines, which is slow."""
    global log, trace
    outside = log, trace
    log, trace = Log(), places
    try:
        yield log
    finally:
        log, trace = outside


@contextlib.contextmanager
def memory_limit(limit: int) -> Iterator[None]:
    """In this context, allocations beyond a number of bytes raise `torch.OutOfMemoryError`."""
    memory.limit = limit
    try:
        yield
    finally:
        memory.limit = 1 << 60


def _clear_casts() -> None:
    _casts.clear()


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
        log.launches[kernel.fn.__name__] += 1
        _note_launch(kernel.fn.__name__)

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

    from pointup.geometry import insertion_radii as insertion
    from pointup.geometry import kernels, neighbors, thinning
    from pointup.geometry.kernels import farthest, knn, nearest
    from pointup.geometry.kernels import insertion as kernels_of_insertion
    from pointup.model import upsampler as model
    from pointup.training import optimizer
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

    def sample(pos: Tensor, ptr: Tensor, bounds: list[int], counts: list[int]) -> Tensor:
        return thinning._sample_buckets(pos, bounds, counts)

    accelerator = torch.accelerator
    patches = [
        (accelerator, "synchronize", module.synchronize),
        (torch, "clear_autocast_cache", _clear_casts),
        # Files are written from the wrapped tensors, like a device's own serialisation.
        (checkpoint, "save_file", _from_host(checkpoint.save_file)),
        (torch, "save", _from_host(torch.save)),
        # Inference tensors can't be wrapped.
        (candidates, "_run", torch.no_grad()(candidates._run.__wrapped__)),
        (JITFunction, "__getitem__", _launch_nothing),
        (_foreach_utils, "_foreach_supported_types", [Tensor, torch.nn.Parameter, DeviceTensor]),
        (optimizer, "FUSED", {"gpu"}),
        (kernels, "take", take),
        (knn, "knn_search", _answered(knn.knn_search, search_own_first)),
        (nearest, "nearest_index", _answered(nearest.nearest_index, search_one)),
        (nearest, "nearest_index_both", _answered(nearest.nearest_index_both, search_both)),
        (farthest, "farthest_points", _answered(farthest.farthest_points, sample)),
        (kernels_of_insertion, "settle", _answered(kernels_of_insertion.settle, insertion.settle)),
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
