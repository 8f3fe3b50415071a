"""`pointup evaluate`: metrics of predictions on shapes, surveys and pair datasets."""
