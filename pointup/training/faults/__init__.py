"""Failure handling of a run: hangs, out-of-memory errors, non-finite steps, diverging processes."""
