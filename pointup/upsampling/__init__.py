"""Upsampling of clouds of any size with a trained model: the result does not depend on tiles."""

from pointup.upsampling.in_memory import upsample

__all__ = ["upsample"]
