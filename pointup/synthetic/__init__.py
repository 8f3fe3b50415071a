"""Triangles of made-up objects and landscapes, and a made-up scanner."""
