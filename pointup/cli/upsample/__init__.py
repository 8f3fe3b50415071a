"""`pointup upsample`: upsamples survey files and shapes."""
