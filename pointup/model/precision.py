"""A model in the precision of autocast: weights are cast once, all in one launch.

Autocast itself casts each weight where it is used, its gradient on the way back, and features to
float32 and back around every normalisation: more than half of the operations of a step were that.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on a device, where it is on."""
    if not torch.amp.is_autocast_available(device.type):
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def in_precision(model: Model, dtype: torch.dtype, exact: Collection[str] = ()) -> Model:
    """The model with its weights in `dtype`, but for the `exact` ones; gradients go to the model's.

    Layers of the copy normalise and multiply in `dtype`, and sum in float32 inside. It is a view
    for one forward pass and the backward pass of it.
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
