"""Tensors of the emulated device, which wrap tensors on the CPU, and their operations."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from emulated_log import note_copy, note_launch, note_wait
from emulated_memory import memory
from torch import Tensor
from torch.utils._pytree import tree_map

aten = torch.ops.aten
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


class DeviceTensor(Tensor):
    """A tensor on the device; `host` has its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        if host.dtype == torch.float64 and not module.has_float64:
            raise TypeError("the device has no float64")
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


def copy_values(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, DeviceTensor):
        note_wait("copy to the CPU")
    elif not isinstance(source, DeviceTensor):
        note_copy(source, non_blocking)
    note_launch("copy_")
    on_host_of(target).copy_(on_host_of(source))
    return target


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.copy_.default:
        return copy_values(*args, **kwargs)
    if func is aten._to_copy.default and torch.device(kwargs.get("device", "gpu")).type == "cpu":
        note_wait("copy to the CPU")
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
        note_wait(WAITING[func])
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        note_wait("repeat_interleave")
    if not is_view and not NO_LAUNCH.match(name):
        note_launch(str(func).removeprefix("aten."))
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
                note_copy(index, non_blocking=False)
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                note_wait("a mask as an index")
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
        self.has_float64 = True

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
        note_wait("synchronize")

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


def factory(operation: Any) -> Callable[..., Tensor]:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        name = operation._schema.name.removeprefix("aten::")
        if not NO_LAUNCH.match(name):
            note_launch(name)
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
