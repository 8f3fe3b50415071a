"""Data-dependent initialization: features of points differ from the first training step on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pointup.geometry.packed import ptr_from_sizes

SEED = 0
# Few enough for one block, so that statistics cover all children of all points.
POINTS_PER_SURFACE = 80


@torch.no_grad()
def calibrate(model: nn.Module, layers: Iterable[tuple[nn.Linear, float]]) -> None:
    """Centre and scale the output of each layer on reference clouds.

    Neighbourhoods are similar, so that with random weights their features are nearly constant, a
    few per cent apart, and a network learns constants first. This sets weight and bias of each
    layer such that each output channel has mean 0 and the standard deviation given for the layer,
    in the order in which the model calls the layers (Mishkin and Matas 2016, "All you need is a
    good init"; centred per channel as by Kingma and Dhariwal 2018, "Glow").
    """
    handles = [layer.register_forward_hook(_Standardize(std)) for layer, std in layers]
    pos, ptr = reference_clouds()
    training = model.training
    model.eval()(pos, ptr, 2.0)
    model.train(training)
    for handle in handles:
        handle.remove()


class _Standardize:
    """Forward hook that standardizes a layer by its first output, and ignores later ones."""

    def __init__(self, std: float) -> None:
        self.std, self.done = std, False

    @torch.no_grad()
    def __call__(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        if self.done:
            return None
        assert isinstance(layer, nn.Linear)
        self.done = True
        values = output.flatten(0, -2)
        scale = self.std / values.std(0).clamp(min=1e-6)
        layer.weight.mul_(scale.unsqueeze(1))
        layer.bias.copy_((layer.bias - values.mean(0)) * scale)
        return (output - values.mean(0)) * scale


def reference_clouds() -> tuple[Tensor, Tensor]:
    """Points (N, 3) and ptr (B+1,) of a plane, a sphere, a crease, a noisy wave, a curve and a
    Gaussian cloud; the same at each call."""
    generator = torch.Generator().manual_seed(SEED)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float32) * 2 - 1

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    n = POINTS_PER_SURFACE
    flat, wave, ramp = random(n, 2), random(n, 2), random(n, 2)
    sphere = noise(n, 3)
    along = random(n, 1) * 6
    clouds = [
        torch.cat([flat, 0 * flat[:, :1]], dim=1),
        sphere / sphere.norm(dim=1, keepdim=True),
        torch.cat([ramp, ramp[:, :1].abs()], dim=1),
        torch.cat([wave, 0.2 * torch.sin(5 * wave[:, :1]) + 0.02 * noise(n, 1)], dim=1),
        torch.cat([along, torch.sin(along), torch.cos(along)], dim=1),
        noise(n, 3),
    ]
    return torch.cat(clouds), ptr_from_sizes(torch.tensor([n] * len(clouds)))
