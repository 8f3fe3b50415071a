"""Processes of a run: Accelerator, devices, process group, signals, reduction of gradients."""
