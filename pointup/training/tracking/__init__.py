"""Output of a run for its user: trackers, tables, the progress bar."""
