"""Upsampling of clouds of any size with a trained model, the same however they are cut up."""

from pointup.upsampling.in_memory import upsample

__all__ = ["upsample"]
