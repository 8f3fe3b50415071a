"""Geometry of packed point clouds: neighbour search, thinning, local geometry, surfaces."""
