"""The upsampler network: its layers, its options and its files."""
