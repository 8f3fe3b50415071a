"""Runs a model in the dtype of autocast, with all weights cast once, in one launch.

Autocast casts each weight at each use, its gradient in the backward pass, and features to float32
and back around each normalisation: these were more than half of the operations of a step.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

LARGEST_IN_FP16 = 1e3
"""Bound of described positions in float16, which ends at 65,504. Of two points much closer to each
other than to all others, products of positions in units of their spacing exceed it."""


def described_in(dtype: torch.dtype, described: Tensor) -> Tensor:
    """Described positions in the dtype of features; in float16 within `LARGEST_IN_FP16`."""
    if dtype == torch.float16:
        described = described.clamp(-LARGEST_IN_FP16, LARGEST_IN_FP16)
    return described.to(dtype)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on a device; None where autocast is off."""
    if not torch.amp.is_autocast_available(device.type):
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def in_precision(model: Model, dtype: torch.dtype, exact: Collection[str] = ()) -> Model:
    """A copy of the model with its weights in `dtype`, except those named in `exact`.

    Layers of the copy normalise and multiply in `dtype` and accumulate in float32. Gradients reach
    the weights of the model. Use the copy for one forward pass and its backward pass.
    """
    weights = [p for name, p in model.named_parameters() if name not in exact]
    flat = torch.cat([weight.flatten() for weight in weights]).to(dtype)
    parts = flat.split([weight.numel() for weight in weights])
    cast = {id(weight): part.view_as(weight) for weight, part in zip(weights, parts, strict=True)}
    return _with_weights(model, cast)


def _with_weights(module: Model, weights: dict[int, Tensor]) -> Model:
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_parameters"] = {
        name: weight if weight is None else weights.get(id(weight), weight)
        for name, weight in module._parameters.items()
    }
    copy.__dict__["_modules"] = {
        name: child if child is None else _with_weights(child, weights)
        for name, child in module._modules.items()
    }
    return copy
