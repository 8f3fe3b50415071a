"""What a run detects and survives: hangs, lack of memory, non-finite steps."""
