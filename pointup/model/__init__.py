"""The upsampler network: layers, options, model directories."""
