"""`pointup inspect`: statistics, bad samples and pictures of a pair dataset."""
