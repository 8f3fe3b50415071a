"""What a run shows: trackers, tables, the progress bar."""
