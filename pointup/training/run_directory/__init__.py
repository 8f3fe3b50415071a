"""Files of a run: lock, checkpoints, metrics.jsonl, and the log of every process."""
