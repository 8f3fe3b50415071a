"""`pointup push`: a model with a model card, to a folder or to the Hugging Face Hub."""
