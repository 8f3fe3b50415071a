"""pointup: training and use of point cloud upsamplers, on one CPU or many GPUs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointup.datasets.sampler import TokenBudgetBatchSampler
    from pointup.losses import chamfer_distance
    from pointup.model.upsampler import Upsampler
    from pointup.upsampling import upsample

__version__ = "0.1.0"
__all__ = ["TokenBudgetBatchSampler", "Upsampler", "chamfer_distance", "upsample"]

_HOME = {
    "TokenBudgetBatchSampler": "pointup.datasets.sampler",
    "Upsampler": "pointup.model.upsampler",
    "chamfer_distance": "pointup.losses",
    "upsample": "pointup.upsampling",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `import pointup` and `pointup --help` need not load torch.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pointup' has no attribute {name!r}")
