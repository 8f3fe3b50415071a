"""Files of a run: lock, checkpoints, and the log of every process."""
