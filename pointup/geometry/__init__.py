"""Neighbours, thinning and surfaces."""
