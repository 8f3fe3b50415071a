"""Autocast of the emulated device: the operations and rules of CUDA's, from the header of torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
POLICIES = (
    ("LOWER_PRECISION_FP", "lower"),
    ("FP32", "float32"),
    ("FP32_SET_OPT_DTYPE", "float32 unless reported"),
    ("PROMOTE", "widest"),
)


def cast_operations() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Name and replacement of each operation that CUDA's autocast casts."""
    text = HEADER.read_text().replace("\\\n", "\n")
    for macro, policy in POLICIES:
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?)\n\s*\n", text, re.DOTALL)
        assert body is not None
        for packet, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1]):
            operation = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if operation is not None:
                name = f"{packet}.{overload}" if overload else packet
                yield name, _autocast(operation, policy)


def clear_casts() -> None:
    _casts.clear()


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
