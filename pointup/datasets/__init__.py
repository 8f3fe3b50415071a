"""From files to packed batches; knows nothing of the model."""
