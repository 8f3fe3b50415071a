"""Procedural shapes and landscapes, a simulated laser scanner, and the default dataset."""
