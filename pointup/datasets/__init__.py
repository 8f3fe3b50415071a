"""Pair datasets: making them from surveys and meshes, reading them, packing them into batches."""
