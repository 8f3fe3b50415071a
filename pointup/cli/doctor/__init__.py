"""`pointup doctor`: checks a machine, a dataset or a run directory."""
