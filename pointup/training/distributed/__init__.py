"""The processes of a run: devices, process group, signals and the reduction of gradients."""
